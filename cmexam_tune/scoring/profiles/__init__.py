"""Scoring profiles: who reads the answer how, what stays in a denominator, and which BLEU and ROUGE are meant.

The same outputs get different scores from different published scripts. Each file here holds one script's rules exactly,
odd ones included, so that a gap between two papers can be explained; `standard` is what this project reports. A new
profile is a new file with `PROFILE`; the file's name is the profile's (with `_` for `-`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from cmexam_tune.core import variants
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.scoring.text_metrics import PairStatistics


class Reading(NamedTuple):
    """What a profile's parser reads in an output; None is no answer or no explanation."""

    answer: str | None
    explanation: str | None


@dataclass(frozen=True)
class Profile:
    """One way of turning outputs into scores."""

    name: str
    summary: str
    """One line: parser, denominator, text metrics."""
    read: Callable[[str, Question], Reading]
    statistics: Callable[[Sequence[str], Sequence[str]], list[PairStatistics]] | None
    """Hypotheses and references to per-pair statistics; None where the script scores no explanations."""
    signature: Mapping[str, str]
    smoothing: Literal["exp", "none"] = "exp"
    unread: Literal["wrong", "dropped"] = "wrong"
    """Whether an unreadable output counts as wrong or leaves the denominator of accuracy, precision, recall and F1."""
    no_reference: Literal["skipped", "empty"] = "skipped"
    """Whether a question without explanation is left out of the text metrics or scored against an empty text."""
    macro: tuple[str, str] | None = None
    """Facets (category, class) for `accuracy_macro`: the mean over categories of the mean over their classes."""


class Scorer(Protocol):
    """What a file in this folder provides."""

    @property
    def PROFILE(self) -> Profile:
        """The rules; their name is the file's."""


def names() -> tuple[str, ...]:
    """Return the names of all profiles; those of this project, `standard...`, come first."""
    found = sorted(variants.names("profiles"), key=lambda name: not name.startswith("standard"))
    return tuple(name.replace("_", "-") for name in found)


def get(name: str) -> Profile:
    """Return a profile by its name, or by the name of a module of the caller's own (`my_lab.rules`).

    Raises:
        ConfigError: there is none of that name; the message suggests the nearest.
    """
    if "." not in name and name not in names():
        raise ConfigError(f"profile {name!r} is unknown{variants.suggest(name, names())}; known: {', '.join(names())}.")
    profile: Profile = variants.load("profiles", name.replace("-", "_")).PROFILE
    return profile
