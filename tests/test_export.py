"""Exports load in plain transformers and PEFT with the trained model's logits; a different model is never kept."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from modelkit import make_config, questions
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cmexam_tune import export
from cmexam_tune.__main__ import main
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.families import llama
from cmexam_tune.prompts import Dialogue
from cmexam_tune.runfolder import runs
from cmexam_tune.train import train

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "r": 4, "lora_alpha": 16, "lora_dropout": 0.0},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 4},
    "full": {"method": "full"},
    "head": {"method": "head"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Train each family and method once, hard enough that the result differs from the base."""
    folder = tmp_path_factory.mktemp("runs")
    jsonl.write(folder / "q.jsonl", questions(8))

    def make(family: str, method: str) -> Path:
        out = folder / f"{family}_{method}"
        if not out.exists():
            more = {"model__head": "label"} if family == "bert" else {}
            settings = {
                "num_train_epochs": 3,
                "learning_rate": 3e-2,
                "per_device_train_batch_size": 4,
                "report_to": "none",
            }
            data = {"train": [str(folder / "q.jsonl")]}
            train(make_config(family, data=data, training=settings, tuning=METHODS[method], out=str(out), **more))
        return out

    return make


def run_export(*arguments: object) -> int | None:
    return main(["export", *map(str, arguments)])


def plain_logits(model: Any, tokenizer: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            model.eval()(**{"input_ids": tokenizer(t, return_tensors="pt").input_ids}).logits[0] for t in export.PROBES
        ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=2e-4) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("family", "method", "flags"),
    [
        ("llama", "lora", ["--merge"]),
        ("llama", "full", []),
        ("bert", "lora", ["--merge"]),
        ("bert", "head", ["--format", "hf"]),
    ],
)
def test_whole_models_load_in_plain_transformers(
    trained: Callable[[str, str], Path], tmp_path: Path, family: str, method: str, flags: list[str]
) -> None:
    run = trained(family, method)
    run_export("--run", run, "--out", tmp_path / "m", *flags)
    auto = AutoModelForCausalLM if family == "llama" else AutoModelForSequenceClassification
    model, tokenizer = auto.from_pretrained(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    config, loaded = runs.load(run)
    assert same(plain_logits(model, tokenizer), export.logits(loaded))
    base = runs.parts(config)[0].load(config.model, questions(8))
    assert not same(plain_logits(model, tokenizer), export.logits(base))
    if family == "llama":
        assert model.config.use_cache


@pytest.mark.parametrize(("family", "method"), [("llama", "lora"), ("llama", "ptuning")])
def test_adapters_load_in_plain_peft(
    trained: Callable[[str, str], Path], tmp_path: Path, family: str, method: str
) -> None:
    run = trained(family, method)
    run_export("--run", run, "--out", tmp_path / "a", "--format", "peft")
    config, loaded = runs.load(run)
    base = AutoModelForCausalLM.from_pretrained(config.model.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    before = plain_logits(base, tokenizer)
    model = PeftModel.from_pretrained(base, str(tmp_path / "a"))
    assert same(plain_logits(model, tokenizer), export.logits(loaded))
    assert not same(before, export.logits(loaded))


def test_a_merged_model_that_differs_is_refused(
    trained: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft.tuners.lora import LoraModel

    def wrong(self: Any, **_: Any) -> Any:
        return self.unload()

    monkeypatch.setattr(LoraModel, "merge_and_unload", wrong)
    with pytest.raises(UserError, match="differ"):
        run_export("--run", trained("llama", "lora"), "--out", tmp_path / "m", "--merge")
    assert list(tmp_path.iterdir()) == []


WRONG = [
    ("lora", ["--format", "hf"], "--merge"),
    ("lora", ["--format", "chatglm"], "ChatGLM"),
    ("lora", ["--merge", "--format", "peft"], "Leave one"),
    ("ptuning", ["--merge"], "cannot be merged"),
    ("ptuning", ["--format", "chatglm"], "ChatGLM"),
    ("full", ["--merge"], "whole model already"),
    ("full", ["--format", "peft"], "whole model"),
]


@pytest.mark.parametrize(("method", "flags", "message"), WRONG)
def test_combinations_that_cannot_be(
    trained: Callable[[str, str], Path], tmp_path: Path, method: str, flags: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_export("--run", trained("llama", method), "--out", tmp_path / "x", *flags)
    assert list(tmp_path.iterdir()) == []


def test_only_an_earlier_export_is_replaced(trained: Callable[[str, str], Path], tmp_path: Path) -> None:
    run, mine, out = trained("llama", "lora"), tmp_path / "m", tmp_path / "out"
    mine.mkdir()
    (mine / "letter").touch()
    (tmp_path / ".out.part").mkdir()
    run_export("--run", run, "--out", out)
    with pytest.raises(UserError, match="--overwrite"):
        run_export("--run", run, "--out", out)
    (out / "old").touch()
    run_export("--run", run, "--out", out, "--overwrite")
    assert (out / "adapter_config.json").stat().st_mode & 0o040 and not (out / "old").exists()
    base = Path(runs.open_run(run).config.model.model_name_or_path)
    for folder in (mine, run, run.parent, base, base.parent, tmp_path, Path()):
        before = sorted(folder.rglob("*"))
        with pytest.raises(UserError, match="Choose another output"):
            run_export("--run", run, "--out", folder, "--overwrite")
        assert sorted(folder.rglob("*")) == before
    with pytest.raises(UserError, match="is a file"):
        run_export("--run", run, "--out", mine / "letter", "--overwrite")
    assert (tmp_path / ".out.part").is_dir(), "a folder of the user's own"


@pytest.mark.parametrize("template", ["auto", "alpaca", "cmexam_lora"])
def test_the_chat_template_gives_the_training_prompt(
    trained: Callable[[str, str], Path], tmp_path: Path, template: str
) -> None:
    run = trained("llama", "lora")
    config, loaded = runs.load(run)
    config = dataclasses.replace(config, prompt=dataclasses.replace(config.prompt, template=template))
    text = "下列属于抗菌药的是？\nA 青霉素"
    (wanted,) = llama.codec(loaded.tokenizer, config.prompt, config.model).sources([Dialogue(text)])
    export._set_chat_template(config, loaded)
    loaded.tokenizer.save_pretrained(tmp_path)
    there = AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": text}]
    assert there.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) == wanted
    assert "MESSAGE" in export.card(config, loaded, "hf")


def test_the_card_says_how_to_load(trained: Callable[[str, str], Path], tmp_path: Path) -> None:
    for family, method, load in (("llama", "lora", "PeftModel"), ("bert", "head", "ForSequenceClassification")):
        run_export("--run", trained(family, method), "--out", tmp_path / family)
        card = tmp_path / family / "README.md"
        assert load in card.read_text(encoding="utf-8") and card.stat().st_mode & 0o040


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        run_export("--run", tmp_path, "--out", tmp_path / "x")


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        main(["export", "--run", str(tmp_path), "--out", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()
