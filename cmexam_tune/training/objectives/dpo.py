"""DPO (arXiv 2305.18290) by TRL: of two outputs for a question the right one becomes more probable, the wrong one less.

`data.train` holds what `select --make pairs` writes: questions with a `chosen` and a `rejected` output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import DataError
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.task import Task

if TYPE_CHECKING:
    from cmexam_tune.training.safe_trainer import SafeTrainer


@dataclass(frozen=True)
class PreferencePair:
    """Two outputs for a question."""

    id: str
    chosen: str
    rejected: str


class DPO(Objective):
    """Direct preference optimisation."""

    trl_config: ClassVar[str | None] = "DPOConfig"
    defaults: ClassVar[Mapping[str, object]] = {"disable_dropout": True}

    def trainer(self, task: Task) -> "SafeTrainer":
        """Return the trainer of pairs.

        Raises:
            DataError: a line that is no pair, or whose outputs are the same.
        """
        from cmexam_tune.training.preference_trainer import PreferenceTrainer

        pairs = [pair for path in task.train.paths for pair in _read(path)][: task.train.limit]
        questions = {question.id: question for question in task.train}
        return PreferenceTrainer(task, [(questions[pair.id], pair.chosen, pair.rejected) for pair in pairs])


def _read(path: str) -> list[PreferencePair]:
    pairs = []
    for line, value in jsonl.read_objects(path):
        if not {"chosen", "rejected"} <= value.keys():
            raise DataError(
                f"{path}:{line}: has no `chosen` and `rejected` output. Pairs are made by `cmexam-tune select --make "
                "pairs`."
            )
        pair = jsonl.from_object(PreferencePair, value, f"{path}:{line}")
        if pair.chosen == pair.rejected:
            raise DataError(f"{path}:{line}: `chosen` and `rejected` are the same, so there is nothing to prefer.")
        pairs.append(pair)
    return pairs
