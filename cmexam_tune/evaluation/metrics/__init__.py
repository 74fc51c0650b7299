"""Metrics beside those of every report: `evaluate --metric NAME`.

In: graded questions. Out: one number in percent. Each file is one metric, found by its name, its `METRIC` is all there
is to it; a module of your own is named with its dots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cmexam_tune.core import variants

if TYPE_CHECKING:
    from cmexam_tune.evaluation.graded import Graded


@dataclass(frozen=True)
class Metric:
    """One number of a set of graded questions, and what tables call it."""

    of: "Callable[[Sequence[Graded]], float]"
    """Returns percent (0 to 100) of the questions that count for accuracy; never called without any."""
    en: str
    zh: str


class MetricModule(Protocol):
    """What a file in this folder provides."""

    @property
    def METRIC(self) -> Metric:
        """The metric; its key in report.json is the file's name."""


def names() -> tuple[str, ...]:
    """Return the names of all metrics in this folder."""
    return variants.names("metrics")


def get(name: str) -> tuple[str, Metric]:
    """Return the key in report.json and the metric called `name`: a file in this folder, or a module with dots.

    Raises:
        ConfigError: there is none of that name; the message suggests the nearest.
    """
    metric: Metric = variants.load("metrics", name).METRIC
    return name.rpartition(".")[2], metric
