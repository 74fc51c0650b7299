"""What each number of a report is called, in English and Chinese, and how it is printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heading:
    """The names of one number of report.json."""

    short: str
    """For narrow tables."""
    en: str
    zh: str
    kind: str = "percent"
    """`percent` (0 to 100), `fraction` (0 to 1, shown in percent), `count` or `interval`."""


HEADINGS = {
    "n": Heading("n", "Questions", "题数", "count"),
    "accuracy": Heading("Acc", "Accuracy %", "正确率 %"),
    "accuracy_ci": Heading("95% CI", "95% interval", "95% 区间", "interval"),
    "accuracy_macro": Heading("Macro acc", "Macro average %", "宏平均 %"),
    "weighted_f1": Heading("F1", "Weighted F1 %", "加权 F1 %", "fraction"),
    "precision": Heading("P", "Precision %", "精确率 %", "fraction"),
    "recall": Heading("R", "Recall %", "召回率 %", "fraction"),
    "answered": Heading("Read", "Readable", "可解析", "count"),
    "scored": Heading("Scored", "Scored", "计分题数", "count"),
    "explanations": Heading("Expl.", "Explanations", "解析数", "count"),
    "bleu1": Heading("BLEU-1", "BLEU-1", "BLEU-1"),
    "bleu2": Heading("BLEU-2", "BLEU-2", "BLEU-2"),
    "bleu4": Heading("BLEU-4", "BLEU-4", "BLEU-4"),
    "rouge1": Heading("ROUGE-1", "ROUGE-1", "ROUGE-1"),
    "rouge2": Heading("ROUGE-2", "ROUGE-2", "ROUGE-2"),
    "rougeL": Heading("ROUGE-L", "ROUGE-L", "ROUGE-L"),
}
"""Key of report.json -> its names, in the order of columns."""
COLUMNS = (
    "n", "accuracy", "accuracy_macro", "accuracy_ci", "weighted_f1", "answered", "bleu1", "bleu4", "rouge1", "rouge2",
    "rougeL",
)  # fmt: skip
"""What the tables show of each set of scores."""


def short(key: str) -> str:
    """Return the short name of a number; a key that has none stands for itself."""
    return HEADINGS[key].short if key in HEADINGS else key


def cell(key: str, value: Any) -> str:
    """Return a number as the tables print it: two decimals, fractions in percent."""
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "-".join(f"{end:.1f}" for end in value)
    if isinstance(value, float):
        fraction = key in HEADINGS and HEADINGS[key].kind == "fraction"
        return f"{value * 100 if fraction else value:.2f}"
    return str(value)
