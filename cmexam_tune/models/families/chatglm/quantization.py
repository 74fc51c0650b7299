"""The released int8 and int4 checkpoints: weights only, symmetric, one scale for each row; dequantised on load."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from cmexam_tune.core.errors import UserError
from cmexam_tune.models.families.chatglm.configuration import find_file, read_values

SCALE = "_scale"
USUAL = ("model.safetensors", "pytorch_model.bin")


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return int8 `[out, in]` of packed int4 `[out, in / 2]`: two columns in a byte, the first in its high half."""
    # Shifts of int8 are arithmetic: both halves keep their sign.
    high, low = packed >> 4, (packed << 4) >> 4
    return torch.stack([high, low], dim=-1).flatten(-2)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight `[out, in]`: the stored integers times the scale of their row, exact before the cast."""
    integers = weight if bits == 8 else unpack_int4(weight)
    # 8 bits times the 11 of a float16 scale fit into float32's 24.
    return (integers.float() * scale.float()[:, None]).to(dtype)


def dequantize_state(
    state: Mapping[str, torch.Tensor], bits: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return the state dict without scales on `device`, weights that have one dequantised, floats cast to `dtype`.

    One tensor after the other goes to the device and is unpacked there, so that the host never holds the whole model.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith(SCALE):
            continue
        scale, moved = state.get(name + SCALE), value.to(device)
        if scale is not None:
            plain[name] = dequantize(moved, scale.to(device), bits, dtype)
        else:
            plain[name] = moved.to(dtype) if moved.is_floating_point() else moved
    return plain


def has_usual_files(folder: str | Path, revision: str | None = None) -> bool:
    """Return whether transformers finds the weights: under the names that `save_pretrained` gives."""
    names = [f"{name}{end}" for name in USUAL for end in ("", ".index.json")]
    return any(find_file(folder, name, revision) is not None for name in names)


def read_state(
    folder: str | Path, bits: int, dtype: torch.dtype, revision: str | None = None, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Read a checkpoint of one or several `.safetensors` or `.bin` files onto a device, dequantised for `bits` 4 and 8.

    Raises:
        UserError: no weights there, or packed for other bits than 4 and 8.
    """
    if bits not in (0, 4, 8):
        raise UserError(f"{folder}: quantization_bit is {bits} in config.json; 4 and 8 exist.")
    for usual in USUAL:
        index = read_values(folder, f"{usual}.index.json", revision)
        names = sorted(set(index["weight_map"].values())) if index else [usual]
        paths = [path for name in names if (path := find_file(folder, name, revision)) is not None]
        if len(paths) == len(names):
            break
    else:
        # One file under a name of its own.
        paths = [path for end in ("safetensors", "bin") for path in sorted(Path(folder).glob(f"*.{end}"))]
        if len(paths) != 1 or has_usual_files(folder, revision):
            raise UserError(f"{folder}: no complete model.safetensors or pytorch_model.bin in it.")
    state: dict[str, torch.Tensor] = {}
    for path in paths:
        state.update(_read(path))
    return dequantize_state(state, bits, dtype, device)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, which stays on the disk until each is used."""
    if path.suffix == ".safetensors":
        return load_file(path)
    # torch maps zip archives only, and before 1.6 it wrote none.
    state: dict[str, torch.Tensor] = torch.load(
        path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
    )
    return state
