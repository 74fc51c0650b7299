"""BLEU and ROUGE for Chinese as a metric of the `evaluate` library, loaded from this file without a network.

import evaluate
metric = evaluate.load("path/to/cmexam_tune/interop/exam_text.py")
metric.compute(predictions=[...], references=[...], unit="char")
"""

from typing import Any

import datasets  # noqa: TID253 - an `evaluate` module declares its features with it; nothing else imports this file
import evaluate

from cmexam_tune.evaluation import text_metrics

_DESCRIPTION = """Corpus BLEU-1/2/4 (sacreBLEU's) and ROUGE-1/2/L (rouge-score's) on Chinese units, in percent."""
_INPUTS = """
Args:
    predictions: list of explanations.
    references: list of reference explanations, one for each prediction.
    unit: 'char' (default), 'jieba' or 'zh' (sacreBLEU's Chinese tokeniser).
Returns:
    bleu1, bleu2, bleu4, rouge1, rouge2, rougeL with precision and recall of each ROUGE, and `signature`.
"""


class ExamText(evaluate.Metric):  # type: ignore[misc]
    """The text metrics of `cmexam_tune.evaluate` behind `compute`."""

    def _info(self) -> Any:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str], unit: str = "char") -> dict[str, object]:
        stats = text_metrics.pair_statistics(predictions, references, unit=unit)
        return {**text_metrics.aggregate(stats), "signature": text_metrics.signature(unit)}
