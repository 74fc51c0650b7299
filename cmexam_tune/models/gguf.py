"""GGUF files: llama.cpp's format, which holds config, tokenizer and (mostly quantised) weights of a model in one file.

transformers reads them with the `gguf` package. Weights are unpacked to `model.dtype`, so that they are trained, merged
and saved like any others. Nothing that lies beside a file is read: it may belong to another model.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import contextlib
import functools
import importlib.util
import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune.core import cli
from cmexam_tune.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
"""How llama.cpp names the parts of a split file."""


def find(name: str) -> Path | None:
    """Return the file that `model.model_name_or_path` means: itself, or the only one of a folder without other weights.

    Raises:
        UserError: a folder that holds several.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5]) + (", ..." if len(files) > 5 else "")
        raise UserError(f"model.model_name_or_path={name}: holds {len(files)} GGUF files ({names}). Name one of them.")
    return files[0] if files else None


def check(file: Path) -> None:
    """Refuse a file that cannot be read here, before anything long.

    Raises:
        UserError: it is a part of a split file, no GGUF at all, or the package that reads it is absent.
    """
    if PART.search(file.name):
        raise UserError(
            f"model.model_name_or_path={file}: a part of a split GGUF file. Join the parts with llama.cpp's "
            "`llama-gguf-split --merge` and name the whole file."
        )
    with file.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise UserError(f"model.model_name_or_path={file}: does not begin as a GGUF file does. Fetch it again.")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"model.model_name_or_path={file}: a GGUF file is read with the package gguf, which is not installed: "
            "pip install gguf"
        )


def read_config(file: Path) -> dict[str, object]:
    """Return what the file says in place of a config.json.

    Raises:
        Exception: whatever the libraries raise for a damaged file or an architecture that transformers cannot read.
    """
    return dict(_config(file, file.stat().st_mtime_ns))


@functools.lru_cache(maxsize=4)
def _config(file: Path, modified: int) -> Mapping[str, object]:
    """Walking a vocabulary takes seconds, and config, tokenizer and weights ask for it."""
    from transformers import PreTrainedConfig

    values, _ = PreTrainedConfig.get_config_dict(str(file.parent), gguf_file=file.name)
    # The name inside is the one that whoever made the file gave the model.
    return {**values, "_name_or_path": str(file)}


def read_tokenizer(file: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in the file, with the special tokens of its config.

    Raises:
        Exception: as `read_config`.
    """
    from transformers import AutoTokenizer

    with _alone(file) as folder:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    tokenizer.name_or_path = str(file)
    _follow(tokenizer, read_config(file), file)
    return tokenizer


def _follow(tokenizer: "PreTrainedTokenizerBase", config: Mapping[str, Any], file: Path) -> None:
    """Let the config decide where the tokenizer's special tokens are others: the model was trained with its ids.

    transformers spells the vocabulary anew but not these: `<｜end▁of▁sentence｜>` becomes a token behind the last
    embedding.
    """
    for name in ("bos_token", "eos_token"):
        config_id, tokenizer_id = config.get(f"{name}_id"), getattr(tokenizer, f"{name}_id")
        if not isinstance(config_id, int) or config_id == tokenizer_id or config_id >= int(config["vocab_size"]):
            continue
        token = tokenizer.convert_ids_to_tokens(config_id)
        which = f"{tokenizer_id} in its tokenizer, {config_id} ({token}) in its config, which is followed"
        cli.note(f"note: {file}: {name} is {which}")
        setattr(tokenizer, name, token)


def read_weights(
    load: Callable[..., tuple["PreTrainedModel", Mapping[str, Any]]], file: Path
) -> tuple["PreTrainedModel", Mapping[str, Any]]:
    """Return the model, unpacked, and transformers' loading info.

    Args:
        load: `from_pretrained` with all but the place.
        file: the file.

    Raises:
        Exception: as `read_config`.
    """
    import transformers

    # Weights left in their blocks can be neither trained nor saved.
    blocks: Any = transformers.GgufConfig
    # Its bar is for a terminal; in a log it would be one line of 30,000 characters.
    shown = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    with _alone(file) as folder, shown:
        model, info = load(folder, gguf_file=file.name, quantization_config=blocks(dequantize=True))
    model.name_or_path = model.config.name_or_path = str(file)
    return model, info


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[str]:
    """Yield a folder that holds the file and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.absolute())
        yield folder
