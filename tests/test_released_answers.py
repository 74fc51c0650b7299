"""Baichuan, Qwen-1 and InternLM answer in all modes as plain forward passes say, whatever is read once or together.

pytest -q tests/test_released_answers.py
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import make_config, questions, with_examples
from released_models import KINDS, make

from cmexam_tune.config import Config
from cmexam_tune.evaluation.answer_parsing import HALF
from cmexam_tune.models import checkpoint
from cmexam_tune.models.completion import to_prediction
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.generation import kv_cache
from cmexam_tune.models.generation.decoder import Decoder, Item, Likelihood

llama = Llama()
NEVER = 10**6
NEW_TOKENS = 6
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}
"""Of a sum of log-probabilities: 24 columns of these types, two layers, some 300 tokens of prompt."""


def world(kind: str, dtype: torch.dtype, **generation: Any) -> tuple[Loaded, Config]:
    config = make_config(prompt__max_target_length=8, prompt__max_source_length=1000, generation=generation)
    tokenizer = checkpoint.Checkpoint(config.model).tokenizer()
    model = make(kind, positions=4096, vocab_size=len(tokenizer)).to(dtype)
    return Loaded(model, tokenizer), config


FAST = (
    ("baichuan_alibi", torch.float32), ("internlm2", torch.float32), ("baichuan2_alibi", torch.bfloat16),
    ("qwen", torch.float16),
)  # fmt: skip


def cases() -> Iterator[Any]:
    """Every model in every type; most among the slow ones."""
    for kind in KINDS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            fast = (kind, dtype) in FAST
            marks = () if fast else pytest.mark.slow
            yield pytest.param(kind, dtype, id=f"{kind}-{str(dtype)[6:]}", marks=marks)


def logits(loaded: Loaded, ids: list[int]) -> torch.Tensor:
    """Log-probabilities behind every token, by one plain pass."""
    with torch.no_grad():
        return torch.log_softmax(loaded.model(input_ids=torch.tensor([ids])).logits[0].float(), -1)


def summed(loaded: Loaded, item: Item, answer: list[int]) -> float:
    logs = logits(loaded, item.ids + answer)
    return sum(float(logs[len(item.ids) + i - 1, token]) for i, token in enumerate(answer))


@pytest.mark.parametrize(("kind", "dtype"), [*cases()])
def test_scores_are_those_of_plain_passes(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few-shot, prompts with a common beginning read once or not, one and eight at a time."""
    loaded, config = world(kind, dtype, answer_sets="single")
    asked = with_examples(questions(10), config)
    expected: dict[str, dict[str, float]] = {}
    widths: list[int] = []
    loaded.model.register_forward_pre_hook(
        lambda _model, _args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    tokens = {}
    for shortest, size in ((kv_cache.SHORTEST, 8), (kv_cache.SHORTEST, 1), (NEVER, 8)):
        monkeypatch.setattr(kv_cache, "SHORTEST", shortest)
        decoder = llama.engine(loaded, replace(config, generation=replace(config.generation, batch_size=size)))
        before = sum(widths)
        scores = list(Likelihood(decoder).scores(decoder.ask(asked)))
        tokens[shortest, size] = sum(widths) - before
        for item, answers in scores[:: len(scores) // 3]:
            allowed = decoder.allowed_answers(item.question)
            plain = expected.setdefault(
                item.question.id, {letters: summed(loaded, item, ids) for letters, ids in allowed.items()}
            )
            assert answers == pytest.approx(plain, abs=ROUNDING[dtype])
    assert tokens[32, 8] < tokens[NEVER, 8] / 1.5, "the examples are read once"
    assert len(expected) >= 3


def modes() -> Iterator[Any]:
    """All modes of one ALiBi, and one mode of each other model; the rest among the slow ones."""
    names = ("generate", "constrained", "likelihood")
    for place, kind in enumerate(KINDS):
        for mode in names:
            fast = kind == "baichuan_alibi" or mode == names[place % 3]
            yield pytest.param(kind, mode, id=f"{kind}-{mode}", marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "mode"), [*modes()])
def test_answers_are_those_of_plain_passes(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, config = world(
        kind,
        torch.float32,
        answer_sets="single" if mode == "likelihood" else "multiple",
        mode=mode,
        max_new_tokens=NEW_TOKENS,
    )
    asked = with_examples(questions(6), config)
    answers = []
    for shortest, size in ((kv_cache.SHORTEST, 8), (NEVER, 1)):
        monkeypatch.setattr(kv_cache, "SHORTEST", shortest)
        decoder = llama.engine(loaded, replace(config, generation=replace(config.generation, batch_size=size)))
        answers.append({each.request.question.id: to_prediction(each) for each in decoder.answer(asked)})
    assert answers[0] == answers[1]
    for item in decoder.ask(asked)[:3]:
        answer = answers[0][item.question.id]
        assert witness(mode, loaded, decoder, item) == (answer.text if mode == "generate" else answer.answer)


def witness(mode: str, loaded: Loaded, decoder: Decoder, item: Item) -> str:
    """The text, or the letters, that one plain pass for each token gives."""
    if mode == "generate":
        ids: list[int] = []
        while len(ids) < NEW_TOKENS and decoder.tokenizer.eos_token_id not in ids:
            ids.append(int(logits(loaded, item.ids + ids)[-1].argmax()))
        return decoder.text(ids, {decoder.tokenizer.eos_token_id}).rstrip(HALF)
    allowed = decoder.allowed_answers(item.question)
    if mode == "likelihood":
        return max(allowed, key=lambda letters: summed(loaded, item, allowed[letters]))
    length = 0
    while len(allowed) > 1:
        (start, *_) = allowed.values()
        logs = logits(loaded, item.ids + start[:length])[-1]
        best = max({ids[length] for ids in allowed.values()}, key=lambda token: float(logs[token]))
        allowed = {letters: ids for letters, ids in allowed.items() if ids[length] == best}
        length += 1
    return next(iter(allowed))
