"""`export --average`: the logits of the mean update, computed here from the runs' own files; other runs are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import make_config, questions
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cmexam_tune import export
from cmexam_tune.__main__ import main
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.interop.exporting import averaging
from cmexam_tune.train import train
from cmexam_tune.training.run_directory import run as runs

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that trains a tiny LoRA run once."""
    folder = tmp_path_factory.mktemp("runs")
    jsonl.write(folder / "q.jsonl", questions(8))

    def made(name: str, seed: int = 1, family: str = "llama", **changes: Any) -> Path:
        out = folder / name
        if not out.exists():
            training = {"num_train_epochs": 2, "learning_rate": 3e-2, "per_device_train_batch_size": 4, "seed": seed}
            tuning = {"method": "lora", "r": 4, "lora_alpha": 16, "lora_dropout": 0.0, **changes.pop("tuning", {})}
            data = {"train": [str(folder / "q.jsonl")]}
            train(make_config(family, data=data, training=training, tuning=tuning, out=str(out), **changes))
        return out

    return made


def logits(model: Any, tokenizer: Any) -> list[torch.Tensor]:
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in export.PROBES]
    with torch.no_grad():
        return [model.eval()(input_ids=one).logits[0].float() for one in ids]


def with_mean(folders: list[Path]) -> Any:
    """Return the base with the mean of the updates in its weights: safetensors and a matrix product, no PEFT."""
    model: Any = AutoModelForCausalLM.from_pretrained(runs.open_run(folders[0]).config.model.model_name_or_path)
    weights = dict(model.named_parameters())
    for folder in folders:
        facts = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
        adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
        for name in [name for name in adapter if name.endswith("lora_A.weight")]:
            update = adapter[name.replace("lora_A", "lora_B")].float() @ adapter[name].float()
            target = weights[name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")]
            target.data += update * facts["lora_alpha"] / facts["r"] / len(folders)
    return model


def close(first: list[torch.Tensor], second: list[torch.Tensor], limit: float) -> bool:
    return all(float((a - b).abs().max() / a.abs().max()) <= limit for a, b in zip(first, second, strict=True))


def test_it_is_the_mean_of_the_updates(make: Make, tmp_path: Path) -> None:
    """Three seeds, one of another rank and alpha; as an adapter in plain PEFT and merged in plain transformers."""
    three = [make("one"), make("two", seed=2), make("wide", seed=3, tuning={"r": 6, "lora_alpha": 9})]
    words = ["export", "--average", *map(str, three), "--out"]
    assert main([*words, str(tmp_path / "a")]) is None
    assert main([*words, str(tmp_path / "m"), "--merge"]) is None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    wanted = logits(with_mean(three), tokenizer)
    base: Any = AutoModelForCausalLM.from_pretrained(runs.open_run(three[0]).config.model.model_name_or_path)
    before = logits(base, tokenizer)
    adapter: Any = PeftModel.from_pretrained(base, str(tmp_path / "a"))
    assert adapter.peft_config["default"].r == 14
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert close(wanted, logits(adapter, tokenizer), 1e-4) and close(wanted, logits(merged, tokenizer), 1e-4)
    for other in (before, *(export.logits(runs.load(run)[1]) for run in three)):
        assert not close(wanted, other, 1e-2)
    assert "mean of the updates of 3 runs" in (tmp_path / "a" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_is_rounded_to_the_type_of_the_base(make: Make, tmp_path: Path, dtype: str) -> None:
    two = [make("one"), make("two", seed=2)]
    for name, words in (("half", [f"model.dtype={dtype}"]), ("whole", [])):
        export.export(two, tmp_path / name, overrides=words)
    half, whole = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("half", "whole"))
    assert all(torch.equal(half[name], whole[name]) and half[name].dtype == torch.float32 for name in whole)


def test_it_is_what_peft_computes_in_float32(make: Make) -> None:
    """`cat` of `add_weighted_adapter`, layer by layer."""
    two = [make("one"), make("wide", seed=3, tuning={"r": 6, "lora_alpha": 9})]
    _, loaded = runs.load(two[0])
    model: Any = loaded.model
    model.load_adapter(str(two[1] / "adapter"), "second")
    model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "cat", combination_type="cat")
    with averaging.averaged(two) as run:
        mean: Any = runs.load(run)[1].model
    layers = [(name, module) for name, module in model.named_modules() if "cat" in getattr(module, "lora_A", ())]
    assert layers
    for name, module in layers:
        torch.testing.assert_close(
            mean.get_submodule(name).get_delta_weight("default"), module.get_delta_weight("cat"), atol=1e-6, rtol=1e-5
        )


def test_runs_that_differ_are_refused(make: Make, tmp_path: Path) -> None:
    one, out = make("one"), tmp_path / "x"
    other = {
        "template": make("template", prompt__template="alpaca"),
        "tuning.target_modules": make("targets", tuning={"target_modules": ["q_proj"]}),
        "style": make("style", prompt__style="answer_explain"),
        "tuning.use_rslora": make("rslora", tuning={"use_rslora": True}),
        "only LoRA on decoders": make("bert", family="bert"),
    }
    for words, run in other.items():
        with pytest.raises(UserError, match=words):
            export.export([one, run], out)
    with pytest.raises(UserError, match="at least two"):
        export.export([one, one], out)
    with pytest.raises(SystemExit):
        main(["export", "--average", str(one), "--out", str(out)])
    (unfinished := make("unfinished", seed=4)).joinpath("trainer_state.json").unlink()
    with pytest.raises(UserError, match="has not finished"):
        export.export([one, unfinished], out)
    assert not list(tmp_path.iterdir())
