"""Passages beside a question: those that share the most with it, by BM25 over character bigrams.

Chinese is written without spaces, and pairs of characters find words without a dictionary. The weights are Lucene's
(Robertson and Zaragoza 2009, with an inverse document frequency that is never negative).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from cmexam_tune.core.normalise import plain
from cmexam_tune.core.schema import Question

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

K1, B = 1.5, 0.75
"""How soon a repeated bigram stops to count, and how much a long passage has to hold for the same weight."""
HEAD, TAIL = "参考资料：\n", "\n\n请结合以上资料（可能无关）回答下面的题目。\n"


@dataclass(frozen=True)
class Passage:
    """A text of a file of passages, one JSON object a line."""

    id: str
    text: str


def bigrams(text: str) -> Counter[str]:
    """Return how often each pair of neighbouring characters occurs in the plain form of a text."""
    letters = plain(text)
    return Counter(letters[i : i + 2] for i in range(max(len(letters) - 1, min(len(letters), 1))))


@dataclass(frozen=True)
class Bm25:
    """An index of passages."""

    passages: Sequence[Passage]
    _row: dict[str, int] = field(default_factory=dict)
    """Bigram -> its row of the weights."""

    @cached_property
    def _weights(self) -> "csr_matrix":
        """Sparse [bigrams, passages]: what a bigram of the question adds to the score of each passage."""
        import numpy as np
        from scipy import sparse

        counts = [bigrams(passage.text) for passage in self.passages]
        rows = [self._row.setdefault(pair, len(self._row)) for passage in counts for pair in passage]
        columns = np.repeat(np.arange(len(counts)), [len(passage) for passage in counts])
        times = np.array([count for passage in counts for count in passage.values()], dtype=np.float64)
        lengths = np.array([passage.total() for passage in counts], dtype=np.float64)
        holding = np.bincount(rows, minlength=len(self._row))
        rarity = np.log1p((len(counts) - holding + 0.5) / (holding + 0.5))
        damping = K1 * (1 - B + B * lengths / max(lengths.mean(), 1e-9))
        values = rarity[rows] * times / (times + damping[columns])
        return sparse.csr_matrix((values, (rows, columns)), shape=(len(self._row), len(counts)))

    def scores(self, texts: Iterable[str]) -> "NDArray[np.float64]":
        """Return [passages] scores of some texts together; a bigram that they repeat counts as often."""
        import numpy as np

        weights = self._weights
        asked = sum(map(bigrams, texts), Counter[str]())
        known = {self._row[pair]: count for pair, count in asked.items() if pair in self._row}
        if not known:
            return np.zeros(len(self.passages))
        scores: NDArray[np.float64] = weights[list(known)].T @ np.array(list(known.values()), dtype=np.float64)
        return scores

    def best(self, question: Question, k: int) -> list[Passage]:
        """Return at most k passages that share the most with stem and options, best first, none that shares nothing."""
        import numpy as np

        scores = self.scores([question.stem, *question.options.values()])
        order = np.argsort(-scores, kind="stable")[:k]
        return [self.passages[i] for i in order if scores[i] > 0]


RETRIEVERS = {"bm25": Bm25}
"""`prompt.context.by` -> what finds passages."""


def words(passages: Sequence[Passage], room: int) -> str:
    """Return what stands in front of a question, its passages cut to at most `room` characters together."""
    if not passages:
        return ""
    # Short passages leave their room to the longer ones.
    lengths, left, cut = sorted(len(passage.text) for passage in passages), room, room
    for place, length in enumerate(lengths):
        cut = left // (len(lengths) - place)
        if length > cut:
            break
        left -= length
    listed = "\n".join(f"[{number}] {passage.text[:cut]}" for number, passage in enumerate(passages, 1))
    return f"{HEAD}{listed}{TAIL}"
