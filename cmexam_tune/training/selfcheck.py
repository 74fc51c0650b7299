"""After saving: what was written is read back, is not empty, and gives the same logits."""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cmexam_tune.core import files
from cmexam_tune.core.errors import TrainingStopped
from cmexam_tune.training import checkpoints
from cmexam_tune.training.run_directory import run as runs

if TYPE_CHECKING:
    from cmexam_tune.training.safe_trainer import SafeTrainer


def save_and_verify(
    adapter: Path,
    trainer: "SafeTrainer",
    state_dict: Mapping[str, torch.Tensor],
    card: runs.AdapterCard,
) -> None:
    """Write the adapter beside its place, check it, and rename it.

    Args:
        adapter: folder that it will have; one that is there is replaced.
        trainer: holds the trained model, and the method that writes and reads the adapter.
        state_dict: the trained parameters, gathered from all processes.
        card: what is stored with the adapter.

    Raises:
        TrainingStopped: nothing was learnt to save, or reading back gives another model.
    """
    run = adapter.parent
    if not state_dict or all(not value.any() for value in state_dict.values()):
        raise TrainingStopped(f"{run}: the adapter would be empty or all zero. The last checkpoint is kept.")
    if broken := [name for name, value in state_dict.items() if not value.isfinite().all()]:
        raise TrainingStopped(f"{run}: {broken[0]} holds NaN or infinity, the adapter would be worthless.")
    model, method = trainer.unwrapped_model, trainer.method
    gathered = None
    if trainer.is_deepspeed_enabled:
        # What DeepSpeed has in the model is rounded to half precision, or not there at all.
        gathered = state_dict if trainer.zero3 else {**model.state_dict(), **state_dict}
    staged = adapter.with_name(f".{adapter.name}")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    with contextlib.ExitStack() as cleanup, checkpoints.naming_full_disk(run):
        cleanup.callback(shutil.rmtree, staged, ignore_errors=True)
        method.save(model, staged, gathered)
        if method.standalone:
            trainer.loaded.tokenizer.save_pretrained(staged)
        files.write_json(staged / runs.CARD, dataclasses.asdict(card))
        if not any(path.stat().st_size for path in staged.glob("*.safetensors")):
            raise TrainingStopped(f"{run}: {method} wrote no weights.")
        if not trainer.zero3:
            # Under ZeRO-3 this process holds a part of the base, and cannot run a forward pass by itself.
            _check_logits(staged, trainer, state_dict)
        if adapter.exists():
            shutil.rmtree(adapter)
        staged.rename(adapter)


@torch.no_grad()
def _check_logits(saved: Path, trainer: "SafeTrainer", state_dict: Mapping[str, torch.Tensor]) -> None:
    """Zero the trained parameters, read them back from `saved`, and compare the logits of one question.

    Zeroed first: parameters that `method.load` forgets would otherwise still be right in memory.

    Raises:
        TrainingStopped: they differ; the model is left as it was.
    """
    model = trainer.unwrapped_model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = trainer.probe_logits()
    for parameter in trained.values():
        parameter.zero_()
    try:
        trainer.method.load(model, saved)
        after = trainer.probe_logits()
    finally:
        for name, value in state_dict.items():
            trained[name].copy_(value)
    difference = float((before - after).abs().max())
    # On CPUs bitsandbytes packs its weights for speed and unpacks them when a state dict is asked for, and rounds.
    rounds = getattr(model, "is_loaded_in_4bit", False) and trainer.args.device.type == "cpu"
    if not difference <= (1e-2 if rounds else 1e-3) * max(1.0, float(before.abs().max())):
        raise TrainingStopped(
            f"{saved.parent}: the adapter that was written gives other logits than the trained model (by "
            f"{difference:.3g}). The last checkpoint is kept; please report this."
        )
