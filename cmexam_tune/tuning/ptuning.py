"""P-tuning v2: trained keys and values in front of every layer (prefix tuning), the base frozen.

The adapter folder is PEFT's prefix-tuning format (`adapter_config.json`, `adapter_model.safetensors` with
`prompt_embeddings`); what training needs beyond it (the projection, a classification head) lies beside it in
`trained.safetensors`. The ChatGLM authors' own format is read and written too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune.core import files
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.families import Family

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from cmexam_tune.models.prefix import PrefixEncoder

standalone = False

CONFIG, WEIGHTS, TRAINED = "adapter_config.json", "adapter_model.safetensors", "trained.safetensors"
AUTHORS_PREFIX = "transformer.prefix_encoder."
AUTHORS_FILES = ("pytorch_model.bin", "model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class Settings:
    """Keys under `tuning`, with PEFT's names."""

    num_virtual_tokens: int
    """Length of the prefix; the ChatGLM recipes use 128."""
    prefix_projection: bool = False
    """Train the prefix through a two-layer network (steadier at high learning rates, more parameters)."""
    encoder_hidden_size: int | None = None
    """Width inside that network; default: the model's hidden size."""
    prefix_dropout: float = 0.0
    """Dropout on the prefix while training; the ChatGLM authors use 0.1."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        if self.num_virtual_tokens < 1:
            raise ValueError(f"num_virtual_tokens is {self.num_virtual_tokens}, at least 1 is needed")
        if self.encoder_hidden_size is not None and self.encoder_hidden_size < 1:
            raise ValueError(f"encoder_hidden_size is {self.encoder_hidden_size}, at least 1 is needed")
        if self.encoder_hidden_size is not None and not self.prefix_projection:
            raise ValueError("encoder_hidden_size has no effect without prefix_projection: true")
        if not 0.0 <= self.prefix_dropout < 1.0:
            raise ValueError(f"prefix_dropout is {self.prefix_dropout}, from 0 to below 1 is possible")


def attach(model: "PreTrainedModel", family: Family, settings: Settings) -> "PreTrainedModel":
    """Freeze `model` and put a new prefix encoder (float32) into its base model.

    A family that classifies keeps its head trainable, in float32: it is new and has learnt nothing yet.

    Raises:
        ConfigError: the model does not use transformers' attention interface, or another attention than SDPA.
    """
    from cmexam_tune.models.prefix import PrefixEncoder, Shape

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
    return _install(model, encoder)


def _install(model: "PreTrainedModel", encoder: "PrefixEncoder") -> "PreTrainedModel":
    from cmexam_tune.models import prefix

    if not model._can_set_attn_implementation():
        raise ConfigError(f"{type(model).__name__} does not use transformers' attention interface: use lora instead.")
    used = model.config._attn_implementation
    if used not in ("sdpa", "eager", prefix.IMPLEMENTATION):
        raise ConfigError(f"ptuning works with model.attn_implementation: sdpa, not {used!r}.")
    model.set_attn_implementation(prefix.IMPLEMENTATION)
    base: nn.Module = model.base_model
    if prefix.MODULE in dict(base.named_children()):
        raise ConfigError(
            "the model carries a prefix already (model.adapter_name_or_path): train another method on it."
        )
    base.add_module(prefix.MODULE, encoder.to(model.device))
    base.register_forward_pre_hook(encoder.inject, with_kwargs=True)
    return model


def encoder_of(model: "PreTrainedModel") -> "PrefixEncoder":
    """Return the prefix encoder that `attach` put into `model`."""
    from cmexam_tune.models import prefix

    encoder = model.base_model.get_submodule(prefix.MODULE)
    assert isinstance(encoder, prefix.PrefixEncoder)
    return encoder


def save(model: "PreTrainedModel", folder: Path, state_dict: "Mapping[str, torch.Tensor] | None" = None) -> None:
    """Write the adapter; `state_dict` (names as in `model`) replaces the model's own weights, as under ZeRO-3."""
    import torch
    from safetensors.torch import save as to_bytes

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
    _write(folder / CONFIG, (json.dumps(_peft_config(model), indent=2, sort_keys=True) + "\n").encode())
    _write(folder / WEIGHTS, to_bytes({"prompt_embeddings": flat}, metadata={"format": "pt"}))
    if set(trained) != {f"{prefix}embedding.weight"}:
        _write(folder / TRAINED, to_bytes(trained, metadata={"format": "pt"}))


def _write(path: Path, content: bytes) -> None:
    with files.atomic_write(path, binary=True) as handle:
        handle.write(content)


def _module_name(model: "PreTrainedModel") -> str:
    """Return the prefix of the encoder's parameter names in `model.state_dict()`, with its dot."""
    encoder = encoder_of(model)
    return next(f"{name}." for name, module in model.named_modules() if module is encoder)


def _peft_config(model: "PreTrainedModel") -> dict[str, Any]:
    encoder = encoder_of(model)
    shape = encoder.shape
    tasks = {"ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "CAUSAL_LM", "Classification": "SEQ_CLS"}
    return {
        "peft_type": "PREFIX_TUNING",
        "task_type": next((task for end, task in tasks.items() if type(model).__name__.endswith(end)), None),
        "base_model_name_or_path": model.config.name_or_path,
        "inference_mode": True,
        "num_virtual_tokens": shape.tokens,
        "num_layers": shape.layers,
        "num_attention_heads": shape.kv_heads,
        "token_dim": shape.token_dim,
        "num_transformer_submodules": 1,
        "prefix_projection": encoder.trans is not None,
        "encoder_hidden_size": None if encoder.trans is None else encoder.trans[0].out_features,
    }


def load(model: "PreTrainedModel", folder: Path) -> None:
    """Read what `save` wrote (or a PEFT prefix adapter without projection) into a model that `attach` returned.

    Raises:
        UserError: files are missing, or the sizes differ from those of `tuning` and of the model.
    """
    from safetensors.torch import load_file

    if (folder / TRAINED).exists():
        parameters = dict(model.named_parameters())
        _copy({**parameters}, load_file(folder / TRAINED), folder / TRAINED)
        return
    path = files.check_input(folder / WEIGHTS, "adapter file")
    encoder = encoder_of(model)
    if encoder.trans is not None:
        raise UserError(f"{path}: holds a prefix without its projection. Set tuning.prefix_projection=false.")
    stored = load_file(path)
    if "prompt_embeddings" not in stored:
        raise UserError(f"{path}: no tensor 'prompt_embeddings' in it: this is not a prefix-tuning adapter.")
    _copy({"prompt_embeddings": encoder.embedding.weight}, stored, path)


def _copy(targets: "Mapping[str, torch.Tensor]", stored: "Mapping[str, torch.Tensor]", path: Path) -> None:
    import torch

    for name, value in stored.items():
        if name not in targets:
            raise UserError(f"{path}: the model has no {name!r}; was it trained with other tuning settings?")
        if targets[name].shape != value.shape:
            raise UserError(
                f"{path}: {name} is {list(value.shape)}, the model needs {list(targets[name].shape)}: "
                "another num_virtual_tokens, projection or base model."
            )
        with torch.no_grad():
            targets[name].copy_(value)


def load_authors_prefix(path: str | Path) -> "dict[str, torch.Tensor]":
    """Read a P-tuning checkpoint of the ChatGLM trainers: a `.bin` or safetensors file, or the folder that holds it.

    Older checkpoints hold the full model; only `transformer.prefix_encoder.*` is used.

    Returns:
        `embedding.weight`, and with a projection `trans.0.*` and `trans.2.*`.

    Raises:
        UserError: no such file, or no prefix in it.
    """
    import torch
    from safetensors.torch import load_file

    path = Path(path)
    if path.is_dir():
        path = next((path / name for name in AUTHORS_FILES if (path / name).exists()), path / AUTHORS_FILES[0])
    files.check_input(path, "P-tuning checkpoint")
    if path.suffix == ".safetensors":
        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    found = {name.removeprefix(AUTHORS_PREFIX): t for name, t in state.items() if name.startswith(AUTHORS_PREFIX)}
    if "embedding.weight" not in found:
        raise UserError(f"{path}: no {AUTHORS_PREFIX}embedding.weight in it: not a P-tuning checkpoint.")
    return found


def attach_authors_prefix(model: "PreTrainedModel", path: str | Path, dropout: float = 0.1) -> "PreTrainedModel":
    """Freeze a ChatGLM `model` and put the prefix of an authors' checkpoint into it.

    Raises:
        UserError: as `load_authors_prefix`, or the checkpoint is for a model of another size.
    """
    from cmexam_tune.models.prefix import PrefixEncoder, Shape

    state = load_authors_prefix(path)
    tokens = state["embedding.weight"].shape[0]
    hidden = state["trans.0.weight"].shape[0] if "trans.0.weight" in state else None
    encoder = PrefixEncoder(Shape.of(model.config, tokens), hidden, dropout, shift_positions=False)
    _copy(dict(encoder.named_parameters()), state, Path(path))
    model.requires_grad_(False)
    return _install(model, encoder)


def export_chatglm(source: "PreTrainedModel | Path | str", out: str | Path) -> Path:
    """Write the authors' format to folder `out`: `pytorch_model.bin` with `transformer.prefix_encoder.*` in float32.

    Args:
        source: a ChatGLM model that carries a prefix, or an adapter folder that `save` wrote.
        out: an empty or new folder. With a model, its config.json (`pre_seq_len`, `prefix_projection`) is written too.

    Raises:
        UserError: the folder holds no prefix of a ChatGLM.
    """
    import torch

    out = Path(out)
    if isinstance(source, str | Path):
        state = _adapter_state(Path(source))
    else:
        encoder = encoder_of(source)
        state = {name: value.detach().cpu().float() for name, value in encoder.state_dict().items()}
        config = {**source.config.to_dict(), "pre_seq_len": encoder.shape.tokens}
        config["prefix_projection"] = encoder.trans is not None
        _write(out / "config.json", (json.dumps(config, indent=2, default=str) + "\n").encode())
    with files.atomic_write(out / AUTHORS_FILES[0], binary=True) as handle:
        torch.save({f"{AUTHORS_PREFIX}{name}": value.clone() for name, value in state.items()}, handle)
    return out / AUTHORS_FILES[0]


def _adapter_state(folder: Path) -> "dict[str, torch.Tensor]":
    from safetensors.torch import load_file

    if (folder / TRAINED).exists():
        stored = load_file(folder / TRAINED)
        state = {name.removeprefix(AUTHORS_PREFIX): t for name, t in stored.items() if name.startswith(AUTHORS_PREFIX)}
    else:
        stored = load_file(files.check_input(folder / WEIGHTS, "adapter file"))
        state = {"embedding.weight": stored["prompt_embeddings"]} if "prompt_embeddings" in stored else {}
    if not state:
        raise UserError(f"{folder}: holds no prefix of a ChatGLM; its format exists for --family chatglm only.")
    return {name: value.float() for name, value in state.items()}
