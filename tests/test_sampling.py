"""Sampling by a seed of each row's own: the right distribution, and the same draws in any batch."""

import dataclasses
from typing import Any

import kit
import pytest
import torch
from transformers import GenerationConfig

from cmexam_tune.models.families import Family
from cmexam_tune.models.generation import sampling


def draw(scores: torch.Tensor, keys: list[str], steps: int = 1, **settings: float) -> torch.Tensor:
    """Return the tokens [rows, steps] that are drawn from `scores` [vocabulary]."""
    greedy, shaping = sampling.split_sampling(GenerationConfig(do_sample=True, **settings))  # type: ignore[no-untyped-call]
    assert shaping is not None and not greedy.do_sample
    process = sampling.SeededSampling(shaping, [f"5/{key}" for key in keys])
    rows = scores.expand(len(keys), -1)
    ids = torch.zeros(len(keys), 1, dtype=torch.long)
    return torch.stack([process(ids, rows).argmax(-1) for _ in range(steps)], 1)  # type: ignore[arg-type]


def test_draws_follow_the_distribution() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    drawn = draw(scores, [f"q:{i}" for i in range(2000)], steps=10, temperature=0.7)
    wanted = (scores / 0.7).softmax(0)
    found = drawn.flatten().bincount(minlength=5) / drawn.numel()
    sigma = (wanted * (1 - wanted) / drawn.numel()).sqrt()
    assert ((found - wanted).abs() <= 4 * sigma + 1e-9).all(), (found, wanted)
    assert len(set(map(tuple, drawn.tolist()))) > 500


def test_settings_shape_it() -> None:
    scores, keys = torch.tensor([2.0, 1.9, 0.0, -1.0]), [f"q:{i}" for i in range(300)]
    assert set(draw(scores, keys, top_k=2).flatten().tolist()) == {0, 1}
    assert set(draw(scores, keys, top_p=0.4).flatten().tolist()) == {0}
    assert set(draw(scores, keys, top_k=1).flatten().tolist()) == {0}
    assert len(set(draw(scores, keys, temperature=50.0).flatten().tolist())) == 4


def test_a_row_draws_the_same_in_any_batch() -> None:
    scores, keys = torch.randn(50, generator=torch.Generator().manual_seed(0)), ["a#0", "a#1", "b#0", "c#4"]
    whole = draw(scores, keys, steps=20)
    for row, key in enumerate(keys):
        assert draw(scores, [key], steps=20).tolist() == whole[row : row + 1].tolist()
        assert draw(scores.half(), [key], steps=20).shape == (1, 20)
    assert len(set(map(tuple, whole.tolist()))) == 4


def test_without_sampling_nothing_changes() -> None:
    chosen = GenerationConfig(num_beams=3)  # type: ignore[no-untyped-call]
    assert sampling.split_sampling(chosen) == (chosen, None)


STOPS = ("\n问：", "</s>", "USER:", "答案是 ", "。")


@pytest.mark.parametrize("family", ["llama", "qwen", "chatglm", "chatglm2", "spaces"])
def test_stop_texts_end_rows_at_the_token_that_completes_them(family: str) -> None:
    """Beside decoding all rows for every token; rows that have ended and pieces without the end are left alone."""
    name = "llama" if family == "spaces" else family
    config = kit.make_config({"qwen": "llama", "chatglm2": "chatglm"}.get(name, name))
    model = dataclasses.replace(config.model, model_name_or_path=kit.checkpoint(name))
    tokenizer = Family.named(model.family).load(model).tokenizer
    stops = STOPS if family == "spaces" else (*STOPS[:3], STOPS[4])
    texts = ["先看\n问：什么", "USER 不是 USER: 是", "答案是 A，其余不是", "没有。有", "什么都没有", "a</s> b USER:"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width, pad = 3, int(tokenizer.pad_token_id or 0)
    ids = torch.tensor([[5] * width + row + [pad] * (max(map(len, rows)) - len(row)) for row in rows])
    criterion = sampling.StopText(tokenizer, [stops] * len(rows), width)
    decoded: list[int] = []
    inner = tokenizer.batch_decode

    def counted(new: torch.Tensor, **options: Any) -> list[str]:
        decoded.append(len(new))
        return inner(new, **options)

    tokenizer.batch_decode = counted
    first: dict[int, int] = {}
    expected: dict[int, int] = {}
    for end in range(width + 1, ids.shape[1] + 1):
        for row, ended in enumerate(criterion(ids[:, :end], None).tolist()):
            if ended:
                first.setdefault(row, end)
        for row, text in enumerate(
            inner(ids[:, width:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ):
            if sampling.first_stop(text, stops) is not None:
                expected.setdefault(row, end)
    assert first == expected and len(expected) > 2
    if family != "spaces":
        assert sum(decoded) < ids[:, width:].numel() / 2
