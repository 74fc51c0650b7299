"""Model families, one file or folder each: the file's name is the config's `model.family`.

In: a checkpoint, then questions. Out: token rows to train on, and predictions. Start reading with `Family` below, then
`llama.py`; what families share is in `cmexam_tune.models`.

Whatever differs between families is an attribute or a method of theirs: nobody outside a family's file asks for its
name, so that a user's own family gets the right behaviour everywhere.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from cmexam_tune import prompts
from cmexam_tune.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.core.variants import Variant
from cmexam_tune.models import Loaded, gguf
from cmexam_tune.models.completion import Engine, TextEngine, to_prediction
from cmexam_tune.models.features import Encoded

__all__ = ["Classifier", "Family", "Loaded", "Writer", "writer"]

if TYPE_CHECKING:
    import torch


class Family(Variant):
    """A kind of model: how it is loaded, what it is trained on and how it answers. Families hold no state."""

    folder = "families"
    task: ClassVar[Literal["generate", "classify"]]
    """Whether the model writes its answer or scores options."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """`target_modules` of LoRA where the recipe names none."""
    prefix_shifts_positions: ClassVar[bool] = True
    """Whether real tokens are counted from after the P-tuning prefix (as PEFT does) or from 0 (as ChatGLM does)."""
    loads_in_4bit: ClassVar[bool] = False
    """Whether `model.load_in_4bit` (bitsandbytes' NF4) is possible."""
    reads_gguf: ClassVar[bool] = False
    """Whether `model.model_name_or_path` may be a GGUF file."""
    takes_authors_prefix: ClassVar[bool] = False
    """Whether the model's authors have a format of their own for a P-tuning prefix."""
    only_answers: ClassVar[bool] = False
    """Whether nothing is loaded, trained or exported, because the model is behind an address: such a family needs no
    `encode` and no `collate`."""
    learns_by_trl: ClassVar[bool] = False
    """Whether TRL's trainers can train it: they patch the forward pass of decoders that transformers has."""
    engines_compute: ClassVar[bool] = False
    """Whether vLLM and SGLang (`model.engine`) can answer for its models."""
    runs_in_ollama: ClassVar[bool] = False
    """Whether an exported model comes with a Modelfile."""

    def load(self, model: ModelConfig, questions: Iterable[Question] | None = None, device: str = "cpu") -> Loaded:
        """Load model and tokenizer.

        Args:
            model: the section `model` of a config.
            questions: in training, what fixes the labels of a new classification head.
            device: on `meta` the model has every shape and no weights.

        Raises:
            UserError: the path does not exist, or holds a model of another kind.
            ConfigError: a setting that this family does not have.
        """
        if self.only_answers and questions is not None:
            raise ConfigError(
                f"model.family: family {model.family} only answers: its model cannot be trained or exported. Use "
                "predict, judge or annotate."
            )
        if model.is_remote and not self.only_answers:
            raise ConfigError(
                f"model.base_url: family {model.family} loads weights; for a model behind an address set "
                "model.family=endpoint."
            )
        if model.load_in_4bit and not self.loads_in_4bit:
            raise ConfigError(f"model.load_in_4bit: family {model.family} has no weights of 4 bits here; leave it out.")
        if not self.reads_gguf and not self.only_answers and gguf.find(model.model_name_or_path) is not None:
            raise ConfigError(
                f"model.model_name_or_path={model.model_name_or_path}: a GGUF file, which family {model.family} does "
                "not read. Set model.family=llama, or name a folder with the weights of the release."
            )
        return self.open(model, questions, device)

    @abstractmethod
    def open(self, model: ModelConfig, questions: Iterable[Question] | None, device: str) -> Loaded:
        """Do what `load` promises, for settings that this family has."""

    def encode(
        self, loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig
    ) -> Encoded:
        """Return training rows with labels, and what had to be cut or skipped."""
        raise NotImplementedError

    def collate(self, loaded: Loaded, groups: Sequence[Sequence[Mapping[str, object]]]) -> "dict[str, torch.Tensor]":
        """Return one padded batch; each group of rows becomes one row of the batch (packed if it has several)."""
        raise NotImplementedError

    def whole_formats(self, model: ModelConfig) -> tuple[Literal["hf", "released"], ...]:
        """Return the formats in which a whole model can be exported, the usual one first."""
        return ("hf",)

    @abstractmethod
    def engine(self, loaded: Loaded, config: Config) -> Engine:
        """Bind a model to a configuration; costs nothing."""

    def answer(self, loaded: Loaded, questions: Sequence[Question], config: Config) -> Iterator[Prediction]:
        """Yield one prediction for each question, asked as the config's prompt says, in an order of its choice."""
        return map(to_prediction, self.engine(loaded, config).answer(prompts.default_prompts(questions, config)))


class Writer(Family):
    """A family whose models write their answers."""

    task: ClassVar[Literal["generate"]] = "generate"

    @abstractmethod
    def engine(self, loaded: Loaded, config: Config) -> TextEngine:
        """Bind a model to its template and to a configuration; costs nothing."""


class Classifier(Family):
    """A family whose models choose among the options of a question."""

    task: ClassVar[Literal["classify"]] = "classify"

    @abstractmethod
    def loss(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Return the mean loss over the questions of a batch; `model` may be wrapped for training."""

    @abstractmethod
    def scores(self, model: "torch.nn.Module", batch: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
        """Return the logits of a batch; its labels are not read."""


def writer(name: str, why: str) -> Writer:
    """Return a family whose models write.

    Args:
        name: the config's `model.family`.
        why: what a model that chooses an option cannot do, for the message.

    Raises:
        ConfigError: there is none of this name, or its models choose an option.
    """
    family = Family.named(name)
    if not isinstance(family, Writer):
        raise ConfigError(f"model.family={name}: a model that chooses an option cannot {why}.")
    return family
