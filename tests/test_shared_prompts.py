"""What prompts begin with alike is read once: same texts and scores as when every prompt is read whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config, questions, with_examples

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.completion import to_prediction
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.generation import kv_cache
from cmexam_tune.models.generation.decoder import Likelihood
from cmexam_tune.prompts import order


def world(family: str, method: str) -> tuple[Any, Loaded, Config]:
    name = family.removesuffix("2")
    settings = {"ptuning": {"method": "ptuning", "num_virtual_tokens": 5}, "full": {"method": "full"}}[method]
    config = make_config(
        name, model__model_name_or_path=checkpoint(family), tuning=settings,
        prompt__max_target_length=8, prompt__max_source_length=1000,
    )  # fmt: skip
    module = Family.named(name)
    base, tokenizer = module.load(config.model)
    model: Any = Method.named(method).attach(base, module, config.tuning.settings).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module, Loaded(model, tokenizer), config


@pytest.mark.parametrize(("family", "method"), [
    ("llama", "full"), ("llama", "ptuning"), ("chatglm2", "full"), ("chatglm2", "ptuning"), ("chatglm", "full"),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["generate", "constrained", "likelihood"])
def test_reuse_changes_nothing(family: str, method: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, loaded, config = world(family, method)
    config = replace(config, generation=replace(config.generation, mode=mode, batch_size=3))
    asked = with_examples(questions(12), config)
    read: list[int] = []
    loaded.model.register_forward_pre_hook(
        lambda _model, _args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    found = []
    for shortest in (kv_cache.SHORTEST, 10**6):
        monkeypatch.setattr(kv_cache, "SHORTEST", shortest)
        before = sum(read)
        answers = {c.request.question.id: to_prediction(c) for c in module.engine(loaded, config).answer(asked)}
        found.append((answers, sum(read) - before))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 12
    if family == "chatglm":
        assert found[0][1] == found[1][1], "its context is read in both directions"
    else:
        assert found[0][1] < found[1][1] / 1.5


@pytest.mark.parametrize(("family", "method", "dtype"), [
    ("llama", "full", "float32"), ("llama", "ptuning", "float32"), ("chatglm2", "full", "float32"),
    ("llama", "full", "bfloat16"), ("llama", "full", "float16"),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["generate", "constrained", "likelihood"])
def test_a_question_in_several_orders_is_read_once(
    family: str, method: str, dtype: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and behind examples that all questions share; batches hold whole questions and parts of them."""
    module, loaded, config = world(family, method)
    loaded.model.to(getattr(torch, dtype))
    beams = {"num_beams": 2} if mode == "generate" and method == "full" else {}
    config = replace(config, generation=replace(config.generation, mode=mode, batch_size=8, arguments=beams))
    alone = prompts.default_prompts(
        [replace(q, stem=q.stem + "病史很长" * (9 + i)) for i, q in enumerate(questions(5))], config
    )
    behind = [replace(request, examples=with_examples(questions(4), config)[0].examples) for request in alone]
    usual = kv_cache.SHORTEST
    for requests in (alone, behind):
        asked = [
            replace(
                request, question=replace(order.shown(request.question, f"rotate:{k}"), id=f"{request.question.id}#{k}")
            )
            for k in range(4)
            for request in requests
        ]
        read: list[int] = []
        hook = loaded.model.register_forward_pre_hook(
            lambda _model, _args, kwargs, read=read: read.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        found = []
        for shortest in (usual, 10**6):
            monkeypatch.setattr(kv_cache, "SHORTEST", shortest)
            before = sum(read)
            answers = {c.request.question.id: c for c in module.engine(loaded, config).answer(asked)}
            found.append(({key: (c.text, c.letters) for key, c in answers.items()}, sum(read) - before))
        hook.remove()
        assert len(found[0][0]) == 20 and found[0][1] < found[1][1] / 1.5
        if dtype == "float32":
            assert found[0][0] == found[1][0]
        else:  # half precision rounds otherwise: near ties may fall the other way
            assert sum(found[0][0][key] == value for key, value in found[1][0].items()) >= 15


def test_scores_and_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    module, loaded, config = world("llama", "full")
    asked = with_examples(questions(8), config)
    beams = replace(config, generation=replace(config.generation, arguments={"num_beams": 2}))
    found: list[Any] = []
    for shortest in (kv_cache.SHORTEST, 10**6):
        monkeypatch.setattr(kv_cache, "SHORTEST", shortest)
        decoder = module.engine(loaded, config)
        scores = {item.question.id: each for item, each in Likelihood(decoder).scores(decoder.ask(asked))}
        texts = {c.request.question.id: c.text for c in module.engine(loaded, beams).answer(asked)}
        found.append((scores, texts))
    assert found[0][1] == found[1][1]
    for key, each in found[0][0].items():
        assert each == pytest.approx(found[1][0][key], abs=1e-4)


def test_rows_start_alike_and_apart() -> None:
    """A start serves several batches: what one adds does not reach the next."""
    _, loaded, _ = world("llama", "full")
    ids = list(range(5, 60))
    with torch.inference_mode():
        start = kv_cache.read_shared_prefix(loaded.model, [[*ids, 7], [*ids, 8, 9]], "aa", 0)
        assert start is not None and start.length == len(ids) and not start.groups
        one = kv_cache.PrefillScorer(loaded.model, [[*ids, 7], [*ids, 8, 9]], 0, start).prefill(1)
        again = kv_cache.PrefillScorer(loaded.model, [[*ids, 7], [*ids, 8, 9]], 0, start).prefill(1)
        whole = kv_cache.PrefillScorer(loaded.model, [[*ids, 7], [*ids, 8, 9]], 0).prefill(1)
    assert torch.equal(one, again) and torch.allclose(one, whole, atol=1e-4)
    assert start.cache.get_seq_length() == len(ids)
