"""Where a model comes from, a run or a recipe, and who computes it: this process, or a server (`model.engine`)."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cmexam_tune.config import Config, load_config
from cmexam_tune.core import libraries
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models import families
from cmexam_tune.models.completion import Engine, TextEngine
from cmexam_tune.models.families import Family, Loaded


@dataclass(frozen=True)
class Source:
    """A config, and the run folder whose adapter belongs to it, if any."""

    config: Config
    run: Path | None = None
    overrides: tuple[str, ...] = ()
    log: Path | None = None
    """Where a server that is started for it writes; default: a temporary file."""

    def beside(self, out: Path) -> "Source":
        """Return it with the log of a server that is started for it beside an output."""
        return replace(self, log=out.with_name(f"{out.name}.engine.log"))


def open_source(source: str | Path | Config, overrides: Sequence[str] = ()) -> Source:
    """Return what `source` names: a run folder, a Config, or the path or name of a recipe. Nothing is loaded.

    Raises:
        UserError: there is no such run or recipe, or overrides that cannot be.
    """
    libraries.quiet()
    if isinstance(source, Config):
        if overrides:
            raise ConfigError("overrides change a recipe; with a Config use dataclasses.replace.")
        return Source(source)
    if Path(source).is_dir():
        from cmexam_tune.training.run_directory import run as runs

        return Source(runs.open_run(source, overrides).config, Path(source), tuple(overrides))
    return Source(load_config(source, overrides), None, tuple(overrides))


def load(source: Source) -> Loaded:
    """Return the model in eval mode and its tokenizer: on this process's card, or at the server of `model.engine`.

    LoRA is merged where it can be.

    Raises:
        UserError: no finished run, missing weights, or a model that does not fit the adapter.
    """
    if source.config.model.engine is not None:
        return _served(source)
    family = Family.named(source.config.model.family)
    if family.only_answers:
        return family.load(source.config.model)
    from cmexam_tune.inference import merging

    # One whose weights merging has spoilt is read again; by then nothing holds it any more.
    return merging.merged(_read(source)) or _read(source)


def load_writer(
    run: str | Path, overrides: Sequence[str] = (), *, in_this_process: bool = False
) -> tuple[Config, Loaded]:
    """Return the config and model of a run, or of a recipe whose model answers as it is, on the card if there is one.

    Args:
        run: the run's folder, or the recipe's path or name.
        overrides: changes to the recipe.
        in_this_process: refuse a model that a server of `model.engine` would compute.

    Raises:
        UserError: no finished run, or one whose model chooses among options and cannot write.
    """
    source = open_source(run, overrides)
    model = source.config.model
    if Family.named(model.family).task != "generate":
        raise UserError(f"{run}: a model of family {model.family} chooses an option and writes no text. Use predict.")
    if model.is_remote:
        raise UserError(f"{run}: the model is behind an address already; talk to it there.")
    if in_this_process and model.engine is not None:
        raise UserError(
            f"model.engine={model.engine}: {model.engine} serves by itself. Start it, or leave out model.engine."
        )
    return source.config, load(source)


def open_engine(source: Source) -> Engine:
    """Load the model and bind it to its config.

    Raises:
        UserError: as `load`, or settings that the model cannot be asked by.
    """
    return Family.named(source.config.model.family).engine(load(source), source.config)


def open_writer(source: Source, purpose: str) -> TextEngine:
    """Load a model that writes and bind it to its config.

    Args:
        source: the model.
        purpose: what it is to write, for the message: "annotate".

    Raises:
        ConfigError: it chooses among options and cannot write.
        UserError: as `load`, or settings that the model cannot be asked by.
    """
    return families.writer(source.config.model.family, purpose).engine(load(source), source.config)


def _served(source: Source) -> Loaded:
    """Return a model that `model.engine` computes.

    Raises:
        UserError: no finished run, or a model or method that the engine cannot compute.
    """
    from cmexam_tune.models import engines

    config = source.config
    family, model, adapter = Family.named(config.model.family), config.model, None
    if not family.engines_compute:
        raise ConfigError(f"model.engine={model.engine}: cannot compute family {model.family}. Leave it out.")
    if source.run is not None:
        from cmexam_tune.training.run_directory import run as runs

        model, adapter = runs.as_served(source.run, source.overrides)
    log = source.log or Path(tempfile.gettempdir()) / f"cmexam_tune_{model.engine}_{os.getpid()}.log"
    loaded = engines.load(model, adapter, log)
    if source.run is not None:
        runs.check_tokenizer(source.run, source.overrides, loaded.tokenizer)
    return loaded


def _read(source: Source) -> Loaded:
    import torch

    from cmexam_tune.models import checkpoint, device

    place = str(device.place())
    if source.run is not None:
        from cmexam_tune.training.run_directory import run as runs

        _, loaded = runs.load(source.run, source.overrides, place)
    else:
        loaded = Family.named(source.config.model.family).load(source.config.model, device=place)
    model: Any = loaded.model
    try:
        return Loaded(model.to(place).eval(), loaded.tokenizer)
    except torch.OutOfMemoryError as error:
        raise checkpoint.unloadable(source.config.model.model_name_or_path, error) from None
