"""Exports load in plain transformers and PEFT with the trained model's logits; a different model is never kept."""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from kit import checkpoint, make_config, questions
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cmexam_tune import export
from cmexam_tune.__main__ import main
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Turn
from cmexam_tune.evaluate import evaluate
from cmexam_tune.interop.exporting import model_card, modelfile, saved_files
from cmexam_tune.models.families.llama import Llama, source_ids
from cmexam_tune.prompts import TEMPLATES, Dialogue, rounds
from cmexam_tune.train import train
from cmexam_tune.training.run_directory import run as runs

llama = Llama()

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "r": 4, "lora_alpha": 16, "lora_dropout": 0.0},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 4},
    "full": {"method": "full"},
    "head": {"method": "head"},
}


WRAPPERS = [name for name in TEMPLATES if not name.endswith("_clin")]


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
        written = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
        tokenizer_config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert tokenizer_config["chat_template"] == tokenizer.chat_template


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


# What lmsys/vicuna-7b-v1.5 and Llama-2-chat were released with, which transformers reads and refuses to write; and
# settings that nothing can be made of.
@pytest.mark.parametrize(
    ("method", "released", "kept"),
    [
        ("full", {"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ("lora", {"temperature": 0.9, "top_p": 0.6}, {"temperature": 0.9, "top_p": 0.6, "do_sample": True}),
        ("lora", {"num_beams": 1, "length_penalty": 2.0}, {}),
    ],
)
def test_generation_settings_that_transformers_refuses_to_write(
    tmp_path: Path, method: str, released: dict[str, Any], kept: dict[str, Any]
) -> None:
    base = tmp_path / "vicuna"
    shutil.copytree(checkpoint("llama"), base)
    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **released}
    (base / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    jsonl.write(tmp_path / "q.jsonl", questions(4))
    train(
        make_config(
            model__model_name_or_path=str(base),
            data={"train": [str(tmp_path / "q.jsonl")]},
            training={"max_steps": 1, "report_to": "none", "save_strategy": "no"},
            tuning=METHODS[method],
            out=str(tmp_path / "run"),
        )
    )
    run_export("--run", tmp_path / "run", "--out", tmp_path / "m", *(["--merge"] if method == "lora" else []))
    written = json.loads((tmp_path / "m" / "generation_config.json").read_text(encoding="utf-8"))
    assert {key: written.get(key) for key in kept} == kept
    assert written["eos_token_id"] == 2


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


WITH_SYSTEM = [name for name in WRAPPERS if TEMPLATES[name].system is not None]


@pytest.mark.parametrize(
    ("template", "system"),
    [("auto", None), *((name, None) for name in WRAPPERS), *((name, "你是医生。\n") for name in WITH_SYSTEM)],
)
def test_the_chat_template_gives_the_training_prompt(
    trained: Callable[[str, str], Path], tmp_path: Path, template: str, system: str | None
) -> None:
    """In transformers alone, also for a conversation; with the system text of the run where a client sends none."""
    run = trained("llama", "lora")
    config, loaded = runs.load(run)
    prompt = dataclasses.replace(config.prompt, template=template, system=system)
    config = dataclasses.replace(config, prompt=prompt)
    saved_files.save_tokenizer(config, loaded, tmp_path)
    there = AutoTokenizer.from_pretrained(tmp_path)
    codec = llama.codec(AutoTokenizer.from_pretrained(config.model.model_name_or_path), prompt, config.model)
    text, earlier = "下列属于抗菌药的是？\nA 青霉素", rounds([Turn("你好\n", "您好 ")])
    for history in ((), earlier):
        (wanted,) = codec.sources([Dialogue(text, history, system)])
        asked = Dialogue(text, history).messages()
        assert there.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) == wanted
    with pytest.raises(TemplateError, match="no form for messages in the order assistant, user"):
        there.apply_chat_template(Dialogue(text, earlier[1:]).messages(), tokenize=False)
    assert "MESSAGE" in model_card.card(config, loaded, "hf", None)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 123_456.0},
    {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_older_tools_find_rope_and_chat_template(tmp_path: Path, rope: dict[str, Any]) -> None:
    """Ollama reads these keys only; transformers must read from both names what it read from its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, rope_parameters=rope, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}\n", encoding="utf-8")
    ids = torch.arange(60)[None]
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved_files.add_older_names(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(before(ids).logits, after(ids).logits)
    read = {key: value for key, value in after.config.rope_parameters.items() if key != "type"}
    assert read == before.config.rope_parameters == rope
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == rope["rope_theta"] and config["rope_parameters"] == rope
    scaling = config.get("rope_scaling", {"type": "default", **rope})
    assert scaling == {"type": rope["rope_type"], **rope}
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer == {"eos_token": "</s>", "chat_template": "{{ messages[0]['content'] }}\n"}


def test_a_run_is_shown_in_a_line() -> None:
    assert repr(runs.Run(Path("runs/x"), make_config())) == "Run('runs/x': llama lora)"


def test_the_card_says_how_to_load(trained: Callable[[str, str], Path], tmp_path: Path) -> None:
    for family, method, load in (("llama", "lora", "PeftModel"), ("bert", "head", "ForSequenceClassification")):
        run_export("--run", trained(family, method), "--out", tmp_path / family)
        card = tmp_path / family / "README.md"
        text = card.read_text(encoding="utf-8")
        assert load in text and card.stat().st_mode & 0o040
        base = runs.open_run(trained(family, method)).config.model.model_name_or_path
        assert base not in text and Path(base).name in text and "base_model:" not in text


@pytest.mark.parametrize(
    ("model", "name"),
    [("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"), ("/home/me/models/qwen", "qwen"), ("~/qwen", "qwen"),
     ("models/qwen/7b", "7b"), ("./qwen", "qwen"), ("gpt2", "gpt2")],
)  # fmt: skip
def test_the_card_names_no_place_of_this_machine(
    model: str, name: str, trained: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, loaded = runs.load(trained("llama", "lora"))
    config = replace(config, model=replace(config.model, model_name_or_path=model))
    text = model_card.card(config, loaded, "peft", None)
    assert f"from_pretrained({name!r})" in text and (f"base_model: {name}\n" in text) == ("/" in name)
    assert "/home/me" not in text and "~" not in text


def ollama_prompt(file: str, prompt: str, system: str | None = None) -> tuple[str, dict[str, list[str]]]:
    """Read a Modelfile as Ollama does: the prompt, and the parameters. Knows what Go templates of ours may hold."""
    found: dict[str, list[str]] = {}
    for name, long, short in re.findall(
        r'^(FROM|TEMPLATE|SYSTEM|PARAMETER \w+) (?:"""(.*?)"""|(.*?))$', file, re.M | re.S
    ):
        found.setdefault(name, []).append(long or short.strip('"'))
    (form,) = found["TEMPLATE"]
    system = found.get("SYSTEM", [""])[0] if system is None else system
    form = re.sub(r"{{ if \.System }}(.*?){{ end }}", lambda m: m[1] if system else "", form, flags=re.S)
    assert not re.search(r"{{(?! \.(Prompt|System) }})", form)
    values = {"Prompt": prompt, "System": system}
    return re.sub(r"{{ \.(\w+) }}", lambda m: values[m[1]], form), found


@pytest.mark.parametrize("template", ["auto", *WRAPPERS])
def test_the_modelfile_gives_the_training_prompt(trained: Callable[[str, str], Path], template: str) -> None:
    config, loaded = runs.load(trained("llama", "lora"), ["generation.max_new_tokens=77"])
    text = "下列属于抗菌药的是？\nA 青霉素 {{ .System }}"
    has_system = template != "auto" and TEMPLATES[template].system is not None
    for system in (None, "", "你是医生。\n请回答") if has_system else (None,):
        prompt = dataclasses.replace(config.prompt, template=template, system=system)
        there = dataclasses.replace(config, prompt=prompt)
        codec = llama.codec(loaded.tokenizer, prompt, config.model)
        (wanted,) = codec.sources([Dialogue(text, (), system)])
        made = modelfile.written(there, loaded)
        assert isinstance(made, modelfile.Modelfile)
        rendered, file = ollama_prompt(made.text(), text)
        assert source_ids(loaded.tokenizer, [rendered]) == [wanted]
        assert file.get("PARAMETER stop", []) == list(codec.stop) and file["FROM"] == ["."]
        assert file["PARAMETER num_predict"] == ["77"] and file["PARAMETER temperature"] == ["0"]
        assert file["PARAMETER repeat_penalty"] == ["1"], "Ollama's default was 1.1 for long"
        if has_system:
            (other,) = codec.sources([Dialogue(text, (), "别的")])
            assert source_ids(loaded.tokenizer, [ollama_prompt(made.text(), text, "别的")[0]]) == [other]


def test_where_no_modelfile_can_be_written(trained: Callable[[str, str], Path], tmp_path: Path) -> None:
    config, loaded = runs.load(trained("llama", "lora"))
    quotes = dataclasses.replace(config.prompt, template="alpaca", system='"""')
    assert "cannot hold" in str(modelfile.written(dataclasses.replace(config, prompt=quotes), loaded))
    chatglm = dataclasses.replace(config, model=dataclasses.replace(config.model, family="chatglm"))
    assert "does not read" in str(modelfile.written(chatglm, loaded))
    loaded.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert "FROM ." in str(modelfile.written(config, loaded))
    run_export("--run", trained("bert", "head"), "--out", tmp_path / "b")
    assert not (tmp_path / "b" / "Modelfile").exists()
    assert "Modelfile" not in (tmp_path / "b" / "README.md").read_text(encoding="utf-8")


def test_the_card_has_data_scores_and_modelfile(trained: Callable[[str, str], Path], tmp_path: Path) -> None:
    run = shutil.copytree(trained("llama", "lora"), tmp_path / "run")
    asked = run.parent / "q.jsonl"
    jsonl.write(asked, questions(8))
    guessed = [Prediction(one.id, "A", "A" if i < 4 else one.answer) for i, one in enumerate(questions(8))]
    jsonl.write(tmp_path / "p.jsonl", guessed)
    evaluate([tmp_path / "p.jsonl"], asked, run / "report")
    accuracy = json.loads((run / "report" / "report.json").read_text())["overall"]["accuracy"]
    (run / "report2").mkdir()
    of_other = '{"overall": {"accuracy": 98.76}, "identity": {"adapter": "seed1/other"}}'
    (run / "report2" / "report.json").write_text(of_other, encoding="utf-8")
    run_export("--run", run, "--out", tmp_path / "m", "--merge")
    card = (tmp_path / "m" / "README.md").read_text(encoding="utf-8")
    assert "98.76" not in card
    (train_file,) = runs.open_run(run).config.data.train
    assert hashlib.sha256(Path(train_file).read_bytes()).hexdigest() in card
    loss = json.loads((run / "metrics.json").read_text())["train_loss"]
    assert f"| train_loss (training) | {loss:.4g} |" in card and f"| {accuracy:.2f}%" in card
    assert "accuracy on q.jsonl" in card and "ollama create" in card
    assert (tmp_path / "m" / "Modelfile").read_text(encoding="utf-8").startswith("FROM .\nTEMPLATE ")


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        run_export("--run", tmp_path, "--out", tmp_path / "x")


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        main(["export", "--run", str(tmp_path), "--out", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()
