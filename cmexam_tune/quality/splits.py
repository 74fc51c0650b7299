"""Questions that belong together: the same case, the same stem, or what the exam itself groups."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.normalise import (
    SHORTEST_CASE,
    case_of,
    plain,
    question_text,
)
from cmexam_tune.core.schema import GROUP, Question


class Cases:
    """The cases of one file: which of its questions share theirs with another."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[int, str]]] = {}

    def add(self, place: int, question: Question) -> None:
        """Remember the question at `place`, unless the exam has grouped it."""
        alone = len(question.stem) <= SHORTEST_CASE or GROUP in question.facets
        if not alone and (case := case_of(question.stem)):
            self._places.setdefault(hash(case), []).append((place, question.stem))

    def shared(self) -> dict[int, int]:
        """Return place -> number of its group (from 0), for questions that share their case."""
        # The same stem met twice is no case; told by the raw stems first, because `plain` is slow.
        candidates = (places for places in self._places.values() if len({stem for _, stem in places}) > 1)
        groups = [places for places in candidates if len({plain(stem) for _, stem in places}) > 1]
        return {place: number for number, places in enumerate(groups) for place, _ in places}


def parse_shares(text: str) -> dict[str, float]:
    """Return part -> share of `train=0.8,val=0.1,test=0.1`; shares are divided by their sum.

    Raises:
        ConfigError: an entry is no `name=share`, a name is there twice or not plain, or a share is not above 0.
    """
    shares: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not name.replace("-", "").replace("_", "").isalnum() or name in shares or not 0 < share < float("inf"):
            raise ConfigError(f"--split: {entry.strip()!r} is no name=share, for example train=0.8,val=0.1,test=0.1.")
        shares[name] = share
    if len(shares) < 2:
        raise ConfigError("--split: two parts at least, for example train=0.9,val=0.1.")
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def assign(
    questions: Iterable[Question], shares: Mapping[str, float], seed: int, stratify: str | None = None
) -> list[str]:
    """Return the part of each question: groups stay whole, and each value of the facet `stratify` is shared alike.

    A group is what has the same `group`, the same case, or the same stem and options. The same questions, shares and
    seed give the same parts.
    """
    leader: list[int] = []
    first: dict[tuple[str, int], int] = {}
    strata: list[str] = []

    def root(place: int) -> int:
        # Union-find with path halving: near-constant time however long the chains of shared texts and cases are.
        while leader[place] != place:
            leader[place] = place = leader[leader[place]]
        return place

    for place, question in enumerate(questions):
        leader.append(place)
        strata.append(question.facets.get(stratify, "") if stratify else "")
        for key in _keys(question):
            other_root = root(first.setdefault(key, place))
            leader[root(place)] = other_root
    groups: dict[int, list[int]] = {}
    for place in range(len(leader)):
        groups.setdefault(root(place), []).append(place)
    return _share_out(list(groups.values()), strata, shares, Random(seed))


def _keys(question: Question) -> Iterable[tuple[str, int]]:
    yield "text", hash(question_text(question.stem, question.options))
    if group := question.facets.get(GROUP):
        yield "group", hash(group)
    if case := case_of(question.stem):
        yield "case", hash(case)


def _share_out(
    groups: Sequence[Sequence[int]], strata: Sequence[str], shares: Mapping[str, float], rng: Random
) -> list[str]:
    """Give each group, the largest first, to the part that is furthest below its share of the group's stratum."""
    parts = [""] * len(strata)
    by_stratum: dict[str, list[Sequence[int]]] = {}
    for group in groups:
        by_stratum.setdefault(strata[group[0]], []).append(group)
    for stratum in sorted(by_stratum):
        members = by_stratum[stratum]
        # The largest first, so that small groups fill what they leave. The sort keeps those of one size shuffled.
        rng.shuffle(members)
        members.sort(key=len, reverse=True)
        total, assigned = sum(map(len, members)), dict.fromkeys(shares, 0)
        for group in members:
            missing = {name: share * total - assigned[name] for name, share in shares.items()}
            part = max(missing, key=missing.__getitem__)
            assigned[part] += len(group)
            for place in group:
                parts[place] = part
    return parts
