"""Tiny models load like real checkpoints; sizes that cannot be are refused, and nothing of the user's is replaced."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoTokenizer

from cmexam_tune import tiny
from cmexam_tune.core.errors import UserError


def test_qwen_has_what_makes_qwen_different(tmp_path: Path) -> None:
    folder = tiny.build("qwen", tmp_path / "qwen")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.num_key_value_heads < model.config.num_attention_heads and model.config.tie_word_embeddings
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "问"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n问<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id in ids


@pytest.mark.parametrize("hidden", [16, 48, 256, 384])
@pytest.mark.parametrize("family", ["llama", "bert", "chatglm2"])
def test_widths(family: str, hidden: int, tmp_path: Path) -> None:
    tiny.build(family, tmp_path / "x", hidden=hidden, layers=1)


@pytest.mark.parametrize(
    "sizes",
    [{"hidden": 0}, {"hidden": -64}, {"hidden": 100}, {"hidden": 320}, {"hidden": 10**9}, {"layers": 0},
     {"layers": 10**6}, {"vocab": -1}, {"vocab": 10**12}, {"seed": -1}, {"seed": 2**40}],
)  # fmt: skip
def test_sizes_that_cannot_be(sizes: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=next(iter(sizes))):
        tiny.build("llama", tmp_path / "x", **sizes)
    assert not list(tmp_path.iterdir())


def test_only_a_tiny_model_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter").touch()
    for out in (".", "..", tmp_path / "letter"):
        with pytest.raises(UserError):
            tiny.build("bert", out, overwrite=True)
    tiny.build("bert", "x", layers=1)
    with pytest.raises(UserError, match="--overwrite"):
        tiny.build("bert", "x")
    tiny.build("bert", "x", overwrite=True, layers=2)
    assert (tmp_path / "letter").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["letter", "x"]
