"""How a training takes its run folder: nothing is written before all was checked, and no finished run is lost.

`prepare` only reads. `writing` holds the folder while training writes to it; with --overwrite the run that lay there is
moved aside, comes back if the new one fails before its first step, and is deleted after it.
"""

import contextlib
import reprlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cmexam_tune import prompts
from cmexam_tune.config import Config, parse_config, read_yaml
from cmexam_tune.core import cli, files
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models import checkpoint_validation
from cmexam_tune.training.run_directory import run as runs

SHOWN = 5
"""Differences that are named."""
CACHE = "cache"
"""Encoded questions; a command that was refused may leave them, for the next one to find."""
# Changing these does not make it another experiment: they say how often to look, not what is computed.
FREE = {
    "training": ("logging_steps", "logging_strategy", "logging_first_step", "report_to", "disable_tqdm", "save_steps",
                 "save_strategy", "save_total_limit", "run_name", "dataloader_num_workers", "dataloader_pin_memory",
                 "log_level"),
    "data": ("num_workers", "cache_dir", "test"),
    "generation": None,
}  # fmt: skip


def aside(path: Path) -> Path:
    """Return where the run of `path` waits while the one that replaces it has not taken a step."""
    return path.with_name(f".{path.name}.replaced")


def prepare(config: Config, overwrite: bool = False, resume: bool = False) -> runs.Run:
    """Return the run of an experiment, new or one that holds the same experiment; nothing is touched.

    Raises:
        UserError: the folder holds another experiment or something else (`overwrite` replaces a run), or `resume` was
            asked for and there is nothing to resume.
    """
    path, config = Path(config.out), runs.absolute(config)
    if not path.name:
        raise UserError(f"out={path}: name a folder of its own, for example out=runs/my_run.")
    if files.status(path) is not None and not path.is_dir():
        raise UserError(f"out={path}: is a file, a folder is needed.")
    held = aside(path) if aside(path).is_dir() else path
    if _empty(held):
        if resume:
            raise UserError(f"out={path}: there is no run to resume. Leave out --resume to start it.")
        _check_names(config)
        return runs.Run(path, config)
    if overwrite:
        _check_names(config)
        _check_replaceable(held, config)
        return runs.Run(path, config)
    found = open_run_or_refuse(held)
    if different := _differences(found.config, config):
        _check_names(config)
        more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise UserError(
            f"out={path} holds another experiment; it differs in {'; '.join(different[:SHOWN])}{more}. "
            "Choose another out=..., or add --overwrite to replace it."
        )
    return runs.Run(path, config, found.metrics)


def _check_names(config: Config) -> None:
    """Refuse a slip in the command, which would otherwise be called another experiment.

    Raises:
        UserError: a style or template that is unknown, or a model that is not there.
    """
    prompts.style_of(config.prompt)
    if config.prompt.template != "auto":
        prompts.template(config.prompt.template)
    if config.model.family != "endpoint":
        checkpoint_validation.check_place(config.model.model_name_or_path)


def _empty(path: Path) -> bool:
    """Return whether nothing is there, or only what a training writes before its first step."""
    names = {item.name for item in path.iterdir()} - {CACHE} if path.is_dir() else set()
    begun = {runs.CONFIG, runs.ENVIRONMENT}
    return not names or (names == begun and '"cmexam_tune":' in (path / runs.ENVIRONMENT).read_text("utf-8", "replace"))


def open_run_or_refuse(path: Path) -> runs.Run:
    """Open what is at `path`, or say that it is no run folder and must not be touched."""
    if not (path / runs.CONFIG).is_file():
        raise UserError(f"out={path}: the folder is not empty and holds no run. Choose another out=...")
    try:
        # Only compared with the config of the command, which has been asked for its consent to others' code.
        return runs.open_values(path, parse_config(read_yaml(path / runs.CONFIG), str(path / runs.CONFIG)))
    except ConfigError as error:
        raise UserError(f"out={path}: holds a run that cannot be read. Choose another out=...\n{error}") from None


def _check_replaceable(path: Path, config: Config) -> None:
    """Refuse to replace a folder that this program has not written, or that holds what this training reads."""
    if not (path / runs.CONFIG).is_file() or path.is_symlink():
        raise UserError(f"out={path}: the folder holds no run, so --overwrite leaves it alone. Choose another out=...")
    model = config.model
    read = [*config.data.train, *config.data.validation, model.model_name_or_path, model.adapter_name_or_path]
    for item in filter(None, read):
        if Path(item).expanduser().resolve().is_relative_to(path.resolve()):
            raise UserError(f"out={path}: holds {item}, which this training reads. Choose another out=...")


def _differences(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for everything that makes another experiment."""
    before, after = _experiment(runs.absolute(old)), _experiment(new)
    keys = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    return [f"{key}: {reprlib.repr(before.get(key))} there, {reprlib.repr(after.get(key))} here" for key in keys]


def _experiment(config: Config) -> dict[str, Any]:
    flat = {}
    for section, values in config.to_dict().items():
        if section == "out" or (section in FREE and FREE[section] is None):
            continue
        for key, value in values.items():
            if key not in (FREE.get(section) or ()):
                flat[f"{section}.{key}"] = value
    return flat


def settle(path: Path) -> None:
    """Put a run back whose replacement was killed before its first step; on the first process only.

    Raises:
        UserError: another training writes there.
    """
    if aside(path).is_dir():
        with files.lock(path):
            _restore(path)


@contextlib.contextmanager
def writing(run: runs.Run, overwrite: bool, facts: tuple[str, int]) -> Iterator[Callable[[], None]]:
    """Hold the folder of a run that starts or goes on; on the first process only.

    Args:
        run: whose folder is taken.
        overwrite: whether the run that is there is replaced.
        facts: device and number of processes, for environment.json.

    Yields:
        What is to be called after the first step: it lets go of the run that is replaced.

    Raises:
        UserError: another training writes there.
    """
    path, old = run.path, aside(run.path)
    with files.lock(path):
        _restore(path)
        if overwrite and not _empty(path):
            cli.note(f"note: the run in {path} is replaced once the new one has taken its first step")
            path.rename(old)
            if (old / CACHE).is_dir():
                path.mkdir()
                (old / CACHE).rename(path / CACHE)
        runs.begin(run, *facts)
        try:
            yield lambda: shutil.rmtree(old, ignore_errors=True)
        except UserError:
            if _empty(path):  # refused before its first step
                for name in (runs.CONFIG, runs.ENVIRONMENT):
                    (path / name).unlink()
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise
        finally:
            _restore(path)


def _restore(path: Path) -> None:
    if aside(path).is_dir():
        shutil.rmtree(path, ignore_errors=True)
        aside(path).rename(path)
