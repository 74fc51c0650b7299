"""The mean of the LoRA adapters of several runs, for example of several seeds, as one adapter.

A mean of the factors A and B (`linear` of PEFT's `add_weighted_adapter`) is not the mean of the updates BA. Ranks put
side by side (`cat`) are that mean, in an adapter whose rank is the sum of the ranks. PEFT's own `cat` rounds it to the
type of the base, bfloat16 for example, while adapters are trained in float32; here they are joined as they are stored.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cmexam_tune.config import dump_config
from cmexam_tune.core import documents, files
from cmexam_tune.core.errors import UserError
from cmexam_tune.training.run_directory import run as runs

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WHOLE = {"bias": "none", "modules_to_save": (), "use_rslora": False, "use_dora": False}
"""Settings of LoRA under which its update is alpha/r * BA and nothing else is trained."""
SAME = ("family", "base", "base_adapter", "template", "system", "style", "tokenizer")
"""Keys of an adapter's card that have to agree."""


def check(folders: Sequence[str | Path], overrides: Sequence[str] = ()) -> None:
    """Refuse runs whose adapters have no exact mean.

    Raises:
        UserError: fewer than two runs, one of them twice, unfinished or not plain LoRA of a decoder, or runs that
            differ in base, tokenizer, prompt or tuned layers.
    """
    if len(folders) < 2 or len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise UserError("--average: name at least two runs, each once.")
    first, *others = [_facts(runs.open_run(folder, overrides)) for folder in folders]
    for folder, facts in zip(folders[1:], others, strict=True):
        for key, value in first.items():
            if facts[key] != value:
                shown = "" if key == "tokenizer" else f": {value!r} there, {facts[key]!r} here"
                raise UserError(f"{folder}: cannot be averaged with {folders[0]}, {key} differs{shown}.")


def _facts(run: runs.Run) -> dict[str, object]:
    """Return the settings that averaged runs must have in common."""
    config = run.config
    family, method = runs.parts(config)
    if not method.averages or family.task != "generate":
        raise UserError(f"{run.path}: {config.tuning.method} on {config.model.family}; only LoRA on decoders averages.")
    for key, value in WHOLE.items():
        if (actual := getattr(config.tuning.settings, key)) != value:
            raise UserError(f"{run.path}: tuning.{key}={actual}: the mean of such adapters is not exact.")
    if not run.finished:
        raise UserError(f"{run.path}: training has not finished. Start the same command again to resume it.")
    card = vars(runs.AdapterCard.read(run))
    modules = _written(run).get("target_modules")
    targets = sorted(map(str, modules)) if isinstance(modules, list) else modules
    return {**{key: card[key] for key in SAME}, "tuning.target_modules": targets}


def _written(run: runs.Run) -> dict[str, object]:
    return dict(documents.read_json(run.adapter / ADAPTER_CONFIG, "adapter's config"))


@contextlib.contextmanager
def averaged(folders: Sequence[str | Path], overrides: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a run folder like the first run's, with the mean of all runs' adapters; it is there until the block ends.

    Raises:
        UserError: as `check`.
    """
    check(folders, overrides)
    opened = [runs.open_run(folder) for folder in folders]
    rank = sum(run.config.tuning.settings.r for run in opened)
    # With alpha = r the update is BA itself; what scaled each run's update is in its A.
    settings = dataclasses.replace(opened[0].config.tuning.settings, r=rank, lora_alpha=rank)
    config = dataclasses.replace(
        opened[0].config, tuning=dataclasses.replace(opened[0].config.tuning, settings=settings)
    )
    with tempfile.TemporaryDirectory() as folder:
        mean = runs.Run(Path(folder), config)
        (mean.path / runs.CONFIG).write_text(dump_config(config), encoding="utf-8")
        shutil.copytree(opened[0].adapter, mean.adapter)
        files.write_json(mean.adapter / ADAPTER_CONFIG, {**_written(mean), "r": rank, "lora_alpha": rank})
        _join(opened, mean.adapter / WEIGHTS)
        yield mean.path


def _join(opened: Sequence[runs.Run], out: Path) -> None:
    """Write the runs' factors side by side: A [rank, in] below each other, B [out, rank] beside each other."""
    import torch
    from safetensors.torch import load_file, save_file

    adapters = [load_file(run.adapter / WEIGHTS) for run in opened]
    scales = [run.config.tuning.settings.lora_alpha / run.config.tuning.settings.r / len(opened) for run in opened]
    joined = {}
    for name in adapters[0]:
        factors = [adapter[name].float() for adapter in adapters]
        if name.rpartition("lora_")[2].startswith(("A", "embedding_A")):
            # A alone is scaled: in the product BA each run then has its weight once.
            joined[name] = torch.cat([a * scale for a, scale in zip(factors, scales, strict=True)], dim=0)
        else:
            joined[name] = torch.cat(factors, dim=1)
    save_file(joined, out, {"format": "pt"})
