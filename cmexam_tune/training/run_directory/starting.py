"""How a training takes its run folder: nothing is written before all was checked, and no finished run is lost.

`resolve_run` only reads. `acquire_run` holds the folder while training writes to it; with --overwrite the run that lay
there becomes a backup, which comes back if the new one fails before its first step, and is deleted after it.
"""

import contextlib
import dataclasses
import platform
import reprlib
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from cmexam_tune import prompts
from cmexam_tune.config import Config, dump_config
from cmexam_tune.core import __version__, cli, files
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models import checkpoint_validation
from cmexam_tune.training.run_directory import run as runs

NAMED = 5
"""Differences to another experiment that the message names."""
MODEL_PATHS = ("model_name_or_path", "adapter_name_or_path")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "tokenizers", "safetensors", "sentencepiece")
"""Whose versions environment.json holds."""
CACHE = "cache"
"""Encoded questions; a command that was refused may leave them, for the next one to find."""
INCIDENTAL: dict[str, tuple[str, ...]] = {
    "training": (
        "logging_steps", "logging_strategy", "logging_first_step", "report_to", "disable_tqdm", "save_steps",
        "save_strategy", "save_total_limit", "run_name", "dataloader_num_workers", "dataloader_pin_memory", "log_level",
        # A step's questions and their weights stay (`EFFECTIVE_BATCH`); what is kept in memory at a time changes.
        "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size",
        "max_tokens_per_batch", "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs",
    ),
    "data": ("num_workers", "cache_dir", "test"),
}  # fmt: skip
"""Keys that do not make it another experiment: they say how often to look or how much at a time, not what is learnt."""
EFFECTIVE_BATCH = "training.per_device_train_batch_size x gradient_accumulation_steps"
"""Name of what decides the questions of a step where `training.global_batch_size` does not."""


def backup_path(path: Path) -> Path:
    """Return where the old run of `path` is kept until its replacement has taken a step."""
    return path.with_name(f".{path.name}.replaced")


def resolve_run(config: Config, *, overwrite: bool = False, resume: bool = False) -> runs.Run:
    """Return the run of an experiment, new or one that holds the same experiment; nothing is touched.

    Raises:
        UserError: the folder holds another experiment or something else (`overwrite` replaces a run), or `resume` was
            asked for and there is nothing to resume.
    """
    path, config = Path(config.out), absolute(config)
    if not path.name:
        raise UserError(f"out={path}: name a folder of its own, for example out=runs/my_run.")
    if files.status(path) is not None and not path.is_dir():
        raise UserError(f"out={path}: is a file, a folder is needed.")
    # A run that was replaced by one that was killed in its first step is still the run of this folder.
    present = backup_path(path) if backup_path(path).is_dir() else path
    if _is_empty(present):
        if resume:
            raise UserError(f"out={path}: there is no run to resume. Leave out --resume to start it.")
        _check_names(config)
        return runs.Run(path, config)
    if overwrite:
        _check_names(config)
        _check_replaceable(present, config)
        return runs.Run(path, config)
    run = _open_or_refuse(present)
    if different := _differences(run.config, config):
        # Else a slip in the command would be called another experiment.
        _check_names(config)
        omitted = f"; and {len(different) - NAMED} more" if len(different) > NAMED else ""
        raise UserError(
            f"out={path} holds another experiment; it differs in {'; '.join(different[:NAMED])}{omitted}. "
            "Choose another out=..., or add --overwrite to replace it."
        )
    return runs.Run(path, config)


def absolute(config: Config) -> Config:
    """Return the config with paths of this machine that hold from any folder; names on the hub stay."""

    def resolved(path: str | None) -> str | None:
        if path is None or not (local := Path(path).expanduser()).exists():
            return path
        return str(local.absolute())

    model, data = config.model, config.data
    paths: dict[str, Any] = {name: resolved(getattr(model, name)) for name in MODEL_PATHS}
    keys = ("train", "validation", "test")
    questions: dict[str, Any] = {key: tuple(resolved(path) or path for path in getattr(data, key)) for key in keys}
    return dataclasses.replace(
        config, model=dataclasses.replace(model, **paths), data=dataclasses.replace(data, **questions)
    )


def _check_names(config: Config) -> None:
    """Refuse a style or template that is unknown, or a model that is not there.

    Raises:
        UserError: naming it.
    """
    prompts.resolve_style(config.prompt)
    if config.prompt.template != "auto":
        prompts.template(config.prompt.template)
    if not config.model.is_remote:
        checkpoint_validation.check_place(config.model.model_name_or_path)


def _is_empty(path: Path) -> bool:
    """Return whether nothing is there, or only what a training writes before its first step."""
    names = {item.name for item in path.iterdir()} - {CACHE} if path.is_dir() else set()
    if names == {runs.CONFIG, runs.ENVIRONMENT}:
        return '"cmexam_tune":' in (path / runs.ENVIRONMENT).read_text("utf-8", "replace")
    return not names


def _open_or_refuse(path: Path) -> runs.Run:
    """Open what is at `path`, or say that it is no run folder and must not be touched."""
    if not (path / runs.CONFIG).is_file():
        raise UserError(f"out={path}: the folder is not empty and holds no run. Choose another out=...")
    try:
        return runs.look_at(path)
    except ConfigError as error:
        raise UserError(f"out={path}: holds a run that cannot be read. Choose another out=...\n{error}") from None


def _check_replaceable(path: Path, config: Config) -> None:
    """Refuse to replace a folder that this program has not written, or that holds what this training reads."""
    if not (path / runs.CONFIG).is_file() or path.is_symlink():
        raise UserError(f"out={path}: the folder holds no run, so --overwrite leaves it alone. Choose another out=...")
    model = config.model
    inputs = [*config.data.train, *config.data.validation, model.model_name_or_path, model.adapter_name_or_path]
    for item in filter(None, inputs):
        if Path(item).expanduser().resolve().is_relative_to(path.resolve()):
            raise UserError(f"out={path}: holds {item}, which this training reads. Choose another out=...")


def _differences(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for everything that makes another experiment."""
    before, after = _experiment(absolute(old)), _experiment(new)
    keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    return [f"{key}: {reprlib.repr(before.get(key))} there, {reprlib.repr(after.get(key))} here" for key in keys]


def _experiment(config: Config) -> dict[str, object]:
    """Return `section.key` -> value of everything that decides what is learnt."""
    sections = {name: values for name, values in config.to_dict().items() if name not in ("out", "generation")}
    keys = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
        if key not in INCIDENTAL.get(section, ())
    }
    if config.training.global_batch_size is None:
        keys[EFFECTIVE_BATCH] = config.training.micro_batch * config.training.accumulation
    return keys


def restore_backup(path: Path) -> None:
    """Restore a run whose replacement was killed before its first step; on the first process only.

    Raises:
        UserError: another training writes there.
    """
    if backup_path(path).is_dir():
        with files.lock(path):
            _restore(path)


@contextlib.contextmanager
def acquire_run(run: runs.Run, *, overwrite: bool, device: str, processes: int) -> Iterator[Callable[[], None]]:
    """Lock the folder of a run that starts or resumes; on the first process only.

    Args:
        run: whose folder is taken.
        overwrite: whether the run that is there is replaced.
        device: name of what is trained on, for environment.json.
        processes: how many train, for environment.json.

    Yields:
        A function to be called after the first step, which deletes the backup of the run that is replaced.

    Raises:
        UserError: another training writes there.
    """
    path, backup = run.path, backup_path(run.path)
    with files.lock(path):
        _restore(path)
        if overwrite and not _is_empty(path):
            cli.note(f"note: the run in {path} is replaced once the new one has taken its first step")
            path.rename(backup)
            if (backup / CACHE).is_dir():
                path.mkdir()
                (backup / CACHE).rename(path / CACHE)
        write_environment(run, device, processes)
        try:
            yield lambda: shutil.rmtree(backup, ignore_errors=True)
        except UserError:
            if _is_empty(path):  # refused before its first step
                for name in (runs.CONFIG, runs.ENVIRONMENT):
                    (path / name).unlink()
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        finally:
            _restore(path)


def _restore(path: Path) -> None:
    if backup_path(path).is_dir():
        shutil.rmtree(path, ignore_errors=True)
        backup_path(path).rename(path)


def write_environment(run: runs.Run, device: str, processes: int) -> None:
    """Write what is known before training: config.yaml and environment.json."""
    with files.atomic_write(run.path / runs.CONFIG) as handle:
        handle.write(dump_config(run.config))
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    files.write_json(
        run.path / runs.ENVIRONMENT,
        {
            "cmexam_tune": __version__,
            "python": platform.python_version(),
            **versions,
            "platform": platform.platform(),
            "device": device,
            "processes": processes,
            "command": sys.argv,
        },
    )
