"""What predictions come from: config, weights, adapter, questions and versions, and whether two of them are one."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cmexam_tune.config import Config
from cmexam_tune.config.settings import SPEED
from cmexam_tune.core import __version__, files
from cmexam_tune.models import gguf

SAME_ANYWAY = {"config", "mode", "run", "questions", "versions", "result"}
"""Keys that say where something lay, by what it was run or how it went, or that `config` says again."""
SMALL = 64 << 20
"""Bytes up to which a file is checksummed as a whole."""
BLOCKS, BLOCK = 1024, 64
"""Of a larger file so many blocks of so many bytes, evenly spaced: every matrix of a model is touched."""


def provenance(
    config: Config, questions: str | Path, run: Path | None, shots: Sequence[str | Path] = ()
) -> dict[str, object]:
    """Return what predictions come from; `shots` are the files that examples are drawn from."""
    return {
        **of_model(config, run),
        "questions": str(questions),
        "questions_sha256": files.sha256(questions),
        "shots_sha256": [files.sha256(file) for file in shots],
        "context_sha256": files.sha256(config.prompt.context.passages) if config.prompt.context else None,
    }


def of_model(config: Config, run: Path | None) -> dict[str, object]:
    """Return the provenance of a model's outputs without that of the questions."""
    model = config.model
    return {
        "config": config.to_dict(),
        "mode": config.generation.mode,
        "run": None if run is None else str(run),
        "adapter_sha256": None if run is None else _checksums(run / "adapter"),
        "model_sha256": [
            fingerprint(folder) for folder in (model.model_name_or_path, model.adapter_name_or_path) if folder
        ],
        "versions": {
            "cmexam_tune": __version__,
            **{name: metadata.version(name) for name in ("torch", "transformers", "peft", "tokenizers")},
        },
    }


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: files.sha256(path) for path in sorted(folder.glob("*.safetensors"))}


def fingerprint(name: str) -> str | None:
    """Return a checksum of a model that takes seconds for any size, or None where it is not on this disk.

    Files of up to 64 MB count as a whole, of larger ones their size and 1,024 evenly spaced blocks, so that another
    fine-tuning at the same path is noticed.
    """
    file = gguf.find(name)
    folder = _folder(name) if file is None else file.parent
    if folder is None:
        return None
    digest = hashlib.sha256()
    counted = folder.iterdir() if file is None else (file,)
    for path in sorted(path for path in counted if path.is_file() and path.suffix != ".md"):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for block in _blocks(path):
            digest.update(block)
    return digest.hexdigest()


def _folder(name: str) -> Path | None:
    """Return the folder of a checkpoint: a path, or what the hub's cache holds under that name."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        # Of a file that the hub is known not to have, this returns a sentinel object rather than None.
        cached = [try_to_load_from_cache(name, file) for file in ("config.json", "adapter_config.json")]
    except HFValidationError:
        return None
    return next((Path(path).parent for path in cached if isinstance(path, str)), None)


def _blocks(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as handle:
        if size <= SMALL:
            yield bytes.fromhex(files.sha256(path))
            return
        for number in range(BLOCKS):
            # The first block begins the file, the last one ends with it.
            handle.seek(number * (size - BLOCK) // (BLOCKS - 1))
            yield handle.read(BLOCK)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two experiments differ; what changes only speed or place does not count."""
    changed = [key for key in {*old, *new} - SAME_ANYWAY if old.get(key) != new.get(key)]
    for section in ("prompt", "model", "tuning", "generation"):
        sides = [side.get("config", {}).get(section) for side in (old, new)]
        before, after = (side if isinstance(side, Mapping) else {} for side in sides)
        keys = {*before, *after} - SPEED
        changed += [f"{section}.{key}" for key in keys if before.get(key) != after.get(key)]
    return sorted(changed)
