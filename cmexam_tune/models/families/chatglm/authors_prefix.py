"""P-tuning checkpoints in the format of the ChatGLM authors' trainers: only `transformer.prefix_encoder.*`."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from cmexam_tune.core import files
from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.models import checkpoint
from cmexam_tune.models.prefix import PrefixEncoder, Shape, copy_state, encoder_of, install

PREFIX = "transformer.prefix_encoder."
PLAIN = ("embedding.weight",)
PROJECTED = (*PLAIN, "trans.0.weight", "trans.0.bias", "trans.2.weight", "trans.2.bias")
FILES = ("pytorch_model.bin", "model.safetensors", "adapter_model.bin")


def load_authors_prefix(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a P-tuning checkpoint of the ChatGLM trainers: a `.bin` or safetensors file, or the folder that holds it.

    Older checkpoints hold the full model; only `transformer.prefix_encoder.*` is used.

    Returns:
        `embedding.weight`, and with a projection `trans.0.*` and `trans.2.*`.

    Raises:
        UserError: no such file, or no prefix in it.
    """
    path = Path(path)
    if path.is_dir():
        path = next((path / name for name in FILES if (path / name).exists()), path / FILES[0])
    files.check_input(path, "P-tuning checkpoint")
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {name.removeprefix(PREFIX): t for name, t in state.items() if name.startswith(PREFIX)}
    except checkpoint.LOADING as error:
        raise UserError(f"{path}: cannot be read as a P-tuning checkpoint ({first_line(error)}).") from None
    names = set(PLAIN if "trans.0.weight" not in tensors else PROJECTED)
    if set(tensors) != names or not all(
        isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors.values()
    ):
        raise UserError(
            f"{path}: is no P-tuning checkpoint; needed are {', '.join(PREFIX + n for n in sorted(names))}."
        )
    if any(t.ndim != (1 if name.endswith("bias") else 2) for name, t in tensors.items()):
        raise UserError(f"{path}: its prefix has not the shape of one.")
    return tensors


def attach_authors_prefix(model: PreTrainedModel, path: str | Path, dropout: float = 0.1) -> PreTrainedModel:
    """Freeze a ChatGLM `model` and put the prefix of an authors' checkpoint into it.

    Raises:
        UserError: as `load_authors_prefix`, or the checkpoint is for a model of another size.
    """
    state = load_authors_prefix(path)
    tokens = state["embedding.weight"].shape[0]
    hidden = state["trans.0.weight"].shape[0] if "trans.0.weight" in state else None
    encoder = PrefixEncoder(Shape.of(model.config, tokens), hidden, dropout, shift_positions=False)
    copy_state(dict(encoder.named_parameters()), state, Path(path))
    model.requires_grad_(False)
    return install(model, encoder)


def write_authors_prefix(model: PreTrainedModel, out: str | Path) -> Path:
    """Write the authors' format to folder `out`: `pytorch_model.bin` with `transformer.prefix_encoder.*` in float32.

    config.json says `pre_seq_len` and `prefix_projection`, as theirs does.
    """
    out, encoder = Path(out), encoder_of(model)
    state = {name: value.detach().cpu().float() for name, value in encoder.state_dict().items()}
    config = {**model.config.to_dict(), "pre_seq_len": encoder.shape.tokens}
    config["prefix_projection"] = encoder.trans is not None
    with files.atomic_write(out / "config.json") as handle:
        json.dump(config, handle, indent=2, default=str)
        handle.write("\n")
    with files.atomic_write(out / FILES[0], binary=True) as handle:
        torch.save({f"{PREFIX}{name}": value.clone() for name, value in state.items()}, handle)
    return out / FILES[0]
