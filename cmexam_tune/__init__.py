"""Fine-tunes and evaluates language models on Chinese medical exams; the package itself exports its records.

Stages are imported by name, for example `from cmexam_tune.train import train`; `cmexam_tune.train(...)` is the same.
"""

import importlib
from pathlib import Path
from types import ModuleType

from cmexam_tune.core import __version__
from cmexam_tune.core.schema import Case, Example, Prediction, Question, Report, Turn

__all__ = ["Case", "Example", "Prediction", "Question", "Report", "Turn", "__version__"]


def __getattr__(name: str) -> ModuleType:
    """Import a program when it is first used: some load large libraries."""
    if name.startswith("_") or not (Path(__file__).parent / f"{name}.py").is_file():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
