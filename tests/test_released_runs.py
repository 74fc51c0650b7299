"""From CMB's raw file to an export, on a tiny Baichuan as released: `full_disc_medllm_cmb` and `lora_baichuan2`.

pytest -q tests/test_released_runs.py
"""

import json
from pathlib import Path
from typing import Any

import forked_programs
import pytest
import torch
import training_kit
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from cmexam_tune import __main__ as programs
from cmexam_tune.config import ModelConfig
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import checkpoint, released
from cmexam_tune.training.run_directory import run as runs

SHORT = ("training.max_steps=3", "training.global_batch_size=4", "training.per_device_train_batch_size=2",
         "training.logging_steps=1", "training.save_steps=3", "training.eval_steps=3")  # fmt: skip


def baichuan(folder: Path, **values: Any) -> Path:
    """A released folder: sentencepiece with role pieces at 195 and 196, no tokenizer.json, Python that is missing."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir()
    text = folder.parent / "text.txt"
    text.write_text(
        "关于感冒发热头痛的药物，正确的是？\n青霉素阿司匹林普萘洛尔硝酸甘油\n答案是ABCD。\n" * 9, encoding="utf-8"
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=900, model_type="bpe", byte_fallback=True,
        user_defined_symbols=[*(f"<x{i}>" for i in range(3, 195)), "<reserved_102>", "<reserved_103>"],
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BaichuanTokenizer"}')
    tokenizer = released.read_tokenizer(str(folder), None)
    assert tokenizer is not None
    config = {
        "model_type": "baichuan", "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 64,
        "num_hidden_layers": 2, "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32", "auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"}, **values,
    }  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"user_token_id": 195, "assistant_token_id": 196}')
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first generation with ALiBi, the second with rotation and NormHead, and preprocessed questions of CMB."""
    folder = tmp_path_factory.mktemp("released")
    baichuan(folder / "disc", model_max_length=512)
    baichuan(folder / "second", max_position_embeddings=512, tokenizer_class="BaichuanTokenizer")
    options = {"A": "青霉素", "B": "阿司匹林", "C": "普萘洛尔", "D": "硝酸甘油"}
    rows = [
        {"exam_type": "医师考试", "exam_class": "执业医师", "exam_subject": "口腔", "question_type": "单项选择题",
         "question": f"第{i}题：关于感冒的药物，正确的是？", "answer": "ABCD"[i % 4], "option": options}
        for i in range(8)
    ]  # fmt: skip
    raw = folder / "CMB-train-merge.json"
    raw.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    assert not programs.main(["preprocess", "cmb", "--input", str(raw), "--out", str(folder / "data")])
    return folder


def words(folder: Path, recipe: str, model: str, out: str) -> list[str]:
    questions = folder / "data" / "CMB-train-merge.questions.jsonl"
    files = [f"data.{split}=[{questions}]" for split in ("train", "validation", "test")]
    named = [f"model.model_name_or_path={folder / model}", f"out={folder / out}"]
    return ["--config", recipe, *files, *named, *SHORT]


def predicted(folder: Path, source: list[str], out: str) -> dict[str, str]:
    questions = str(folder / "data" / "CMB-train-merge.questions.jsonl")
    asked = [*source, "--questions", questions, "--out", str(folder / out), "generation.max_new_tokens=6"]
    assert not programs.main(["predict", *asked])
    return {row["question_id"]: row["text"] for _, row in jsonl.read_objects(folder / out)}


def test_disc_medllm_in_full_on_two_processes(folder: Path) -> None:
    """Raw file, training, prediction, evaluation, export; and ZeRO-3 on two processes learns what one learns."""
    alone = words(folder, "full_disc_medllm_cmb.yaml", "disc", "alone")
    assert not programs.main(["train", *alone])
    answers = predicted(folder, ["--run", str(folder / "alone")], "p.jsonl")
    assert len(answers) == 8
    questions = str(folder / "data" / "CMB-train-merge.questions.jsonl")
    scored = ["--predictions", str(folder / "p.jsonl"), "--questions", questions, "--out", str(folder / "report")]
    assert not programs.main(["evaluate", *scored])
    assert not programs.main(["export", "--run", str(folder / "alone"), "--out", str(folder / "exported")])
    names = set(load_file(folder / "exported" / "model.safetensors"))
    assert names == set(load_file(folder / "disc" / "model.safetensors"))
    assert "cmexam_tune.models.released" in (folder / "exported" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"--format hf: transformers has no class .* Use --format released"):
        programs.main(["export", "--run", str(folder / "alone"), "--out", str(folder / "no"), "--format", "hf"])
    assert not (folder / "no").exists()
    assert not (folder / "exported" / "Modelfile").exists(), "Ollama does not read W_pack"
    whole = ["--config", "zeroshot_disc_medllm_cmb.yaml", f"model.model_name_or_path={folder / 'exported'}"]
    assert predicted(folder, whole, "q.jsonl") == answers
    pytest.importorskip("deepspeed")
    several = words(folder, "full_disc_medllm_cmb.yaml", "disc", "zero3")
    for process in forked_programs.group("train", [*several, "training.deepspeed=zero3"]):
        code, said, noted = process.wait()
        assert code == 0, (said + noted)[-4000:]
    one, two = (runs.open_run(folder / name) for name in ("alone", "zero3"))
    assert training_kit.losses(two) == pytest.approx(training_kit.losses(one), rel=1e-5)
    weights = [load_file(run.adapter / "model.safetensors") for run in (one, two)]
    assert all(torch.allclose(weights[0][key], weights[1][key], atol=1e-6) for key in names)


@pytest.mark.parametrize("method", ["lora", "ptuning"])
def test_baichuan2_with_adapters(folder: Path, method: str) -> None:
    """An adapter keeps the released names, and predicts what its merged export predicts."""
    model = "second" if method == "lora" else "disc"
    asked = words(folder, "lora_baichuan2.yaml", model, method)
    if method == "ptuning":
        asked += ["tuning.method=ptuning", "tuning.num_virtual_tokens=4"]
    assert not programs.main(["train", *asked, "training.learning_rate=0.05"])
    answers = predicted(folder, ["--run", str(folder / method)], f"{method}.jsonl")
    if method == "ptuning":
        return
    adapter = load_file(folder / method / "adapter" / "adapter_model.safetensors")
    assert any("W_pack.lora_B" in name for name in adapter)
    assert not any("q_proj" in name or "lm_head" in name for name in adapter)
    export = ["export", "--run", str(folder / method), "--merge", "--out"]
    for format in ("hf", "released"):
        merged = folder / f"merged_{format}"
        assert not programs.main([*export, str(merged), "--format", format])
        whole = ["--config", "lora_baichuan2.yaml", f"model.model_name_or_path={merged}"]
        assert predicted(folder, whole, f"merged_{format}.jsonl") == answers
        tokenizer = checkpoint.read_tokenizer(ModelConfig("llama", str(merged)))
        assert isinstance(tokenizer, released.RoleTokenizer)
    before, after = (load_file(place / "model.safetensors") for place in (folder / model, folder / "merged_released"))
    assert set(after) == set(before)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"]), "NormHead is not written over"
    assert json.loads((folder / "merged_hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
