"""Pairs of similar texts without comparing all: MinHash over character 5-grams and locality-sensitive hashing.

Written with numpy, because datasketch hashes one text at a time: CMB-train against both test sets is 350,000 texts
with 30 million 5-grams, each under 128 permutations.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from cmexam_tune.core.normalise import SHINGLE
from cmexam_tune.core.progress import Progress

PERMUTATIONS = 128
ROWS = 4
"""Values in a band: with 32 bands of 4 a pair of Jaccard 0.7 is met with probability 0.9998, of 0.5 with 0.87."""
SLACK = 0.12
"""Candidates are kept from this far below the threshold on, by their estimate (standard deviation at most 0.044)."""
NEIGHBOURS = 16
"""Nearest candidates that are kept for each text; only texts that are made from a template have more."""
_BLOCK = 1 << 17
_COMPARED = 8
"""Comparisons for each text and band on average; most texts have none, so this is for buckets of thousands."""
_FEWEST_COMPARED = 1 << 17
_MOST_WAITING = 32
"""Candidates for each text that wait until the nearest are chosen."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio, rounded down to an odd number: the multiplier of Fibonacci hashing."""

Signatures = NDArray[np.uint32]


def signatures(texts: Sequence[str]) -> Signatures:
    """Return MinHash signatures (Broder 1997), uint32 of shape (texts, 128).

    The share of equal values in two rows estimates the Jaccard similarity of the texts' 5-grams.
    """
    random = np.random.default_rng(0)
    # h -> h * factor + offset mod 2**32, by overflow; only odd factors make it a permutation.
    factors = random.integers(0, 1 << 32, PERMUTATIONS, dtype=np.uint32) | np.uint32(1)
    offsets = random.integers(0, 1 << 32, PERMUTATIONS, dtype=np.uint32)
    values = np.empty((len(texts), PERMUTATIONS), dtype=np.uint32)
    start, progress = 0, Progress("fingerprint", "questions", len(texts), patience=1)
    while start < len(texts):
        stop, size = start, 0
        while stop < len(texts) and (size < _BLOCK or stop == start):
            size += len(texts[stop])
            stop += 1
        hashes, starts = _shingle_hashes(texts[start:stop])
        buffer = np.empty_like(hashes)
        for number in range(PERMUTATIONS):
            np.multiply(hashes, factors[number], out=buffer)
            np.add(buffer, offsets[number], out=buffer)
            values[start:stop, number] = np.minimum.reduceat(buffer, starts)
        progress.move(stop - start)
        start = stop
    progress.close()
    return values


def _shingle_hashes(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the hashes of all 5-grams, uint32 [5-grams of all texts], and the index of each text's first, int64."""
    padded = [text if len(text) >= SHINGLE else text.ljust(SHINGLE, "\0") for text in texts]
    codes = np.frombuffer("".join(padded).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    rolled = np.zeros(len(codes) - SHINGLE + 1, dtype=np.uint64)
    for place in range(SHINGLE):
        rolled = (rolled + codes[place : len(codes) - SHINGLE + 1 + place]) * _MIX
        # A product carries differences to higher bits only; the shift brings them down again.
        rolled ^= rolled >> np.uint64(29)
    lengths = np.array([len(text) for text in padded])
    ends = np.cumsum(lengths)
    # All texts are one array: the 5-grams that reach from one text into the next are left out.
    inside = np.ones(len(rolled), dtype=bool)
    for back in range(1, SHINGLE):
        inside[(ends[:-1] - back)] = False
    starts = np.concatenate([[0], np.cumsum(lengths - SHINGLE + 1)[:-1]])
    return (rolled[inside] >> np.uint64(32)).astype(np.uint32), starts


def candidates(minhashes: Signatures, wanted: NDArray[np.bool_], threshold: float) -> NDArray[np.int64]:
    """Return pairs of row numbers, shape (pairs, 2), whose estimated similarity comes near the threshold.

    Time and pairs are linear in the texts, whatever they are: of a text with more than `NEIGHBOURS` of them the nearest
    stay (and those of which it is among the nearest), and where thousands fall into one bucket, each is compared with
    those that share most bands with it.

    Args:
        minhashes: as `signatures` returns them.
        wanted: per text; pairs of which neither is wanted are left out.
        threshold: Jaccard similarity from 0 to 1.
    """
    count = len(minhashes)
    keys = [_band_keys(minhashes, band) for band in range(0, PERMUTATIONS, ROWS)]
    near = _Nearest(count)
    for number in range(len(keys)):
        for a, b in _neighbours([keys[number], *(keys[number - back] for back in (1, 2))]):
            relevant = wanted[a] | wanted[b]
            low, high = np.minimum(a, b)[relevant], np.maximum(a, b)[relevant]
            equal = _equal_values(minhashes, low, high)
            close = equal >= (threshold - SLACK) * PERMUTATIONS
            near.add(low[close] * count + high[close], equal[close])
    packed = near.pairs()
    return np.stack([packed // max(count, 1), packed % max(count, 1)], axis=1)


def _band_keys(minhashes: Signatures, band: int) -> NDArray[np.uint64]:
    keys = np.zeros(len(minhashes), dtype=np.uint64)
    for row in range(band, band + ROWS):
        keys = (keys ^ minhashes[:, row].astype(np.uint64)) * _MIX
        keys ^= keys >> np.uint64(31)
    return keys


def _neighbours(keys: Sequence[NDArray[np.uint64]]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield pairs of texts with an equal first key, the farther apart in their order the later, until it is too many.

    Full buckets are sorted by the other keys, as in an LSH forest (Bawa et al. 2005): what is alike stands together.
    """
    first, count = keys[0], len(keys[0])
    _, sizes = np.unique(first, return_counts=True)
    limit = max(_FEWEST_COMPARED, _COMPARED * count)
    full = int((sizes * (sizes - 1) // 2).sum()) > limit
    order = np.lexsort(keys[::-1]) if full else np.argsort(first, kind="stable")
    first = first[order]
    active = np.arange(count)
    compared = 0
    for shift in range(1, count):
        active = active[active + shift < count]
        active = active[first[active] == first[active + shift]]
        compared += len(active)
        if not len(active) or compared > limit:
            return
        yield order[active], order[active + shift]


class _Nearest:
    """Pairs with how alike they are, of which each text keeps its nearest `NEIGHBOURS`, and those it is nearest to."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._packed = [np.empty(0, dtype=np.int64)]
        self._equal = [np.empty(0, dtype=np.int64)]
        self._more = 0

    def add(self, packed: NDArray[np.int64], equal: NDArray[np.int64]) -> None:
        """Take pairs, each as its first row number times the count plus its second, and their equal values."""
        self._packed.append(packed)
        self._equal.append(equal)
        self._more += len(packed)
        if self._more > max(_BLOCK, _MOST_WAITING * self.count):
            self._prune()

    def _prune(self) -> None:
        packed, places = np.unique(np.concatenate(self._packed), return_index=True)
        equal = np.concatenate(self._equal)[places]
        ends = np.concatenate([packed // self.count, packed % self.count])
        # One integer for two keys: by text, then the pairs with most equal values (0 to 128) first.
        order = np.argsort(ends * (PERMUTATIONS + 1) + PERMUTATIONS - np.tile(equal, 2), kind="stable")
        starts = np.searchsorted(ends[order], np.arange(self.count))
        rank = np.arange(len(ends)) - starts[ends[order]]
        # `ends` lists each pair twice, once under each of its texts; the remainder is the pair.
        nearest = np.unique(order[rank < NEIGHBOURS] % len(packed)) if len(packed) else order
        self._packed, self._equal, self._more = [packed[nearest]], [equal[nearest]], 0

    def pairs(self) -> NDArray[np.int64]:
        """Return the pairs that are left, in order."""
        self._prune()
        return self._packed[0]


def _equal_values(minhashes: Signatures, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of the 128 values of each pair of rows are equal."""
    parts = [
        (minhashes[a[start : start + 4096]] == minhashes[b[start : start + 4096]]).sum(axis=1)
        for start in range(0, len(a), 4096)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
