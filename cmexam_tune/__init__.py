"""Fine-tunes and evaluates language models on Chinese medical exams; the package itself exports its records.

Stages are imported by name, for example `from cmexam_tune.train import train`.
"""

from cmexam_tune.core.schema import Case, Example, Prediction, Question, Report, Turn

__version__ = "0.1.0"
__all__ = ["Case", "Example", "Prediction", "Question", "Report", "Turn", "__version__"]
