"""Training in half precision on a CPU: every family and method, base weights in bfloat16 and float16."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import train_helpers

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from cmexam_tune import tiny
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.export import export
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


def test_lora_on_weights_of_four_bits(folder: Path) -> None:
    """bitsandbytes' own layers hold the weights; what is trained is float32, learns, and the saved run answers."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = tiny.build("llama", folder / "wide", hidden=192, layers=2)
    changes = {
        "model__model_name_or_path": str(base), "model__load_in_4bit": True,
        "prompt__style": "answer", "training__num_train_epochs": 6, "training__learning_rate": 2e-2, "tuning": LORA,
    }  # fmt: skip
    run = train(train_helpers.recipe(folder, out=str(folder / "nf4"), **changes))
    losses = [entry["loss"] for entry in run.log if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    loaded = loading.load(loading.open_source(run.path))
    quantised = [m for m in loaded.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(quantised) == 14 and all(m.weight.quant_type == "nf4" for m in quantised)
    questions = list(jsonl.read(folder / "val.jsonl", Question))[:2]
    config = dataclasses.replace(run.config, generation=dataclasses.replace(run.config.generation, mode="likelihood"))
    assert len(list(runs.parts(run.config)[0].answer(loaded, questions, config))) == 2
    out = export(run.path, folder / "nf4_merged", merge=True)
    assert all(value.dtype.is_floating_point for value in load_file(out / "model.safetensors").values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tuning": {"method": "full"}}, "read by LoRA only"),
        ({"training__deepspeed": "zero3"}, "ZeRO-3 cannot share out"),
        ({"model__adapter_name_or_path": "x/y/z"}, "cannot be merged into weights of 4 bits"),
        ({"model__family": "chatglm", "model__model_name_or_path": "chatglm"}, "has no weights of 4 bits"),
    ],
)
def test_four_bits_that_cannot_be(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(train_helpers.recipe(folder, out=str(folder / "no"), model__load_in_4bit=True, **changes))
