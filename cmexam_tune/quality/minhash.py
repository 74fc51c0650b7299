"""Pairs of similar texts without comparing all: MinHash over character 5-grams and locality-sensitive hashing.

Written with numpy, because datasketch hashes one text at a time: CMB-train against both test sets is 350,000 texts
with 30 million 5-grams, each under 128 permutations.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cmexam_tune.core.normalise import SHINGLE
from cmexam_tune.core.progress import Progress

PERMUTATIONS = 128
ROWS = 4
"""Values in a band: with 32 bands of 4 a pair of Jaccard 0.7 is met with probability 0.9998, of 0.5 with 0.87."""
SLACK = 0.12
"""Candidates are kept from this far below the threshold on, by their estimate (standard deviation at most 0.044)."""
_BLOCK = 1 << 17
_LONGEST_RUN = 1000
_MIX = np.uint64(0x9E3779B97F4A7C15)

Signatures = NDArray[np.uint32]


def signatures(texts: Sequence[str], seed: int = 0) -> Signatures:
    """Return MinHash signatures, shape (texts, 128): the share of equal values estimates the Jaccard similarity."""
    random = np.random.default_rng(seed)
    factors = random.integers(0, 1 << 32, PERMUTATIONS, dtype=np.uint32) | np.uint32(1)
    offsets = random.integers(0, 1 << 32, PERMUTATIONS, dtype=np.uint32)
    found = np.empty((len(texts), PERMUTATIONS), dtype=np.uint32)
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
            found[start:stop, number] = np.minimum.reduceat(buffer, starts)
        progress.move(stop - start)
        start = stop
    progress.close()
    return found


def _shingle_hashes(texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return a hash for every 5-gram of the texts, one after another, and where each text begins."""
    padded = [text if len(text) >= SHINGLE else text.ljust(SHINGLE, "\0") for text in texts]
    codes = np.frombuffer("".join(padded).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
    rolled = np.zeros(len(codes) - SHINGLE + 1, dtype=np.uint64)
    for place in range(SHINGLE):
        rolled = (rolled + codes[place : len(codes) - SHINGLE + 1 + place]) * _MIX
        rolled ^= rolled >> np.uint64(29)
    lengths = np.array([len(text) for text in padded])
    ends = np.cumsum(lengths)
    inside = np.ones(len(rolled), dtype=bool)
    for back in range(1, SHINGLE):
        inside[(ends[:-1] - back)] = False
    starts = np.concatenate([[0], np.cumsum(lengths - SHINGLE + 1)[:-1]])
    return (rolled[inside] >> np.uint64(32)).astype(np.uint32), starts


def candidates(found: Signatures, wanted: NDArray[np.bool_], threshold: float) -> NDArray[np.int64]:
    """Return pairs of row numbers, shape (pairs, 2), whose estimated similarity comes near the threshold.

    Args:
        found: signatures.
        wanted: per text; pairs of which neither is wanted are left out.
        threshold: Jaccard similarity from 0 to 1.
    """
    pairs = [np.empty(0, dtype=np.int64)]
    count = len(found)
    for band in range(0, PERMUTATIONS, ROWS):
        keys = np.zeros(count, dtype=np.uint64)
        for row in range(band, band + ROWS):
            keys = (keys ^ found[:, row].astype(np.uint64)) * _MIX
            keys ^= keys >> np.uint64(31)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        active = np.arange(count)
        for shift in range(1, min(_LONGEST_RUN, count)):
            active = active[active + shift < count]
            active = active[keys[active] == keys[active + shift]]
            if not len(active):
                break
            a, b = order[active], order[active + shift]
            kept = wanted[a] | wanted[b]
            low, high = np.minimum(a, b)[kept], np.maximum(a, b)[kept]
            near = _estimate(found, low, high) >= threshold - SLACK
            pairs.append(low[near] * count + high[near])
    packed = np.unique(np.concatenate(pairs))
    return np.stack([packed // max(count, 1), packed % max(count, 1)], axis=1)


def _estimate(found: Signatures, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
    parts = [
        (found[a[start : start + 4096]] == found[b[start : start + 4096]]).mean(axis=1)
        for start in range(0, len(a), 4096)
    ]
    return np.concatenate(parts) if parts else np.empty(0)
