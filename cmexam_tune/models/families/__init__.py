"""Model families, one file or folder each: the file's name is the config's `model.family`.

In: a checkpoint, then questions. Out: token rows to train on, and predictions. Start reading with `Family` below, then
`llama.py`; what families share is in `cmexam_tune.models`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from cmexam_tune.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.models import Loaded
from cmexam_tune.models.features import Encoded
from cmexam_tune.prompts import Asked

__all__ = ["Answers", "Classifier", "Family", "Loaded", "Writer"]

if TYPE_CHECKING:
    import torch


class Family(Protocol):
    """What a module in this folder provides."""

    @property
    def task(self) -> Literal["generate", "classify"]:
        """Whether the model writes its answer or scores options."""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """`target_modules` of LoRA where the recipe names none."""

    @property
    def prefix_shifts_positions(self) -> bool:
        """Whether real tokens are counted from after the P-tuning prefix (as PEFT does) or from 0 (as ChatGLM does)."""

    def load(self, model: ModelConfig, questions: Iterable[Question] | None = None, device: str = "cpu") -> Loaded:
        """Load model and tokenizer; `questions` (training) fixes the labels of a new classification head.

        On the device `meta` the model has every shape and no weights.

        Raises:
            UserError: the path does not exist, or holds a model of another kind.
        """

    def encode(
        self, loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig
    ) -> Encoded:
        """Return training rows with labels, and what had to be cut or skipped."""

    def collate(self, loaded: Loaded, groups: Sequence[Sequence[Mapping[str, Any]]]) -> "dict[str, torch.Tensor]":
        """Return one padded batch; each group of rows becomes one row of the batch (packed if it has several)."""

    def answer(self, loaded: Loaded, questions: Sequence[Question], config: Config) -> Iterator[Prediction]:
        """Yield one prediction for each question, in an order of the family's choice."""


class Answers(Protocol):
    """What answers: `cmexam_tune.models.generation.decoder.Decoder`, or a model behind an address."""

    def answer(self, asked: Sequence[Asked]) -> Iterator[Prediction]:
        """Yield one prediction for each question, in an order of its choice; ids are distinct."""


class Writer(Family, Protocol):
    """What a family whose task is `generate` provides beside that."""

    def decoder(self, loaded: Loaded, config: Config) -> Answers:
        """Bind a model to its template and to a configuration; costs nothing."""


class Classifier(Family, Protocol):
    """What a family whose task is `classify` provides beside that."""

    def loss(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Return the mean loss over the questions of a batch; `model` may be wrapped for training."""

    def scores(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Return the logits of a batch; its labels are not read."""
