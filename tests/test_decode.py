"""Three ways to answer: witnesses are transformers' own generate and plain forward passes without a cache."""

import inspect
import itertools
import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config, question, questions
from peft import PeftModel
from transformers import GenerationConfig

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import letter_sets, parse
from cmexam_tune.models import causal, device
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.completion import to_prediction
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.generation import decoder, sampling
from cmexam_tune.models.generation.decoder import Likelihood
from cmexam_tune.prompts import PromptRequest

llama = Llama()

MODES = ("generate", "constrained", "likelihood")


def tuned(method: str) -> tuple[Loaded, Config]:
    """A model with random tuned weights large enough to change answers."""
    settings = {
        "none": {"method": "full"},
        "lora": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
        "ptuning": {"method": "ptuning", "num_virtual_tokens": 5},
    }[method]
    config = make_config(tuning=settings, prompt__max_target_length=8)
    loaded = llama.load(config.model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        if method != "none":
            model = Method.named(method).attach(loaded.model, llama, config.tuning.settings)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            loaded = Loaded(model, loaded.tokenizer)
    loaded.model.eval()
    return loaded, config


@pytest.fixture(scope="module", params=["none", "lora", "ptuning"])
def model(request: pytest.FixtureRequest) -> tuple[Loaded, Config]:
    return tuned(request.param)


def set_generation(config: Config, **changes: object) -> Config:
    return replace(config, generation=replace(config.generation, **changes))


CARD = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.49 GiB.")
HOST = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 90000000000 bytes.")


@pytest.mark.parametrize(("mode", "error"), [*((mode, CARD) for mode in MODES), ("generate", HOST)])
def test_what_does_not_fit_the_memory_is_answered_in_smaller_batches(
    model: tuple[Loaded, Config],
    mode: str,
    error: RuntimeError,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A card that holds three rows: nothing is lost, asked twice or answered otherwise."""
    monkeypatch.setattr(decoder, "PASS_ON_CPU", math.inf)  # full batches
    loaded, config = model
    config = set_generation(config, mode=mode, batch_size=8)
    asked = prompts.default_prompts(questions(11), config)
    expected = {
        c.request.question.id: c for c in llama.engine(loaded, set_generation(config, batch_size=2)).answer(asked)
    }
    base: Any = loaded.model.get_base_model() if isinstance(loaded.model, PeftModel) else loaded.model
    forward, room = base.forward, 3

    def crowded(*args: Any, **inputs: Any) -> Any:
        if len(inputs["input_ids"]) > room:
            raise error
        return forward(*args, **inputs)

    crowded.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(base, "forward", crowded)
    answered = list(llama.engine(loaded, config).answer(asked))
    assert sorted(c.request.question.id for c in answered) == sorted(expected)
    assert all(c == expected[c.request.question.id] for c in answered)
    assert capsys.readouterr().err.count("generation.batch_size=") == 2
    room = 0
    with pytest.raises(UserError, match=r"one prompt at a time .*ried to allocate .*max_new_tokens"):
        list(llama.engine(loaded, config).answer(asked))


def test_rows_share_a_batch_where_that_is_not_slower() -> None:
    """All rows once and in order, none slower than alone; without a limit the batches are full."""
    rng = random.Random(0)
    for saved in (0.0, 8.0, 200.0, math.inf):
        lengths = sorted((rng.randrange(1, 2000) for _ in range(100)), reverse=True)
        parts = [lengths[rows] for rows in decoder.batch_slices(lengths, 8, saved)]
        assert [length for part in parts for length in part] == lengths
        for part in parts:
            assert len(part) <= 8 and len(part) * max(part) - sum(part) <= max(len(part) - 1, 0.1) * saved
    assert [len(part) for part in parts] == [8] * 12 + [4]
    assert not list(decoder.batch_slices([], 8, 8.0))


def test_a_long_prompt_does_not_pad_short_ones(model: tuple[Loaded, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as long: read alone, with the answers that all give together; in step with others nothing is cut."""
    loaded, config = model
    config = set_generation(config, mode="generate", batch_size=8, arguments={"max_new_tokens": 4})
    asked = [
        PromptRequest(question, lambda _: "", ids=tuple(range(20, 20 + length)))
        for question, length in zip(questions(5), (12, 200, 14, 195, 13), strict=True)
    ]
    engine = llama.engine(loaded, config)
    cut = [len(batch.items) for batch in engine.batches(engine.ask(asked))]
    answers = {completion.request.question.id: completion for completion in engine.answer(asked)}
    monkeypatch.setattr(decoder, "is_deepspeed_zero3_enabled", lambda: True)
    whole = [len(batch.items) for batch in engine.batches(engine.ask(asked))]
    assert (cut, whole) == ([2, 3], [5])
    assert answers == {completion.request.question.id: completion for completion in engine.answer(asked)}


def test_the_batch_is_what_the_card_carries(model: tuple[Loaded, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: the free memory decides, by the power of 2 below; without a card it is the default."""
    loaded, config = model
    config = set_generation(config, batch_size="auto")
    asked = prompts.default_prompts(questions(9), config)
    expected = {c.request.question.id: c for c in llama.engine(loaded, config).answer(asked)}
    base: Any = loaded.model.get_base_model() if isinstance(loaded.model, PeftModel) else loaded.model
    forward, seen = base.forward, list[int]()

    def watched(*args: Any, **inputs: Any) -> Any:
        seen.append(len(inputs["input_ids"]))
        return forward(*args, **inputs)

    watched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(base, "forward", watched)
    engine = llama.engine(loaded, config)
    longest = max(len(item.ids) for item in engine.ask(asked))
    shape, width = base.config, base.dtype.itemsize
    # One layer's activations, keys and values of all, and the logits, by hand.
    heads = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    token = width * (heads + 12 * shape.hidden_size + 4 * shape.intermediate_size)
    row = (longest + engine.new_tokens) * token + 12 * shape.vocab_size
    for rows, batch in ((0.5, 1), (2.1, 2), (5.9, 4)):
        monkeypatch.setattr(device, "free_memory", lambda rows=rows: int(row * rows / 0.8))
        seen.clear()
        answered = list(llama.engine(loaded, config).answer(asked))
        assert max(seen) == batch
        assert {c.request.question.id: c for c in answered} == expected


@pytest.mark.parametrize("mode", MODES)
def test_batch_size_changes_no_answer(model: tuple[Loaded, Config], mode: str) -> None:
    loaded, config = model
    asked = questions(9)
    found = []
    for size in (1, 4, 9):
        answers = list(llama.answer(loaded, asked, set_generation(config, mode=mode, batch_size=size)))
        assert sorted(p.question_id for p in answers) == sorted(q.id for q in asked)
        found.append({p.question_id: p for p in answers})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("style", ["answer", "answer_text", "cmb_answer"])
@pytest.mark.parametrize("sets", ["single", "multiple"])
def test_likelihood_is_the_sum_of_token_log_probabilities(model: tuple[Loaded, Config], style: str, sets: str) -> None:
    loaded, config = model
    config = replace(set_generation(config, answer_sets=sets, batch_size=3), prompt=replace(config.prompt, style=style))
    some = questions(4) if sets == "single" else questions(2)
    decoder = llama.engine(loaded, config)
    for item, scores in Likelihood(decoder).scores(decoder.ask(prompts.default_prompts(some, config))):
        answers = decoder.allowed_answers(item.question)
        assert set(scores) == set(answers) == set(letter_sets(item.question, config.generation.answer_sets))
        for letters, ids in answers.items():
            with torch.no_grad():
                logits = loaded.model(input_ids=torch.tensor([item.ids + ids])).logits[0]
            logs = torch.log_softmax(logits.float(), -1)
            plain = sum(float(logs[len(item.ids) + i - 1, token]) for i, token in enumerate(ids))
            assert scores[letters] == pytest.approx(plain, abs=1e-4), letters


def test_constrained_single_agrees_with_likelihood(model: tuple[Loaded, Config]) -> None:
    loaded, config = model
    asked = questions(12)
    results = [
        {
            p.question_id: p.answer
            for p in llama.answer(loaded, asked, set_generation(config, mode=m, answer_sets="single"))
        }
        for m in ("constrained", "likelihood")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", ["constrained", "likelihood"])
@pytest.mark.parametrize("sets", ["kind", "single", "multiple"])
@pytest.mark.parametrize("normalised", [False, True])
def test_only_legal_answers(model: tuple[Loaded, Config], mode: str, sets: str, normalised: bool) -> None:
    loaded, config = model
    config = set_generation(
        config, mode=mode, answer_sets=sets, length_normalization=normalised, prior_normalization=normalised
    )
    asked = {q.id: q for q in questions(5)}
    for prediction in llama.answer(loaded, list(asked.values()), config):
        q = asked[prediction.question_id]
        assert prediction.answer in letter_sets(q, config.generation.answer_sets)
        assert prediction.text == prompts.answer_head(q, prediction.answer or "", "answer")

        assert parse(prediction.text, q) == prediction.answer


def test_constrained_takes_the_best_legal_token_at_each_step(model: tuple[Loaded, Config]) -> None:
    """Witness: transformers' generate under prefix_allowed_tokens_fn."""
    loaded, config = model
    config = set_generation(config, mode="constrained", answer_sets="multiple")
    for q in questions(3):
        decoder = llama.engine(loaded, config)
        (item,) = decoder.ask(prompts.default_prompts([q], config))
        legal = list(decoder.allowed_answers(q).values())
        start = len(item.ids)

        def allowed(_: int, ids: torch.Tensor, start: int = start, legal: list[list[int]] = legal) -> list[int]:
            done = ids[start:].tolist()
            return [row[len(done)] for row in legal if row[: len(done)] == done and len(row) > len(done)]

        with torch.no_grad():
            out = loaded.model.generate(
                input_ids=torch.tensor([item.ids]),
                attention_mask=torch.ones(1, start, dtype=torch.long),
                prefix_allowed_tokens_fn=allowed,
                max_new_tokens=20,
                do_sample=False,
            )
        (prediction,) = llama.answer(loaded, [q], config)
        assert loaded.tokenizer.decode(out[0, start:], skip_special_tokens=True) == prediction.text


def test_generate_is_greedy_and_equals_a_loop_without_cache(model: tuple[Loaded, Config]) -> None:
    loaded, config = model
    for q in questions(3):
        (item,) = llama.engine(loaded, config).ask(prompts.default_prompts([q], config))
        ids = list(item.ids)
        for _ in range(8):
            with torch.no_grad():
                token = int(loaded.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
            if token == loaded.tokenizer.eos_token_id:
                break
        (prediction,) = llama.answer(loaded, [q], config)
        text = loaded.tokenizer.decode(ids[len(item.ids) :], skip_special_tokens=True)
        assert prediction.text == (text.rstrip("\ufffd") if prediction.finish == "length" else text)


@pytest.mark.parametrize(
    ("kind", "sets", "count"),
    [
        ("single", "kind", 5),
        (None, "kind", 5),
        ("multiple", "kind", 31),
        (None, "multiple", 31),
        ("multiple", "single", 5),
    ],
)
def test_letter_sets(kind: str | None, sets: str, count: int) -> None:
    config = set_generation(make_config(), answer_sets=sets)
    found = letter_sets(question(1, kind=kind), config.generation.answer_sets)
    assert len(found) == len(set(found)) == count
    assert all(letters == "".join(sorted(set(letters))) for letters in found)


def test_a_letter_that_starts_others_is_ended() -> None:
    """Without an end A would always win over AC."""
    config = set_generation(make_config(), answer_sets="multiple")
    loaded = llama.load(config.model)
    legal = llama.engine(loaded, config).allowed_answers(question(1))
    for one, other in itertools.permutations(legal.values(), 2):
        assert other[: len(one)] != one
    assert all(row[-1] == loaded.tokenizer.eos_token_id for row in legal.values())


def test_prior_normalisation_takes_off_what_a_blank_question_gives(model: tuple[Loaded, Config]) -> None:
    loaded, config = model
    config = set_generation(config, mode="likelihood", prior_normalization=True)
    q = question(3)
    blank = replace(q, stem="…", options=dict.fromkeys(q.options, "…"))

    def scores(which: Question) -> dict[str, float]:
        decoder = llama.engine(loaded, config)
        ((_, found),) = Likelihood(decoder).scores(decoder.ask(prompts.default_prompts([which], config)))
        return found

    mine, prior = scores(q), scores(blank)
    (prediction,) = llama.answer(loaded, [q], config)
    assert prediction.answer == max(mine, key=lambda letters: mine[letters] - prior[letters])


def test_styles_without_letters_are_refused() -> None:
    config = set_generation(make_config(prompt__style="open"), mode="likelihood")
    with pytest.raises(ConfigError, match="letters"):
        list(llama.answer(llama.load(config.model), questions(1), config))


@pytest.mark.parametrize("arguments", [{"num_return_sequences": 2, "do_sample": True}])
def test_unusable_generation_settings(arguments: dict[str, object]) -> None:
    config = set_generation(make_config(), arguments=arguments)
    with pytest.raises(ConfigError, match="generation"):
        list(llama.answer(llama.load(config.model), questions(1), config))


def test_stop_strings_of_the_template_end_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, config = tuned("none")
    (free,) = llama.answer(loaded, [question(1)], config)
    assert len(free.text) > 2
    from cmexam_tune.prompts import chat_template

    stop = free.text[2]
    monkeypatch.setitem(chat_template.TEMPLATES, "none", replace(chat_template.template("none"), stop=(stop,)))
    (cut,) = llama.answer(loaded, [question(1)], replace(config, prompt=replace(config.prompt, template="none")))
    assert cut.text == free.text[: free.text.find(stop)]


@pytest.mark.parametrize("beams", [1, 2])
def test_stop_strings_of_the_recipe_end_the_text_too(beams: int) -> None:
    loaded, config = tuned("none")
    config = set_generation(config, arguments={"num_beams": beams})
    (free,) = llama.answer(loaded, [question(1)], config)
    stop = free.text[2:4]
    config = set_generation(config, arguments={"num_beams": beams}, stop_strings=(stop,))
    (cut,) = llama.answer(loaded, [question(1)], config)
    assert (cut.text, cut.finish) == (free.text[: free.text.find(stop)], "stop")
    assert stop in llama.engine(loaded, config).effective_generation_config()["stop"]


@pytest.mark.parametrize("ended", [False, True])
def test_a_limit_leaves_no_half_character(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    config = make_config()
    loaded = llama.load(config.model)
    decoder = llama.engine(loaded, config)
    part = next(token for token in range(len(loaded.tokenizer)) if loaded.tokenizer.decode([token]) == "\ufffd")
    half = [*loaded.tokenizer("答案", add_special_tokens=False)["input_ids"], part]
    new = [*half, loaded.tokenizer.eos_token_id] if ended else half
    monkeypatch.setattr(decoder, "run", lambda *_, **__: [new])
    (written,) = decoder.generate(prompts.default_prompts(questions(1), config))
    text = loaded.tokenizer.decode(half)
    assert (written.finish, written.completion_tokens) == ("stop" if ended else "length", len(new))
    # What the model itself ended with is its own.
    assert written.text == (text if ended else text.rstrip("\ufffd"))


def test_a_question_over_the_limit_is_still_asked() -> None:
    loaded, config = tuned("none")
    config = replace(config, prompt=replace(config.prompt, max_source_length=5))
    assert len(list(llama.answer(loaded, questions(3), config))) == 3
    assert Path(config.model.model_name_or_path).is_dir()


@pytest.mark.parametrize("family", ["chatglm", "chatglm2"])
@pytest.mark.parametrize("method", ["full", "ptuning"])
def test_chatglm_answers_in_all_three_ways(family: str, method: str) -> None:
    """Prefix-LM attention and positions of their own: the cache, the padding and the tree must respect them."""
    settings = {"method": "ptuning", "num_virtual_tokens": 5} if method == "ptuning" else {"method": "full"}
    config = make_config("chatglm", model__model_name_or_path=checkpoint(family), tuning=settings)
    config = set_generation(replace(config, prompt=replace(config.prompt, max_target_length=6)), answer_sets="kind")
    chatglm = Family.named("chatglm")
    model, tokenizer = chatglm.load(config.model)
    torch.manual_seed(2)
    tuned_model = Method.named(method).attach(model, chatglm, config.tuning.settings).eval()
    with torch.no_grad():
        for parameter in tuned_model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    loaded, asked = Loaded(tuned_model, tokenizer), questions(5)
    for mode in MODES:
        found = [
            {
                p.question_id: p
                for p in chatglm.answer(loaded, asked, set_generation(config, mode=mode, batch_size=size))
            }
            for size in (1, 3, 5)
        ]
        assert found[0] == found[1] == found[2], mode
        assert mode == "generate" or all(p.answer for p in found[0].values())
    decoder = chatglm.engine(loaded, config)
    lead = decoder.codec.lead
    for item, scores in Likelihood(decoder).scores(decoder.ask(prompts.default_prompts(asked[:3], config))):
        for letters, ids in decoder.allowed_answers(item.question).items():
            with torch.no_grad():
                logs = torch.log_softmax(
                    tuned_model(input_ids=torch.tensor([item.ids + lead + ids])).logits[0].float(), -1
                )
            before = len(item.ids) + len(lead) - 1
            plain = sum(float(logs[before + i, token]) for i, token in enumerate(ids))
            assert scores[letters] == pytest.approx(plain, abs=1e-4), letters


@pytest.mark.parametrize("family", ["llama", "chatglm", "chatglm2"])
def test_nothing_behind_the_end_is_read(family: str) -> None:
    """In a batch short answers are padded, ChatGLM2's with a token that decodes to a character of its own."""
    name = "llama" if family == "llama" else "chatglm"
    config = make_config(name, model__model_name_or_path=checkpoint(family), prompt__max_target_length=12)
    module, asked = Family.named(name), prompts.default_prompts(questions(8), config)
    loaded = module.load(config.model)
    decoder = module.engine(loaded, config)
    rows = {item.question.id: item.ids + decoder.codec.lead for item in decoder.ask(asked)}
    free = {key: decoder.run([row], sampling.generation_config(decoder.model, decoder.tokenizer, config))[0]
            for key, row in rows.items()}  # fmt: skip
    end = next(iter(free.values()))[2]
    config = set_generation(config, arguments={"eos_token_id": end}, batch_size=8)
    finishes = set()
    for written in module.engine(loaded, config).generate(asked):
        ids = free[written.request.question.id]
        stops = end in ids
        ids = ids[: ids.index(end) if stops else None]
        text = loaded.tokenizer.decode(ids, skip_special_tokens=True)
        assert written.text == (text if stops else text.rstrip("\ufffd"))
        assert (written.completion_tokens, written.finish) == (len(ids) + stops, "stop" if stops else "length")
        finishes.add((written.finish, to_prediction(written).finish))
    assert ("stop", "stop") in finishes and finishes <= {("stop", "stop"), ("length", "length")}


def test_only_the_recipe_decides_how_is_decoded(model: tuple[Loaded, Config]) -> None:
    """What a checkpoint's generation_config.json asks for does not reach scored answers, and stays as it was."""
    loaded, config = model
    plain = list(llama.answer(loaded, questions(3), config))
    written = loaded.tokenizer(plain[0].text, add_special_tokens=False)["input_ids"]
    kept = loaded.model.generation_config
    leaks = {
        "no_repeat_ngram_size": 1, "suppress_tokens": written, "bad_words_ids": [[i] for i in written],
        "forced_eos_token_id": 2, "sequence_bias": [[[written[0]], -100.0]], "guidance_scale": 3.0, "max_time": 1e-9,
        "min_length": 500, "repetition_penalty": 3.0, "top_k": 1, "begin_suppress_tokens": written[:1],
        "exponential_decay_length_penalty": (1, 9.0), "max_length": 3, "stop_strings": [plain[0].text[:1]],
    }  # fmt: skip
    try:
        loaded.model.generation_config = GenerationConfig(eos_token_id=kept.eos_token_id, **leaks)
        assert list(llama.answer(loaded, questions(3), config)) == plain
        assert loaded.model.generation_config.no_repeat_ngram_size == 1
    finally:
        loaded.model.generation_config = kept


@pytest.mark.parametrize(("style", "room"), [("answer", 32), ("answer_explain", 200), ("cmb_cot", 200), ("open", 200)])
def test_an_explanation_has_the_room_that_it_had_in_training(style: str, room: int) -> None:
    config = make_config(prompt__style=style, prompt__max_target_length=200)
    assert sampling.default_max_new_tokens(config) == room


def test_beam_search_with_a_prefix() -> None:
    """Witness: transformers' own cache, where every forward pass puts the prefix in front again."""
    loaded, config = tuned("ptuning")
    decoder = llama.engine(loaded, set_generation(config, arguments={"num_beams": 3}))
    rows = [item.ids for item in decoder.ask(prompts.default_prompts(questions(3), config))]
    settings = sampling.generation_config(decoder.model, decoder.tokenizer, decoder.config)
    mine = decoder.run(rows, settings)
    ids, mask = causal.left_padded(rows, decoder.pad, torch.device("cpu"))
    plain = loaded.model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    assert mine == plain[:, ids.shape[1] :].tolist()


def scripted(decoder: Any, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model write these texts, by the words its prompt holds, as far as the criteria allow."""
    tokenizer = decoder.tokenizer
    ends = [tokenizer.eos_token_id]

    def generate(rows: list[list[int]], chosen: Any, start: Any = None, **more: Any) -> list[list[int]]:
        written = []
        for row in rows:
            prompt = tokenizer.decode(row)
            script = tokenizer(next(text for key, text in texts.items() if key in prompt), add_special_tokens=False)
            new: list[int] = []
            for token in [*script["input_ids"], *ends][: chosen.max_new_tokens]:
                new.append(token)
                ids = torch.tensor([[0] * max(map(len, rows)) + new])
                if any(bool(criterion(ids, None)[0]) for criterion in more["stopping_criteria"]):
                    break
            written.append(new)
        return written

    monkeypatch.setattr(decoder, "run", generate)


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think></think>{% endif %}"
)


def thinker(**changes: Any) -> Any:
    config = make_config(prompt__max_target_length=200, generation={"max_new_tokens": 12}, **changes)
    loaded = llama.load(config.model)
    loaded.tokenizer.chat_template = CHAT
    return llama.engine(loaded, config)


def test_a_thinking_budget_costs_little_however_much_was_written() -> None:
    """Rows are closed early, late, in the prompt only, or not; 16,000 tokens were 30 ms on the host at each step."""
    budget = sampling.ThinkingBudget([7, 8], width=2, thinking=16_000, writing=100)
    ids = torch.zeros(16, 2 + 15_999, dtype=torch.long)
    ids[:, :2] = torch.tensor([7, 8])
    ids[0, 2 + 15_898 : 2 + 15_900] = ids[1, 2 + 15_897 : 2 + 15_899] = torch.tensor([7, 8])
    ids[1, -2:] = torch.tensor([7, 8])
    assert budget(ids, None).tolist() == [False, True, *[False] * 14]
    longer = torch.cat([ids, ids[:, -1:]], 1)
    assert budget(longer, None).tolist() == [True] * 16
    assert budget(ids[:, :3], None).tolist() == [False] * 16
    started = time.process_time()
    for _ in range(5):
        budget(ids, None)
    assert (time.process_time() - started) / 5 < 0.012


def test_thinking_is_kept_and_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own room; cut while thinking and cut afterwards are two things; what the template opened is in the text."""
    decoder = thinker(model__chat_template_kwargs={"enable_thinking": True})
    decoder.config = set_generation(decoder.config, thinking_tokens=30)
    texts = {
        "疾病0": "可能选B。</think>答案: AC",
        "疾病1": "我想" * 40 + "所以答案: B",
        "疾病2": "好</think>答案: C " + "因为" * 40,
    }
    scripted(decoder, texts, monkeypatch)
    asked = prompts.default_prompts(questions(3), decoder.config)
    assert all(decoder.tokenizer.decode(item.ids).endswith("<think>\n") for item in decoder.ask(asked))
    found = {p.question_id: p for p in map(to_prediction, decoder.answer(asked))}
    assert found["q:0"].text == "<think>" + texts["疾病0"] and found["q:0"].answer == "AC"
    assert found["q:0"].finish == "stop"
    assert found["q:1"].finish == found["q:2"].finish == "length"
    assert "</think>" not in found["q:1"].text and found["q:1"].answer is None
    assert found["q:2"].answer == "C" and found["q:2"].text.startswith("<think>好</think>答案: C")
    written = {w.request.question.id: w for w in decoder.generate(asked)}
    closed = len(decoder.tokenizer("好</think>", add_special_tokens=False)["input_ids"])
    assert written["q:1"].completion_tokens == 30 and written["q:2"].completion_tokens == closed + 12


def test_arguments_of_the_chat_template() -> None:
    plain, asked = thinker(), prompts.default_prompts(questions(1), make_config())
    (item,) = thinker(model__chat_template_kwargs={"enable_thinking": False}).ask(asked)
    assert plain.tokenizer.decode(item.ids).endswith("<think></think>") and not plain.codec.thinks
    (item,) = plain.ask(asked)
    assert plain.tokenizer.decode(item.ids).endswith("<assistant>")
    config = make_config(model__chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.*no chat template"):
        llama.engine(llama.load(config.model), config)
    broken = thinker()
    broken.tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(UserError, match="no system here"):
        llama.engine(Loaded(broken.model, broken.tokenizer), broken.config)
    broken.tokenizer.chat_template = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="goes on without end"):
        llama.engine(Loaded(broken.model, broken.tokenizer), broken.config)


def test_what_was_in_force_can_be_written_down(model: tuple[Loaded, Config]) -> None:
    loaded, config = model
    found = json.loads(json.dumps(llama.engine(loaded, config).effective_generation_config()))
    assert found["max_new_tokens"] == 8 and found["eos_token_id"] == [loaded.tokenizer.eos_token_id]
    assert found["dtype"] == "float32" and found["do_sample"] is False
    assert found["lora_merged"] == (config.tuning.method != "lora")
    likelihood = llama.engine(loaded, set_generation(config, mode="likelihood"))
    assert "max_new_tokens" not in likelihood.effective_generation_config()
