"""P-tuning v2: trained keys and values in front of every layer (prefix tuning), the base frozen.

The adapter folder is PEFT's prefix-tuning format (`adapter_config.json`, `adapter_model.safetensors` with
`prompt_embeddings`); what training needs beyond it (the projection, a classification head) is beside it in
`trained.safetensors`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from cmexam_tune.config.settings import (
    STRICT,
    Length,
    Rank,
    Share,
)
from cmexam_tune.core import files
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


WEIGHTS, TRAINED = "adapter_model.safetensors", "trained.safetensors"


@dataclass(frozen=True, config=STRICT)
class Settings:
    """Keys under `tuning`, with PEFT's names."""

    num_virtual_tokens: Rank
    """Length of the prefix; the ChatGLM recipes use 128."""
    prefix_projection: bool = False
    """Train the prefix through a two-layer network (steadier at high learning rates, more parameters)."""
    encoder_hidden_size: Length | None = None
    """Width inside that network; default: the model's hidden size."""
    prefix_dropout: Share = 0.0
    """Dropout on the prefix while training; the ChatGLM authors use 0.1."""

    def __post_init__(self) -> None:
        """Refuse a width of a network that is not there."""
        if self.encoder_hidden_size is not None and not self.prefix_projection:
            raise ValueError("encoder_hidden_size: has no effect without prefix_projection: true")


def _write(path: Path, content: bytes) -> None:
    with files.atomic_write(path, binary=True) as handle:
        handle.write(content)


def _module_name(model: "PreTrainedModel") -> str:
    """Return the prefix of the encoder's parameter names in `model.state_dict()`, with its dot."""
    from cmexam_tune.models.prefix import encoder_of

    encoder = encoder_of(model)
    return next(f"{name}." for name, module in model.named_modules() if module is encoder)


def _save_config(model: "PreTrainedModel", folder: Path) -> None:
    """Write PEFT's adapter_config.json."""
    from peft import PrefixTuningConfig

    from cmexam_tune.models.prefix import encoder_of

    encoder: Any = encoder_of(model)
    shape = encoder.shape
    tasks = {"ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "CAUSAL_LM", "Classification": "SEQ_CLS"}
    kind: Any = PrefixTuningConfig
    config = kind(
        task_type=next((task for end, task in tasks.items() if type(model).__name__.endswith(end)), None),
        base_model_name_or_path=model.config.name_or_path,
        num_virtual_tokens=shape.tokens,
        num_layers=shape.layers,
        num_attention_heads=shape.kv_heads,
        token_dim=shape.token_dim,
        num_transformer_submodules=1,
        prefix_projection=encoder.trans is not None,
        encoder_hidden_size=None if encoder.trans is None else encoder.trans[0].out_features,
    )
    config.inference_mode = True
    config.save_pretrained(str(folder))


class PTuning(Method):
    """A prefix in front of every layer, the base frozen."""

    Settings = Settings
    standalone = False
    is_prefix = True

    def attach(self, model: "PreTrainedModel", family: Family, settings: Any) -> "PreTrainedModel":
        """Freeze `model` and put a new prefix encoder (float32) into its base model.

        A family that classifies keeps its head trainable, in float32: it is new and has learnt nothing yet.

        Raises:
            ConfigError: as `models.prefix.install`.
        """
        from cmexam_tune.models.prefix import PrefixEncoder, Shape, install

        shape = Shape.of(model.config, settings.num_virtual_tokens)
        hidden = (settings.encoder_hidden_size or model.config.hidden_size) if settings.prefix_projection else None
        model.requires_grad_(False)
        if family.task == "classify":
            inside = f"{model.base_model_prefix}."
            for name, parameter in model.named_parameters():
                if not name.startswith(inside):
                    parameter.data = parameter.data.float()
                    parameter.requires_grad_(True)
        encoder = PrefixEncoder(shape, hidden, settings.prefix_dropout, family.prefix_shifts_positions)
        return install(model, encoder)

    def save(
        self, model: "PreTrainedModel", folder: Path, state_dict: "Mapping[str, torch.Tensor] | None" = None
    ) -> None:
        """Write the adapter; `state_dict` (names as in `model`) replaces the model's own weights, as under ZeRO-3."""
        import torch
        from safetensors.torch import save as to_bytes

        from cmexam_tune.models import layouts
        from cmexam_tune.models.prefix import flat_embeddings

        weights = model.state_dict() if state_dict is None else state_dict
        prefix = _module_name(model)
        trained = {
            name: weights[name].detach().cpu().contiguous()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or name.startswith(prefix)
        }
        encoder = {name.removeprefix(prefix): value for name, value in trained.items() if name.startswith(prefix)}
        with torch.no_grad():
            flat = flat_embeddings(encoder).contiguous()
        _save_config(model, folder)
        _write(folder / WEIGHTS, to_bytes({"prompt_embeddings": flat}, metadata={"format": "pt"}))
        if set(trained) != {f"{prefix}embedding.weight"}:
            _write(folder / TRAINED, to_bytes(layouts.write(model, trained), metadata={"format": "pt"}))

    def load(self, model: "PreTrainedModel", folder: Path) -> None:
        """Read what `save` wrote (or a PEFT prefix adapter without projection) into a model that `attach` returned.

        Raises:
            UserError: files are missing, or the sizes differ from those of `tuning` and of the model.
        """
        from safetensors.torch import load_file

        from cmexam_tune.models import layouts
        from cmexam_tune.models.prefix import copy_state, encoder_of

        if (folder / TRAINED).exists():
            parameters = dict(model.named_parameters())
            copy_state({**parameters}, layouts.read(model, load_file(folder / TRAINED)), folder / TRAINED)
            return
        path = files.check_input(folder / WEIGHTS, "adapter file")
        encoder = encoder_of(model)
        if encoder.trans is not None:
            raise UserError(f"{path}: holds a prefix without its projection. Set tuning.prefix_projection=false.")
        stored = load_file(path)
        if "prompt_embeddings" not in stored:
            raise UserError(f"{path}: no tensor 'prompt_embeddings' in it: this is not a prefix-tuning adapter.")
        copy_state({"prompt_embeddings": encoder.embedding.weight}, stored, path)

    def check(self, training: Mapping[str, object]) -> None:
        """Refuse reentrant checkpointing: only the inputs of a block would get gradients, and the prefix is none."""
        options = training.get("activation_checkpointing_kwargs") or training.get("gradient_checkpointing_kwargs") or {}
        if isinstance(options, Mapping) and options.get("use_reentrant"):
            raise ConfigError(
                "training.gradient_checkpointing_kwargs.use_reentrant=true: gradients would not reach the prefix of "
                "P-tuning. Leave it out."
            )

    def warnings(self, training: Mapping[str, object], *, learning_rate: float, fp16: bool) -> list[str]:
        """Warn of what the authors' own settings lead to in half precision, and of weight decay."""
        lines = []
        if learning_rate >= 1e-2 and fp16:
            lines.append(
                f"training.learning_rate={learning_rate:g} with P-tuning in fp16 often ends in loss 0 or NaN. 5e-3, or "
                "tuning.prefix_projection=true, is steadier; the run stops by itself if it degenerates."
            )
        if training.get("weight_decay"):
            lines.append("training.weight_decay pulls the P-tuning prefix to zero; its authors use none.")
        return lines

    def in_peft(self, family: Family) -> bool:
        """Whether PEFT alone opens the adapter: it shifts positions by the prefix, and knows decoders only."""
        return family.prefix_shifts_positions and family.task == "generate"

    def open_in_peft(self, model: "PreTrainedModel", base: "Callable[[], PreTrainedModel]", folder: Path) -> Any:
        """Return the adapter on a base that is loaded again: the prefix cannot be taken off `model`."""
        from peft import PeftModel

        kind: Any = PeftModel
        return kind.from_pretrained(base(), str(folder))
