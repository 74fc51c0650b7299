"""After saving: what was written is read back, is not empty, and gives the same logits."""

import dataclasses
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from cmexam_tune.core.errors import TrainingStopped
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Classifier
from cmexam_tune.training import checkpoints
from cmexam_tune.training.data.sampler import Plan
from cmexam_tune.training.run_directory import run as runs

if TYPE_CHECKING:
    from cmexam_tune.training.exam_evaluation import ExamTrainer


def save_and_verify(
    run: runs.Run,
    trainer: "ExamTrainer",
    method: Method,
    weights: Mapping[str, torch.Tensor],
    facts: runs.Card,
) -> None:
    """Write `adapter/` beside its place, check it, and rename it.

    Args:
        run: whose folder is written to.
        trainer: holds the trained model.
        method: writes and reads the adapter.
        weights: the trained parameters, collected under ZeRO-3.
        facts: what is stored with the adapter (`runs.card`).

    Raises:
        TrainingStopped: nothing was learnt to save, or reading back gives another model.
    """
    model = trainer.tuned
    # What DeepSpeed has in the model is rounded to half precision, or not there at all.
    state = None
    if trainer.is_deepspeed_enabled:
        state = weights if trainer.zero3 else {**model.state_dict(), **weights}
    if not weights or all(not value.any() for value in weights.values()):
        raise TrainingStopped(f"{run.path}: the adapter would be empty or all zero. The last checkpoint is kept.")
    if broken := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise TrainingStopped(f"{run.path}: {broken[0]} holds NaN or infinity, the adapter would be worthless.")
    staged = run.path / f".{runs.ADAPTER}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        method.save(model, staged, state)
        if method.standalone:
            trainer.loaded.tokenizer.save_pretrained(staged)
        runs.write_json(staged / runs.CARD, dataclasses.asdict(facts))
        if not any(path.stat().st_size for path in staged.glob("*.safetensors")):
            raise TrainingStopped(f"{run.path}: {method} wrote no weights.")
        if not trainer.zero3:
            _compare(trainer, model, method, weights)
        if run.adapter.exists():
            shutil.rmtree(run.adapter)
        staged.rename(run.adapter)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        if not isinstance(error, TrainingStopped) and checkpoints.is_full_disk(error, run.path):
            raise checkpoints.no_space(run.path) from error
        raise


@torch.no_grad()
def _compare(trainer: "ExamTrainer", model: Any, method: Method, weights: Mapping[str, torch.Tensor]) -> None:
    """Empty the trained parameters, read them back from the file and compare the logits of one question."""
    tuned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = _logits(trainer, model)
    for parameter in tuned.values():
        parameter.zero_()
    try:
        method.load(model, trainer.run_folder / f".{runs.ADAPTER}")
        after = _logits(trainer, model)
    finally:
        for name, value in weights.items():
            tuned[name].copy_(value)
    difference = float((before - after).abs().max())
    # On CPUs bitsandbytes packs its weights for speed and unpacks them when a state dict is asked for, and rounds.
    rounds = getattr(model, "is_loaded_in_4bit", False) and trainer.args.device.type == "cpu"
    if not difference <= (1e-2 if rounds else 1e-3) * max(1.0, float(before.abs().max())):
        raise TrainingStopped(
            f"{trainer.run_folder}: the adapter that was written gives other logits than the trained model (by "
            f"{difference:.3g}). The last checkpoint is kept; please report this."
        )


def _logits(trainer: "ExamTrainer", model: Any) -> torch.Tensor:
    batch = trainer.data.train[Plan((((0,),),), 1)]
    inputs = {k: v.to(trainer.args.device) for k, v in batch.micro[0].items()}
    with trainer.mixed():
        if trainer.label_logits is not None:
            labels = inputs.pop("labels")
            scores, _ = trainer.label_logits(model.eval(), inputs, labels)
        else:
            scores = cast(Classifier, trainer.family).scores(model.eval(), inputs)
    return torch.as_tensor(scores).float()
