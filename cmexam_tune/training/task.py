"""`Task`: what every trainer is made of, whatever its objective."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cmexam_tune.config import Config
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.training.data.questions import QuestionFiles

if TYPE_CHECKING:  # reading a config imports the objectives, and must not take seconds
    from transformers import TrainingArguments


@dataclass(frozen=True)
class Task:
    """A model, how it is trained, and the files of questions."""

    config: Config
    family: Family
    method: Method
    loaded: Loaded
    arguments: "TrainingArguments"
    train: QuestionFiles
    validation: QuestionFiles
    cache: Path
    """Folder for encoded questions."""
