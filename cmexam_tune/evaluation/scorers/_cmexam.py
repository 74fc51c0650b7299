"""BLEU and ROUGE as the CMExam repository's scripts compute them (github.com/williamliujl/CMExam, src/evaluation).

BLEU: corpus level, clipped, unsmoothed, on characters without whitespace or on jieba words. ROUGE: on characters, where
each text is joined by spaces and split at single spaces, so a space becomes two empty tokens and an empty text one;
n-grams as sets, so that repetition is free; ROUGE-L's F weighs precision and recall by beta = P/R and leans to the
smaller of the two. Means over pairs.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

from cmexam_tune.evaluation.text_metrics import (
    PairStatistics,
    Rouge,
    matched,
    ngram_totals,
)

_NUMBERS = {"#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "NaN", "nan"}
NAN_STRINGS = _NUMBERS | {"", "<NA>", "N/A", "NA", "NULL", "None", "n/a", "null"}
"""Texts that pandas reads back from a CSV file as missing; the empty text is one of them."""


def statistics(
    hypotheses: Sequence[str], references: Sequence[str], words: Callable[[str], Sequence[str]], swapped: bool = False
) -> list[PairStatistics]:
    """Return the scripts' statistics of each pair.

    Args:
        hypotheses: Explanations that were read from the outputs.
        references: Explanations of the exam.
        words: The tokens of BLEU.
        swapped: Whether ROUGE takes hypothesis for reference, as the chatglm and GPT scripts do.
    """
    result = []
    for (h, r, matches), pair in zip(
        matched(hypotheses, references, words), zip(hypotheses, references, strict=True), strict=True
    ):
        unigrams, bigrams, longest = _rouge(*(reversed(pair) if swapped else pair))
        result.append(
            PairStatistics(
                hypothesis_length=len(h),
                reference_length=len(r),
                matches=matches,
                totals=ngram_totals(h),
                rouge1=unigrams,
                rouge2=bigrams,
                rougeL=longest,
            )
        )
    return result


def _rouge(hypothesis: str, reference: str) -> tuple[Rouge, Rouge, Rouge]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L of one pair with the script's epsilons."""
    from rapidfuzz.distance import LCSseq

    hyp, ref = (" ".join(text).split(" ") for text in (hypothesis, reference))
    match = LCSseq.similarity(hyp, ref)
    precision, recall = match / len(hyp), match / len(ref)
    beta = precision / (recall + 1e-12)
    f = (1 + beta**2) * recall * precision / (recall + beta**2 * precision + 1e-12)
    return (
        _overlap(set(hyp), set(ref)),
        _overlap(set(pairwise(hyp)), set(pairwise(ref))),
        Rouge(precision, recall, f),
    )


def _overlap(hyp: set[Hashable], ref: set[Hashable]) -> Rouge:
    shared = len(hyp & ref)
    precision, recall = shared / len(hyp) if hyp else 0.0, shared / len(ref) if ref else 0.0
    return Rouge(precision, recall, 2 * precision * recall / (precision + recall + 1e-8))


def signature(script: str, unit: str, answer: str, unread: str) -> dict[str, str]:
    """Return the signature of a scorer made of these metrics."""
    bleu = f"nrefs:1|case:mixed|eff:no|tok:{unit}|smooth:none|level:corpus|equal-to:{script}"
    rouge = f"tok:char-joined-by-spaces|counts:sets|level:pair-mean|equal-to:{script}"
    return {
        "answer": answer,
        "unread": unread,
        **{f"bleu{n}": f"{bleu}|order:{n}" for n in (1, 2, 4)},
        "rouge1": f"{rouge}|f:f1",
        "rouge2": f"{rouge}|f:f1",
        "rougeL": f"{rouge}|f:beta=p/r",
    }
