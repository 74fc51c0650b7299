"""BLEU and ROUGE for Chinese: per-pair statistics once, then any subset of pairs is a sum away.

BLEU is sacreBLEU's (corpus level, clipped counts, exponential smoothing of zero counts, one reference), ROUGE is
rouge-score's (clipped n-gram counts, LCS, F1, mean over pairs) with a tokeniser that knows Chinese; the tests hold both
to the libraries. All counting is done on strings in which one character stands for one token.
"""

import atexit
import contextlib
import functools
import importlib.metadata
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cmexam_tune.core import __version__
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.variants import suggest

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Tokenizer = Callable[[str], Sequence[str]]
ORDERS = 4
BLEU_ORDERS = (1, 2, 4)
ROUGES = ("rouge1", "rouge2", "rougeL")
TEXT = (*(f"bleu{n}" for n in BLEU_ORDERS), *ROUGES)
"""The scores that tables show."""
TEXT_SCORES = (*TEXT, *(f"{name}_{part}" for name in ROUGES for part in ("precision", "recall")))
_CHUNK = 128
"""Pairs counted at once: below 16,384 distinct symbols their 4-grams fit 64 bits (see `_clipped_matches`)."""
_SURROGATES = 0xD800, 0x800
"""The first surrogate, and how many code points are surrogates: `_to_symbols` skips them."""
_PROBE = "患者男，52岁。血压 150/90 mmHg，ALT 升高，首选 A 药治疗。"


class Rouge(NamedTuple):
    """Precision, recall and F of one pair, each from 0 to 1."""

    precision: float
    recall: float
    f: float


@dataclass(frozen=True)
class PairStatistics:
    """What one explanation and its reference add to the corpus scores."""

    hypothesis_length: int
    """In tokens, as BLEU counts them."""
    reference_length: int
    matches: tuple[int, ...]
    """Clipped n-gram matches for n = 1 to 4."""
    totals: tuple[int, ...]
    """n-grams of the hypothesis for n = 1 to 4."""
    rouge1: Rouge
    rouge2: Rouge
    rougeL: Rouge


def tokenizer(unit: str | Tokenizer) -> Tokenizer:
    """Return the tokeniser of a unit, or check and return a function of your own.

    Units: `char` (every character that is not whitespace, as sacreBLEU's `char`), `jieba` (words), `zh` (sacreBLEU's:
    Chinese by characters, Latin words and numbers whole).

    Raises:
        ConfigError: an unknown unit, or a tokeniser that drops Chinese (rouge-score's own keeps only a-z and 0-9: two
            equal Chinese texts score 0 and two different ones that share "A" score 100).
    """
    if not isinstance(unit, str):
        # Tried out, since a tokeniser that drops Chinese raises nothing and gives scores that look like scores.
        tokenized = "".join(unit(_PROBE))
        if lost := sorted({char for char in _PROBE if "一" <= char <= "鿿" and char not in tokenized}):
            raise ConfigError(
                f"this tokeniser drops Chinese ({''.join(lost[:5])}... are gone from {_PROBE!r}): its scores mean "
                "nothing. Use 'char', 'jieba' or 'zh'."
            )
        return unit
    if unit not in _TOKENIZERS:
        raise ConfigError(f"unit {unit!r} is unknown{suggest(unit, _TOKENIZERS)}; known: {', '.join(_TOKENIZERS)}")
    return _TOKENIZERS[unit]()


@functools.cache
def jieba_words() -> Callable[[str], list[str]]:
    """Return `jieba.lcut`, with its cache where nobody else can put one: reading it runs what it holds."""
    import logging

    import jieba

    jieba.setLogLevel(logging.WARNING)
    # By default jieba marshals its dictionary into the shared temporary folder and loads what it finds there.
    jieba.dt.tmp_dir = str(_private_folder())
    jieba.initialize()
    cut: Callable[[str], list[str]] = jieba.lcut
    return cut


def _private_folder() -> Path:
    """Return a folder that nobody else can write to: what stands in jieba's cache is run when it is read.

    `$XDG_CACHE_HOME/cmexam_tune` or `~/.cache/cmexam_tune`; a temporary one where that cannot be made or is open.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cmexam_tune"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="cmexam_tune."))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


@functools.cache
def _jieba() -> Tokenizer:
    cut = jieba_words()
    return lambda text: [word for word in cut(text) if not word.isspace()]


@functools.cache
def _zh() -> Tokenizer:
    from sacrebleu.tokenizers.tokenizer_zh import TokenizerZh

    split: Callable[[str], str] = TokenizerZh()  # type: ignore[no-untyped-call]
    return lambda text: split(text.rstrip()).split()


_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "char": lambda: lambda text: "".join(text.split()),
    "jieba": _jieba,
    "zh": _zh,
}


def signature(unit: str, smoothing: str = "exp") -> dict[str, str]:
    """Return how BLEU and ROUGE are computed, in sacreBLEU's style: tokeniser, level, smoothing, library versions."""
    version = importlib.metadata.version
    tok = {"jieba": f"jieba-{version('jieba')}", "zh": f"zh-sacrebleu-{version('sacrebleu')}"}.get(unit, unit)
    bleu = f"nrefs:1|case:mixed|eff:no|tok:{tok}|smooth:{smoothing}|level:corpus"
    rouge = f"nrefs:1|case:mixed|tok:{tok}|stem:no|counts:clipped|f:f1|level:pair-mean"
    return {
        **{f"bleu{n}": f"{bleu}|order:{n}|equal-to:sacrebleu|version:cmexam_tune-{__version__}" for n in BLEU_ORDERS},
        **{
            name: f"{rouge}|equal-to:rouge-score|version:cmexam_tune-{__version__}+rapidfuzz-{version('rapidfuzz')}"
            for name in ROUGES
        },
    }


def pair_statistics(
    hypotheses: Sequence[str], references: Sequence[str], unit: str | Tokenizer = "char"
) -> list[PairStatistics]:
    """Return the statistics of each (hypothesis, reference) pair; an empty hypothesis scores 0.

    Raises:
        ValueError: the two differ in length.
        ConfigError: see `tokenizer`.
    """
    from rapidfuzz.distance import LCSseq

    result = []
    for h, r, counts in matched(hypotheses, references, tokenizer(unit)):
        totals = ngram_totals(h)
        result.append(
            PairStatistics(
                hypothesis_length=len(h),
                reference_length=len(r),
                matches=counts,
                totals=totals,
                rouge1=_rouge(counts[0], len(h), len(r)),
                rouge2=_rouge(counts[1], totals[1], max(len(r) - 1, 0)),
                rougeL=_rouge(LCSseq.similarity(h, r), len(h), len(r)),
            )
        )
    return result


def matched(
    hypotheses: Sequence[str], references: Sequence[str], split: Tokenizer
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield for each pair its two texts, one character for each token, and the clipped matches for n = 1 to 4.

    Raises:
        ValueError: the two differ in length.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    for start in range(0, len(hypotheses), _CHUNK):
        symbols: dict[str, str] = {}
        hyp, ref = (
            [_to_symbols(split(text), symbols) for text in texts[start : start + _CHUNK]]
            for texts in (hypotheses, references)
        )
        yield from zip(hyp, ref, zip(*_clipped_matches(hyp, ref), strict=True), strict=True)


def _to_symbols(tokens: Sequence[str], symbols: dict[str, str]) -> str:
    """Return a string with one character for each token; `symbols` remembers which stands for which."""
    # Characters are tokens already.
    if isinstance(tokens, str):
        return tokens
    first, gap = _SURROGATES
    return "".join([symbols.setdefault(t, chr(len(symbols) + (gap if len(symbols) >= first else 0))) for t in tokens])


def ngram_totals(symbols: str) -> tuple[int, ...]:
    """Return how many n-grams the text has, for n = 1 to 4."""
    return tuple(max(len(symbols) - n, 0) for n in range(ORDERS))


def _clipped_matches(hypotheses: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    """Return clipped n-gram matches as [order - 1][pair]; one character of a text is one token.

    All pairs are counted at once: an n-gram of a pair becomes one integer (pair, symbol, ..., symbol), and equal
    integers are equal n-grams. A Counter for each text and order takes five times as long for all metrics together.
    """
    import numpy as np

    sides = [_codes(texts) for texts in (hypotheses, references)]
    used = np.zeros(1 + max(int(codes.max(initial=0)) for codes, _ in sides), dtype=bool)
    for codes, _ in sides:
        used[codes] = True
    # Symbols are renumbered without gaps: the smaller the base, the sooner an n-gram fits 64 bits.
    rank, size = np.cumsum(used) - 1, int(used.sum())
    # Exact whatever the texts hold: integers of any size where 64 bits do not do.
    kind = np.int64 if size**ORDERS * len(hypotheses) < 2**63 else object
    columns = [_ngrams(rank[codes].astype(kind), pairs, size) for codes, pairs in sides]
    result = []
    for n, (hyp, ref) in enumerate(zip(*columns, strict=True), 1):
        (hyp, hyp_counts), (ref, ref_counts) = (np.unique(g, return_counts=True) for g in (hyp, ref))
        at = np.searchsorted(ref, hyp)
        hit = at < len(ref)
        hit[hit] = ref[at[hit]] == hyp[hit]
        clipped = np.minimum(hyp_counts[hit], ref_counts[at[hit]])
        owner = (hyp[hit] // size**n).astype(np.int64)
        result.append([int(c) for c in np.bincount(owner, weights=clipped, minlength=len(hypotheses))])
    return result


def _codes(texts: Sequence[str]) -> "tuple[Array, Array]":
    """Return the code points of all texts one after the other, and the index of the text each belongs to."""
    import numpy as np

    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return codes, np.repeat(np.arange(len(texts)), [len(text) for text in texts])


def _ngrams(symbols: "Array", pairs: "Array", size: int) -> "Iterator[Array]":
    """Yield, for n = 1 to 4, the integer (pair, symbol, ..., symbol) in base `size` of every n-gram."""
    grams = pairs.astype(symbols.dtype)
    for n in range(ORDERS):
        length = max(len(symbols) - n, 0)
        grams = grams[:length] * size + symbols[n:]
        yield grams[pairs[:length] == pairs[n:]]


def _rouge(match: int, hypothesis: int, reference: int) -> Rouge:
    precision, recall = match / max(hypothesis, 1), match / max(reference, 1)
    return Rouge(precision, recall, 2 * precision * recall / (precision + recall) if match else 0.0)


def rows_of(stats: Iterable[PairStatistics]) -> "Array":
    """Return [pairs, 20] floats, what each pair adds to the corpus sums that `corpus_scores` takes.

    Columns: n-gram matches and totals for n = 1 to 4, lengths of hypothesis and reference, precision, recall and F of
    the three ROUGE, and 1.
    """
    import numpy as np

    rows = [
        (*s.matches, *s.totals, s.hypothesis_length, s.reference_length, *s.rouge1, *s.rouge2, *s.rougeL, 1)
        for s in stats
    ]
    return np.asarray(rows, dtype=np.float64).reshape(-1, 2 * ORDERS + 2 + 3 * len(ROUGES) + 1)


def corpus_scores(sums: "Array", smoothing: str = "exp") -> "Array":
    """Return [k, 12] scores of TEXT_SCORES in percent from k sums of `rows_of`; NaN stands for what is undefined.

    BLEU up to an order: `exp` halves the count of each further order without a match (sacreBLEU's default), `none`
    gives 0 for it. Undefined without a single token on one side; ROUGE is undefined without a pair.
    """
    import numpy as np

    matches, totals = sums[:, :ORDERS], sums[:, ORDERS : 2 * ORDERS]
    length, reference = sums[:, 2 * ORDERS], sums[:, 2 * ORDERS + 1]
    none = matches == 0
    logs = np.log(np.where(none, 0.5 ** np.cumsum(none, axis=1), matches) / np.maximum(totals, 1))
    penalty = np.exp(np.minimum(0.0, 1 - reference / np.maximum(length, 1)))
    undefined = (reference == 0) | ((length == 0) & (smoothing == "none"))
    columns = []
    for order in BLEU_ORDERS:
        # Without a single match sacreBLEU gives 0, smoothed or not.
        zero = none[:, :order].any(1) if smoothing == "none" else none[:, :order].all(1)
        zero |= (totals[:, :order] == 0).any(1)
        bleu = np.where(zero, 0.0, 100 * penalty * np.exp(logs[:, :order].mean(1)))
        columns.append(np.where(undefined, np.nan, bleu))
    pairs = sums[:, -1:]
    rouge = np.divide(100 * sums[:, 2 * ORDERS + 2 : -1], pairs, out=np.full((len(sums), 9), np.nan), where=pairs > 0)
    return np.concatenate([np.stack(columns, axis=1), rouge[:, 2::3], rouge[:, [0, 1, 3, 4, 6, 7]]], axis=1)


def aggregate(stats: Sequence[PairStatistics], smoothing: Literal["exp", "none"] = "exp") -> dict[str, float | None]:
    """Return bleu1, bleu2, bleu4, rouge1, rouge2, rougeL (F) and each ROUGE's precision and recall, in percent.

    None stands for what is undefined; all are None where there is no pair.
    """
    if not stats:
        return dict.fromkeys(TEXT_SCORES)
    (scores,) = corpus_scores(rows_of(stats).sum(0)[None], smoothing).tolist()
    return {name: None if math.isnan(value) else value for name, value in zip(TEXT_SCORES, scores, strict=True)}
