"""Training in half precision on a CPU: every family and method, base weights in bfloat16 and float16."""

from pathlib import Path
from typing import Any

import pytest
import train_helpers

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from cmexam_tune import tiny
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.prediction import loading
from cmexam_tune.runfolder import runs
from cmexam_tune.train import train
from cmexam_tune.training import checkpoints

LORA = {"method": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora-bias": {**LORA, "bias": "all"},
    "lora-saved": {**LORA, "modules_to_save": ["lm_head", "embed_tokens"]},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 3, "prefix_projection": True},
    "head": {"method": "head"},
    "full": {"method": "full"},
}
CASES = [("llama", "lora"), ("llama", "lora-bias"), ("llama", "lora-saved"), ("llama", "ptuning"), ("llama", "full"),
         ("chatglm", "lora"), ("chatglm", "ptuning"), ("chatglm2", "lora"), ("chatglm2", "ptuning"),
         ("bert", "lora"), ("bert", "ptuning"), ("bert", "head")]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = train_helpers.world(tmp_path_factory.mktemp("half"), count=6)
    for name in ("chatglm", "chatglm2", "bert"):
        tiny.build(name, folder / name, hidden=32, layers=2)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "method"), CASES)
def test_trains_evaluates_saves_and_predicts(folder: Path, family: str, method: str, dtype: str) -> None:
    """Two steps with an evaluation by exam accuracy, which generates; then the saved run answers."""
    changes: dict[str, Any] = {
        "model__family": family.rstrip("2"), "model__model_name_or_path": str(folder / family), "model__dtype": dtype,
        "tuning": METHODS[method], "prompt__style": "answer", "training__max_steps": 2,
        "training__eval_strategy": "steps", "training__eval_steps": 2, "training__save_steps": 2,
        "training__metric_for_best_model": "exam_accuracy", "data__validation": [str(folder / "val.jsonl")],
        "data__max_eval_samples": 2, "generation": {"max_new_tokens": 2},
    }  # fmt: skip
    if family == "bert":
        changes["model__head"] = "choice"
    run = train(train_helpers.recipe(folder, out=str(folder / f"{family}-{method}-{dtype}"), **changes))
    losses = [entry["loss"] for entry in run.log if "loss" in entry]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
    tuned = load_file(checkpoints.found(run.path)[0] / "trainable.safetensors")
    assert {value.dtype for value in tuned.values()} == {torch.float32}
    loaded = loading.load(loading.open_source(run.path))
    questions = list(jsonl.read(folder / "val.jsonl", Question))[:2]
    assert len(list(runs.parts(run.config)[0].answer(loaded, questions, run.config))) == 2
