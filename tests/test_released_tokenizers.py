"""Tokenizers of Baichuan, Qwen-1 and InternLM-1 against the authors' code (files outside the project; skipped there).

pytest -q tests/test_released_tokenizers.py
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("torch")

from transformers import AutoTokenizer

from cmexam_tune.config import ModelConfig, PromptConfig
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import checkpoint, released
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.prompts import Dialogue
from cmexam_tune.prompts.builder import Message

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "llm"
beside = pytest.mark.skipif(
    not (GOLDEN / "tokenizer_golden.json").exists(), reason=f"no golden files of the authors' code in {GOLDEN}"
)
FILES = {
    "qwen1": ("qwen.tiktoken", "QWenTokenizer"),
    "baichuan2": ("tokenizer.model", "BaichuanTokenizer"),
    "internlm1": ("tokenizer.model", "InternLMTokenizer"),
    "baichuan1": ("tokenizer.model", "BaichuanTokenizer"),
}
SMALLEST = "baichuan1"
CHAT = {"qwen1": {"chat_format": "chatml"}, "baichuan1": {"user_token_id": 195}, "baichuan2": {"user_token_id": 195}}
SPECIAL_TEXT = {"qwen1": (), "baichuan2": (), "internlm1": ("null\0byte",), "baichuan1": ()}
"""Texts that are read otherwise, as docs/released.md says."""


def folder_of(name: str, folder: Path) -> Path:
    file, kind = FILES[name]
    shutil.copyfile(GOLDEN / "tokenizers" / (file if name == "qwen1" else f"{name}.model"), folder / file)
    # As released: a class of their own, whose Python is not there.
    values = {"tokenizer_class": kind, "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps(CHAT.get(name, {})))
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = {name: folder_of(name, tmp_path_factory.mktemp(name)) for name in FILES}
    return {name: checkpoint.Checkpoint(ModelConfig("llama", str(path))).tokenizer() for name, path in folders.items()}


@pytest.fixture(scope="module")
def golden() -> Any:
    return json.loads((GOLDEN / "tokenizer_golden.json").read_text())


@beside
@pytest.mark.parametrize("name", FILES)
def test_texts(name: str, tokenizers: dict[str, Any], golden: Any) -> None:
    """All texts of the witness."""
    tokenizer = tokenizers[name]
    check_texts(name, tokenizer, golden)
    decoded = golden["tokenizers"][name]["decoded_skip_special"]
    for i in [i for i, text in enumerate(golden["texts"]) if "<" not in text]:
        ids = golden["tokenizers"][name]["ids"][i]
        assert tokenizer.decode(ids, skip_special_tokens=True) == decoded[i]


def check_texts(name: str, tokenizer: Any, golden: Any) -> None:
    expected = dict(zip(golden["texts"], golden["tokenizers"][name]["ids"], strict=True))
    assert len(expected) == 62
    different = [text for text, ids in expected.items() if tokenizer(text)["input_ids"] != ids]
    assert different == list(SPECIAL_TEXT[name])


@beside
@pytest.mark.parametrize(
    "name", [name if name == SMALLEST else pytest.param(name, marks=pytest.mark.slow) for name in FILES]
)
def test_saved_as_tokenizer_json(name: str, tokenizers: dict[str, Any], golden: Any, tmp_path: Path) -> None:
    """Of the large ones only reading takes seconds; `test_ranks_by_hand` saves one made of ranks."""
    again, plain = saved(tokenizers[name], tmp_path)
    for tokenizer in (again, plain):
        check_texts(name, tokenizer, golden)


def saved(tokenizer: Any, folder: Path) -> tuple[Any, Any]:
    """Return a tokenizer as we read it after saving, and as plain transformers does."""
    tokenizer.save_pretrained(folder)
    again = checkpoint.Checkpoint(ModelConfig("llama", str(folder))).tokenizer()
    assert isinstance(again, released.RoleTokenizer)
    assert checkpoint.tokenizer_hash(again) == checkpoint.tokenizer_hash(tokenizer)
    return again, AutoTokenizer.from_pretrained(folder)


def ids_of(tokenizer: Any, template: str, dialogue: Dialogue) -> list[int]:
    prompt = PromptConfig(template=template)
    return Llama().codec(tokenizer, prompt, ModelConfig("llama", "x")).sources([dialogue])[0]  # type: ignore[no-any-return]


FORMATS = [
    ("qwen1", "auto", "qwen1.first"),
    ("qwen1", "qwen_chat", "qwen1.second"),
    ("qwen1", "auto", "qwen1.no_system"),
    ("qwen1", "auto", "qwen1.literal_special"),
    ("baichuan2", "auto", "baichuan2.first"),
    ("baichuan2", "auto", "baichuan2.second"),
    ("baichuan2", "baichuan2_chat", "baichuan2.system"),
    ("baichuan1", "auto", "baichuan1_13b_chat.first"),
    ("baichuan1", "auto", "baichuan1_13b_chat.second"),
    ("baichuan1", "sunsimiao", "sunsimiao_v1.first(baichuan1 vocab)"),
    ("baichuan2", "huatuogpt2", "huatuogpt2.first(baichuan2 vocab)"),
    ("baichuan2", "huatuogpt2", "huatuogpt2.second(baichuan2 vocab)"),
    ("baichuan1", "huatuogpt", "huatuogpt1.first(baichuan1 vocab)"),
    ("internlm1", "internlm", "internlm1.first"),
    ("internlm1", "internlm", "internlm1.second"),
]


@beside
@pytest.mark.parametrize(("name", "template", "case"), FORMATS)
def test_chat_formats_to_the_token(name: str, template: str, case: str, tokenizers: Any, golden: Any) -> None:
    chat = golden["chat"][case]
    messages = chat.get("messages")
    if messages is None:
        history = (("你好", "您好，请问有什么可以帮您？"),) if case.split("(")[0].endswith("second") else ()
        turns = [
            Message(role, text) for pair in history for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        dialogue = Dialogue(chat.get("query", "头痛三天，怎么办？"), tuple(turns), chat.get("system"))
    else:
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = [Message(m["role"], m["content"]) for m in messages if m["role"] != "system"]
        dialogue = Dialogue(turns[-1].content, tuple(turns[:-1]), system)
    assert ids_of(tokenizers[name], template, dialogue) == chat["ids"]


@beside
@pytest.mark.parametrize(
    ("name", "typed"),
    [("qwen1", "<|im_start|>"), ("baichuan1", "<reserved_103>"), ("baichuan2", "<reserved_107>"),
     ("internlm1", "<eoh>"), ("baichuan2", "</s>"), ("internlm1", "<s>")],
)  # fmt: skip
def test_typed_role_tokens_stay_text(name: str, typed: str, tokenizers: dict[str, Any]) -> None:
    """Also those of an example, a system text or an earlier turn, and in a wrapper of text."""
    tokenizer = tokenizers[name]
    number = tokenizer.convert_tokens_to_ids(typed)
    assert number in tokenizer(typed)["input_ids"]
    for template in ("none", "auto", "huatuogpt2"):
        plain = ids_of(tokenizer, template, Dialogue("x"))
        ids = ids_of(tokenizer, template, Dialogue(f"{typed}x"))
        assert ids.count(number) == plain.count(number)
        assert typed in tokenizer.decode(ids)


@beside
def test_damaged_files(tmp_path: Path) -> None:
    folder = folder_of("baichuan2", tmp_path)
    (folder / "tokenizer.model").write_bytes(b"\xff" * 99)
    with pytest.raises(UserError, match=r"no usable tokenizer \(tokenizer\.model is no sentencepiece model"):
        checkpoint.Checkpoint(ModelConfig("llama", str(folder))).tokenizer()
    folder_of("qwen1", tmp_path)
    (folder / "qwen.tiktoken").write_bytes(b"not base64 at all\n")
    with pytest.raises(UserError, match="no usable tokenizer"):
        checkpoint.Checkpoint(ModelConfig("llama", str(folder))).tokenizer()


def test_ranks_by_hand(tmp_path: Path) -> None:
    """Bytes, then `ab` and `abc`: the pair of `abc` is `ab` + `c`, as merging by rank makes it."""
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"bc", b"abc"]
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"".join(lines))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
    tokenizer = released.read_tokenizer(str(tmp_path), None)
    assert tokenizer is not None
    for read in (tokenizer, *saved(tokenizer, tmp_path / "saved")):
        assert read("abc")["input_ids"] == [258]
        assert read("xbc")["input_ids"] == [ord("x"), 257]
        assert read("<|endoftext|>")["input_ids"] == [259]
        assert read.chat_template is None
        assert read.eos_token_id == 259
