"""chat and serve: a trained run answers in the terminal and to the real OpenAI client."""

import contextlib
import dataclasses
import io
import itertools
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import uvicorn

from cmexam_tune import chat, prompts, serve, tiny
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.inference import conversation, loading
from cmexam_tune.inference.serving import (
    EventStream,
    GenerationRequest,
    Limits,
    ProtocolRequest,
    Refused,
    app,
    openai_protocol,
)
from cmexam_tune.inference.serving.app import application
from cmexam_tune.inference.serving.batcher import DynamicBatcher, settled
from cmexam_tune.predict import predict
from cmexam_tune.preprocess import preprocess
from cmexam_tune.train import train

SAMPLE = Path(__file__).resolve().parents[1] / "cmexam_tune" / "sample" / "cmexam"
EXAM = "下列属于抗菌药的是\nA. 青霉素\nB、阿司匹林\nC 维生素C"
NO_EXAM = "感冒了怎么办？要不要吃抗生素？"


def trained(folder: Path, recipe: str, family: str, *changes: str) -> Path:
    model = tiny.build(family, folder / family, hidden=32)
    if not (folder / "data").is_dir():
        preprocess("cmexam", [SAMPLE / "train.csv"], folder / "data")
    few = [
        f"model.model_name_or_path={model}", f"data.train={folder}/data/train.questions.jsonl", "data.validation=[]",
        "training.eval_strategy=no",
        "data.max_train_samples=16", "prompt.max_source_length=512", "training.max_steps=2",
        "training.save_strategy=no", "training.global_batch_size=4", "training.per_device_train_batch_size=4",
        "training.gradient_checkpointing=false", "generation.max_new_tokens=6", f"out={folder}/{recipe}",
    ]  # fmt: skip
    return train(recipe, [*few, *changes]).path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return trained(folder, "lora_llama", "llama")


LIMITS = Limits(body=20_000, prompt_tokens=600, output_tokens=400, seconds=60)


@contextlib.contextmanager
def serving(run: Path | str, *overrides: str, **more: Any) -> Iterator[openai.OpenAI]:
    config, loaded = loading.load_writer(run, overrides)
    with serve.listen("127.0.0.1", 0) as opened:
        web = application(config, loaded, "tuned", LIMITS, **more)
        server = uvicorn.Server(uvicorn.Config(web, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{opened.getsockname()[1]}/v1"
        yield openai.OpenAI(base_url=address, api_key="SECRET", max_retries=0)
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[openai.OpenAI]:
    with serving(run) as made:
        yield made


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "tuned" and client.models.retrieve("tuned") == model
    with pytest.raises(openai.NotFoundError, match="'other/one' is not served here"):
        client.models.retrieve("other/one")


def test_a_route_that_is_not_there_gets_an_error_object(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: there is no such route"):
        client.embeddings.create(model="tuned", input="x")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{client.base_url}chat/completions")
    assert caught.value.code == 405 and json.load(caught.value)["error"]["type"] == "invalid_request_error"


LM_EVAL = "以下是单项选择题，请直接输出答案选项。\n下列属于抗菌药的是\nA. 青霉素\nB. 阿司匹林\nC. 维生素C\n答案："
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_messages_go_to_the_model_as_they_are(client: openai.OpenAI, run: Path) -> None:
    config, loaded = loading.load_writer(run)
    for text in (LM_EVAL, EXAM, NO_EXAM):
        got = client.chat.completions.create(model="tuned", messages=user(text), max_tokens=1)
        plain = prompts.wrap(text, config.prompt.template)
        assert got.usage is not None
        assert got.usage.prompt_tokens == len(cast(Any, loaded.tokenizer)(plain)["input_ids"]), text


def untrained(folder: Path, template: str) -> list[str]:
    """Return what makes a recipe use the untrained model in a wrapper."""
    return [f"model.model_name_or_path={folder}/llama", "model.family=llama", f"prompt.template={template}"]


def test_the_recipe_s_system_text_is_not_put_before_a_client_s_messages(run: Path, folder: Path) -> None:
    changes = [*untrained(folder, "alpaca"), "prompt.system=你是医生，请认真回答。"]
    counts = []
    for ask_as_trained in (False, True):
        with serving("zeroshot_qwen", *changes, ask_as_trained=ask_as_trained) as client:
            got = client.chat.completions.create(model="tuned", messages=user(NO_EXAM), max_tokens=1)
            assert got.usage is not None
            counts.append(got.usage.prompt_tokens)
    tokenizer = cast(Any, loading.load_writer(run)[1].tokenizer)
    texts = [prompts.wrap(NO_EXAM, "alpaca", system) for system in (None, "你是医生，请认真回答。")]
    assert counts == [len(tokenizer(text)["input_ids"]) for text in texts]


@pytest.mark.parametrize("style", ["answer", "zeroshot", "cmb_answer"])
def test_predict_against_this_server_writes_what_local_predict_writes(
    client: openai.OpenAI, run: Path, folder: Path, tmp_path: Path, style: str
) -> None:
    file, same = folder / "data" / "train.questions.jsonl", [f"prompt.style={style}", "generation.max_new_tokens=12"]
    there = [f"model.base_url={client.base_url}", "model.model_name_or_path=tuned"]
    local = predict(run, file, tmp_path / "local.jsonl", [*same, "prompt.max_source_length=2000"], limit=6)
    remote = predict("zeroshot_vllm", file, tmp_path / "remote.jsonl", [*same, *there], limit=6)
    texts = [{p.question_id: p.text for p in jsonl.read(out, Prediction)} for out in (local, remote)]
    assert texts[0] == texts[1] and len(texts[0]) == 6 and any(texts[0].values())


def test_votes_against_this_server(client: openai.OpenAI, folder: Path, tmp_path: Path) -> None:
    file = folder / "data" / "train.questions.jsonl"
    there = [f"model.base_url={client.base_url}", "model.model_name_or_path=tuned", "generation.max_new_tokens=8"]
    sampling = ["generation.votes=3", "generation.do_sample=true", "generation.temperature=1.5"]
    outs = [predict("zeroshot_vllm", file, tmp_path / f"{i}.jsonl", [*there, *sampling], limit=2) for i in range(2)]
    votes = [{p.question_id: p.votes for p in jsonl.read(out, Prediction)} for out in outs]
    assert votes[0] == votes[1] and all(len(set(texts)) == 3 for texts in votes[0].values())


def test_a_seed_gives_the_same_text_in_any_batch(client: openai.OpenAI, run: Path) -> None:
    from cmexam_tune.models.generation.streaming import RowOptions

    asked: Any = {"model": "tuned", "messages": user(NO_EXAM), "max_tokens": 12, "temperature": 1.5}
    texts = [
        client.chat.completions.create(**asked, seed=seed).choices[0].message.content for seed in (7, 7, 2**40, None)
    ]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    config, loaded = loading.load_writer(run, ["generation.max_new_tokens=12", "generation.do_sample=true",
                                     "generation.temperature=1.5", "generation.top_p=1.0"])  # fmt: skip
    batcher = DynamicBatcher(loaded, 8)
    waiting = [
        batcher.submit(conversation.to_request(user(NO_EXAM)), config, RowOptions(seed=seed)) for seed in (5, 2**40, 7)
    ]
    assert [one.future.result().text for one in waiting][1:] == [texts[2], texts[0]]
    assert batcher.batches <= 2, "requests with seeds of their own are one batch"


def test_several_answers_to_several_prompts(client: openai.OpenAI) -> None:
    texts = ["问题: 高血压", "问题: 头痛"]
    asked: Any = {"model": "tuned", "max_tokens": 12, "temperature": 1.5}
    alone = [client.completions.create(**asked, prompt=text, seed=seed) for text in texts for seed in (7, 8)]
    wanted = [one.choices[0].text for one in alone]
    got = client.completions.create(**asked, prompt=texts, seed=7, n=2)
    assert [choice.text for choice in got.choices] == wanted and len(set(wanted)) == 4
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    pieces = ["", "", "", ""]
    for chunk in client.completions.create(
        **asked, prompt=texts, seed=7, n=2, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == wanted and chunk.usage == got.usage
    usages: Any = [one.usage for one in alone]
    assert got.usage is not None
    assert got.usage.prompt_tokens == usages[0].prompt_tokens + usages[2].prompt_tokens
    assert got.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)
    chat_choices = client.chat.completions.create(**asked, messages=user(NO_EXAM), n=3).choices
    assert len({choice.message.content for choice in chat_choices}) == 3


def test_without_a_temperature_nothing_is_sampled_whatever_the_recipe_says(client: openai.OpenAI, run: Path) -> None:
    asked: Any = {"model": "tuned", "messages": user(NO_EXAM), "max_tokens": 12}
    greedy = client.chat.completions.create(**asked).choices[0].message.content
    with serving(run, "generation.do_sample=true", "generation.temperature=1.5", "generation.top_k=50") as sampler:
        for fields in ({}, {"temperature": 0}):
            assert sampler.chat.completions.create(**asked, **fields).choices[0].message.content == greedy


def test_fields_that_change_no_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tuned", "messages": user(NO_EXAM)}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    free = {"user": "me", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "tool_choice": "none",
            "service_tier": "auto", "response_format": {"type": "text"}, "tools": [], "n": 1}  # fmt: skip
    names = {*openai_protocol.ChatRequest.model_fields, "prompt", "reasoning_effort", "functions", "whatever"}
    nothing = dict.fromkeys(names - {*free, "model", "messages"})
    for sent in (body(messages=user(NO_EXAM), **free), body(messages=user(NO_EXAM), **nothing)):
        with urllib.request.urlopen(f"{client.base_url}chat/completions", sent.encode()) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == whole


GREETED = [("assistant", "您好"), ("user", "问一")]
TWICE = [("user", "问一"), ("user", "问二"), ("assistant", "答"), ("user", "问三")]
SYSTEM_LATER = [("user", "问一"), ("assistant", "答"), ("system", "请简短"), ("user", "问二")]


def said(turns: list[tuple[str, str]]) -> Any:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("turns", [GREETED, TWICE, SYSTEM_LATER])
def test_a_conversation_in_any_order_of_roles(
    client: openai.OpenAI, folder: Path, turns: list[tuple[str, str]]
) -> None:
    """A chat template is given the messages; a wrapper that has no form for them refuses."""
    order = ", ".join(role for role, _ in turns)
    with pytest.raises(openai.BadRequestError, match=f"'cmexam_lora' has no form for messages in the order {order}:"):
        client.chat.completions.create(model="tuned", messages=said(turns))
    config, loaded = loading.load_writer("zeroshot_qwen", untrained(folder, "auto"))
    tokenizer: Any = loaded.tokenizer
    tokenizer.chat_template = CHAT
    written = "".join(f"<{role}>{content}\n" for role, content in turns) + "<assistant>"
    reply = conversation.reply(config, loaded, said(turns))
    assert reply.prompt_tokens == len(tokenizer(written, add_special_tokens=False)["input_ids"])


def test_earlier_turns_are_refused_where_the_template_has_no_form_for_them(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cmexam_tune.models.families.llama import Llama

    codec = Llama.codec
    monkeypatch.setattr(Llama, "codec", lambda *given: dataclasses.replace(codec(*given), remembers=False))
    with serving(run) as client:
        assert client.chat.completions.create(model="tuned", messages=user("x"), max_tokens=2).choices
        with pytest.raises(openai.BadRequestError, match="no form for earlier turns"):
            client.chat.completions.create(model="tuned", messages=said([*TWICE[1:]]))


def test_a_developer_is_a_system(run: Path, folder: Path) -> None:
    counts = []
    with serving("zeroshot_qwen", *untrained(folder, "alpaca")) as client:
        for role in ("developer", "system"):
            messages = said([(role, "你是医生"), ("user", "x")])
            got = client.chat.completions.create(model="tuned", messages=messages, max_tokens=1)
            assert got.usage is not None
            counts.append(got.usage.prompt_tokens)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("beams", [1, 2])
def test_stop_stops(run: Path, beams: int) -> None:
    """A row ends at its own stop text, is charged up to there, and the others of its batch go on."""
    from cmexam_tune.models.generation.streaming import RowOptions

    config, loaded = loading.load_writer(run, ["generation.max_new_tokens=60", f"generation.num_beams={beams}"])
    steps = list[int]()
    cast(Any, loaded.model).register_forward_hook(lambda *given: steps.append(1))
    asked = conversation.to_request(user("x"))

    def write(*options: RowOptions) -> list[Any]:
        steps.clear()
        batcher = DynamicBatcher(loaded, 8)
        waiting = [batcher.submit(asked, config, row) for row in options]
        return [one.future.result() for one in waiting]

    (whole,) = write(RowOptions())
    assert whole.completion_tokens == 60
    stop = whole.text[20:22]
    place = whole.text.index(stop)
    (alone,) = write(RowOptions(stop=(stop, "never")))
    assert stop not in alone.text
    if beams == 1:  # of beams another one may win
        assert (
            alone.finish == "stop" and alone.text == whole.text[:place] and len(steps) == alone.completion_tokens < 60
        )
    stopped, other = write(RowOptions(stop=(stop,)), RowOptions())
    assert (stopped.text, stopped.completion_tokens) == (alone.text, alone.completion_tokens)
    assert (other.text, other.completion_tokens) == (whole.text, 60)


def test_tokenizers_that_clean_up_are_used_without_a_warning(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import tokenization_utils_tokenizers

    from cmexam_tune.models.generation.streaming import RowOptions

    def warned(*words: Any) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(tokenization_utils_tokenizers.logger, "warning_once", warned)
    config, loaded = loading.load_writer(run)
    tokenizer: Any = loaded.tokenizer
    tokenizer.clean_up_tokenization_spaces = True
    with pytest.raises(AssertionError, match="Ignoring clean_up"):
        tokenizer.decode([5])
    options = RowOptions(stop=("never",), top=2, echo=True)
    pending = DynamicBatcher(loaded, 1).submit(conversation.to_request(user(NO_EXAM)), config, options)
    assert pending.future.result().text


def test_completion_is_what_chat_says(client: openai.OpenAI, run: Path) -> None:
    config, loaded = loading.load_writer(run)
    for text, made in ((NO_EXAM, contextlib.nullcontext(client)), (EXAM, serving(run, ask_as_trained=True))):
        expected = conversation.reply(config, loaded, user(text))
        with made as asked:
            got = asked.chat.completions.create(model="tuned", messages=user(text))
        assert (got.choices[0].message.content or "").strip() == expected.text
        assert got.usage is not None and got.usage.prompt_tokens == expected.prompt_tokens > 10
    longer = client.chat.completions.create(model="tuned", messages=user(EXAM), max_tokens=1)
    assert longer.usage is not None and longer.usage.completion_tokens == 1
    assert longer.choices[0].finish_reason == "length"


def test_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tuned", messages=user(EXAM)).choices[0].message.content
    stream = client.chat.completions.create(model="tuned", messages=user(EXAM), stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_stream_comes_while_the_model_writes(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    from cmexam_tune.models.generation.streaming import Watching

    heard, in_time, after = threading.Event(), list[bool](), Watching.after

    def patient(self: Any, input_ids: Any, scores: Any, **more: Any) -> Any:
        if input_ids.shape[1] - self.width == 10:
            in_time.append(heard.wait(20))
        return after(self, input_ids, scores, **more)

    monkeypatch.setattr(Watching, "after", patient)
    for chunk in client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=20, stream=True):
        if chunk.choices[0].text:
            heard.set()
    assert in_time == [True], "the first text came before the tenth token was written"


def test_a_stream_is_what_comes_in_one_piece(client: openai.OpenAI) -> None:
    long: Any = {"model": "tuned", "prompt": "问题: 高血压", "max_tokens": 300}
    whole = client.completions.create(**long)
    counted = {"include_usage": True}
    parts, last = [], None
    for chunk in client.completions.create(**long, stream=True, stream_options=counted):
        parts += [choice.text for choice in chunk.choices]
        last = chunk
    assert "".join(parts) == whole.choices[0].text
    assert sum(map(bool, parts)) > 20
    assert last is not None and not last.choices and last.usage == whole.usage
    stop = whole.choices[0].text[40:43]
    cut = client.completions.create(**long, stop=stop)
    pieces = list(client.completions.create(**long, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == cut.choices[0].text
    assert pieces[-1].choices[0].finish_reason == cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stops", "known"),
    [("答案是\ufffd", [], "答案是"), ("ab##", ["###"], "ab"), ("ab###c", ["###"], "ab"), ("ab#c", ["###"], "ab#c")],
)
def test_only_what_stays_is_streamed(text: str, stops: list[str], known: str) -> None:
    assert settled(text, stops) == known


def test_a_stream_that_cannot_be_is_refused_with_its_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="600 are possible"):
        client.chat.completions.create(model="tuned", messages=user("汉" * 1000), stream=True)


def test_a_stream_that_fails_ends_with_an_error_object(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cmexam_tune.models.generation.streaming import Watching

    after = Watching.after

    def broken(self: Any, input_ids: Any, scores: Any, **more: Any) -> Any:
        if input_ids.shape[1] - self.width == 3:
            raise RuntimeError("broken card")
        return after(self, input_ids, scores, **more)

    monkeypatch.setattr(Watching, "after", broken)
    with serving(run) as client, pytest.raises(openai.APIError, match="the model failed"):
        list(client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=50, stream=True))


def test_log_probabilities_are_those_of_transformers(client: openai.OpenAI, run: Path) -> None:
    import torch

    got = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=12, logprobs=5)
    (choice,) = got.choices
    assert choice.logprobs is not None and got.usage is not None
    logs: Any = choice.logprobs
    _, loaded = loading.load_writer(run)
    tokenizer: Any = loaded.tokenizer
    ids = tokenizer("问题: 高血压", return_tensors="pt")["input_ids"]
    assert ids.shape[1] == got.usage.prompt_tokens
    with torch.no_grad():
        for place, token in enumerate(logs.tokens):
            expected = loaded.model(input_ids=ids).logits[0, -1].float().log_softmax(-1)
            best = expected.topk(5)
            assert token == tokenizer.decode([int(best.indices[0])])
            assert logs.token_logprobs[place] == pytest.approx(float(best.values[0]), abs=1e-4)
            assert sorted(logs.top_logprobs[place].values(), reverse=True)[0] == logs.token_logprobs[place]
            assert set(logs.top_logprobs[place]) == {tokenizer.decode([int(i)]) for i in best.indices}
            ids = torch.cat([ids, best.indices[:1].view(1, 1)], dim=1)
    sampled = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=1, logprobs=5, temperature=2)
    assert dict(sampled.choices[0].logprobs.top_logprobs[0]) == pytest.approx(logs.top_logprobs[0], abs=1e-4)  # type: ignore[union-attr, index, arg-type]


def test_token_ids_are_a_prompt_as_it_is(client: openai.OpenAI, run: Path) -> None:
    tokenizer: Any = loading.load_writer(run)[1].tokenizer
    texts = ["问题: 高血压", "问题: 头痛怎么办"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    asked: Any = {"model": "tuned", "max_tokens": 6}
    wanted = [choice.text for choice in client.completions.create(**asked, prompt=texts).choices]
    assert [choice.text for choice in client.completions.create(**asked, prompt=rows).choices] == wanted
    alone = client.completions.create(**asked, prompt=rows[1])
    assert alone.choices[0].text == wanted[1] and alone.usage is not None and alone.usage.prompt_tokens == len(rows[1])


@pytest.mark.parametrize("chunk", [256, 3])
def test_echo_is_the_prompt_with_the_log_probabilities_of_transformers(
    client: openai.OpenAI, run: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Of prompts of several lengths in one batch, read in pieces or at once: the sums that lm-eval makes."""
    import torch

    from cmexam_tune.models.generation import kv_cache

    monkeypatch.setattr(kv_cache, "CHUNK", chunk)
    _, loaded = loading.load_writer(run)
    model, tokenizer = loaded.model, cast(Any, loaded.tokenizer)
    texts = ["问题: 高血压的首选药物是", "头痛", "问题: 头痛怎么办？A. 休息"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    for prompt in (rows, texts):
        got = client.completions.create(model="tuned", prompt=prompt, max_tokens=1, logprobs=2, echo=True)
        for ids, text, choice in zip(rows, texts, got.choices, strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
            logs: Any = choice.logprobs
            assert logs.token_logprobs[0] is None and logs.top_logprobs[0] is None
            wanted = [float(logits[place, token]) for place, token in enumerate(ids[1:])]
            assert logs.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-4), text
            assert logs.tokens[: len(ids)] == [tokenizer.decode([token]) for token in ids]
            assert [max(top.values()) for top in logs.top_logprobs[1:]] == pytest.approx(
                logits.max(-1).values.tolist(), abs=1e-4
            )
            read = tokenizer.decode(ids)
            assert choice.text.startswith(text if prompt is texts else read)
            for place in range(1, len(ids)):
                assert logs.text_offset[place] == len(tokenizer.decode(ids[:place])), (text, place)


def test_echo_alone_writes_nothing(client: openai.OpenAI) -> None:
    got = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=0, echo=True)
    assert got.choices[0].text == "问题: 高血压" and got.choices[0].logprobs is None
    assert got.usage is not None and got.usage.completion_tokens == 0 < got.usage.prompt_tokens
    logged = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=0, echo=True, logprobs=0)
    logs: Any = logged.choices[0].logprobs
    assert len(logs.tokens) == got.usage.prompt_tokens and logs.top_logprobs[1:] == [{}] * (len(logs.tokens) - 1)


def test_the_model_goes_on_with_its_own_message(client: openai.OpenAI, run: Path) -> None:
    """Behind the words as local modes put them there: a token for each, after the template."""
    config, loaded = loading.load_writer(run)
    tokenizer: Any = loaded.tokenizer
    ids = tokenizer(prompts.wrap(NO_EXAM, config.prompt.template))["input_ids"]
    ids += tokenizer("答案是", add_special_tokens=False)["input_ids"]
    wanted = client.completions.create(model="tuned", prompt=ids, max_tokens=6)
    messages = said([("user", NO_EXAM), ("assistant", "答案是")])
    forced = {"continue_final_message": True, "add_generation_prompt": False}
    for fields in (forced, {"continue_final_message": True}):
        got = client.chat.completions.create(model="tuned", messages=messages, max_tokens=6, extra_body=fields)
        assert got.choices[0].message.content == wanted.choices[0].text
        assert got.usage == wanted.usage


def test_a_last_message_of_the_model_is_part_of_the_conversation(client: openai.OpenAI, folder: Path) -> None:
    turns = [("user", "问一"), ("assistant", "答")]
    config, loaded = loading.load_writer("zeroshot_qwen", untrained(folder, "auto"))
    tokenizer: Any = loaded.tokenizer
    tokenizer.chat_template = CHAT
    reply = conversation.reply(config, loaded, said(turns))
    written = "<user>问一\n<assistant>答\n<assistant>"
    assert reply.prompt_tokens == len(tokenizer(written, add_special_tokens=False)["input_ids"])
    with pytest.raises(openai.BadRequestError, match="has no form for a reply to the model's own message"):
        client.chat.completions.create(model="tuned", messages=said(turns))


@pytest.mark.parametrize("sampled", [{}, {"temperature": 2.0, "n": 8, "seed": 3}])
def test_only_given_texts_are_written(client: openai.OpenAI, sampled: dict[str, Any]) -> None:
    allowed = ["A", "AC", "BCD", "青霉素"]
    asked: Any = {"model": "tuned", **sampled, "max_tokens": 20}
    for extra in ({}, {"continue_final_message": True}):
        messages = said([("user", EXAM), *([("assistant", "答案是")] if extra else [])])
        body = {"structured_outputs": {"choice": allowed}, **extra}
        choices = client.chat.completions.create(**asked, messages=messages, extra_body=body).choices
        texts = [choice.message.content for choice in choices]
        assert set(texts) <= set(allowed) and {choice.finish_reason for choice in choices} == {"stop"}
        assert not sampled or len(set(texts)) > 1
    free, bound = (
        client.completions.create(**asked, prompt=[1, 2, 3], extra_body=body).choices[0].text
        for body in ({}, {"structured_outputs": {"choice": ["ACD"]}})
    )
    assert free != bound == "ACD"


def test_a_batch_that_fails_in_the_middle_answers_only_the_rest_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cmexam_tune.models.generation.decoder import Decoder

    config, loaded = loading.load_writer(run)
    generate, asked = Decoder.generate, list[int]()

    def failing(self: Decoder, requests: Sequence[Any]) -> Iterator[Any]:
        asked.append(len(requests))
        for number, completion in enumerate(generate(self, requests)):
            if len(requests) > 1 and number == 2:
                raise UserError("made to fail")
            yield completion

    monkeypatch.setattr(Decoder, "generate", failing)
    batcher = DynamicBatcher(loaded, 8)
    waiting = [batcher.submit(conversation.to_request(user(f"{NO_EXAM}{i}")), config) for i in range(5)]
    assert all(one.future.result().text for one in waiting)
    assert asked == [5, 1, 1, 1]


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tuned", "messages": user(EXAM), "max_tokens": 6, "logprobs": True}
    got = client.chat.completions.create(**asked, top_logprobs=20)
    assert got.choices[0].logprobs is not None and got.usage is not None
    content = got.choices[0].logprobs.content
    assert content and 5 <= len(content) <= got.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 20 and token.top_logprobs[0].logprob == token.logprob
        assert token.bytes is None or bytes(token.bytes).decode() == token.token
    bare = client.chat.completions.create(**asked).choices[0].logprobs
    assert bare is not None and bare.content and bare.content[0].top_logprobs == []
    written = client.chat.completions.create(model="tuned", messages=user(EXAM), max_tokens=6).choices[0]
    assert written.logprobs is None and written.message.content == got.choices[0].message.content


def test_conversation_with_parts_and_sampling(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "你是医生"},
        {"role": "user", "content": [{"type": "text", "text": "你好"}]},
        {"role": "assistant", "content": "您好"},
        {"role": "user", "content": EXAM},
    ]
    with pytest.raises(openai.BadRequestError, match="no system message"):
        client.chat.completions.create(model="tuned", messages=messages)
    got = client.chat.completions.create(model="tuned", messages=messages[1:], temperature=0.7, top_p=0.9)
    assert got.choices[0].message.role == "assistant"


def body(**fields: Any) -> str:
    return json.dumps({"model": "tuned", "messages": user("x"), **fields})


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (body(model="gpt-4"), 404, "is not served here"),
        (body(messages=[]), 400, "at least 1 item"),
        (body(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0]"),
        (body(messages=[{"role": "assistant", "content": "x"}]), 400, "at least one message must have the role user"),
        (body(continue_final_message=True), 400, "must have the role assistant"),
        (body(add_generation_prompt=False), 400, "add_generation_prompt: false with continue_final_message"),
        (body(structured_outputs={"choice": []}), 400, "structured_outputs.choice"),
        (body(structured_outputs={"regex": "A"}), 400, "structured_outputs"),
        (body(structured_outputs={"choice": ["A"]}, stream=True), 400, "structured_outputs: not while streaming"),
        (body(echo=True), 400, "echo: only False"),
        (body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0]"),
        (body(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]), 400, "messages[0]"),
        (body(messages="x"), 400, "messages"), (body(messages=None), 400, "messages"),
        (body(prompt="x"), 400, "prompt: unknown key"),
        (body(n=0), 400, "n: should be greater"), (body(n=129), 400, "n: should be less than or equal to 128"),
        (body(n=1.5), 400, "n: should be a valid integer"), (body(n=True), 400, "n: "), (body(seed=1.5), 400, "seed"),
        (body(logprobs=2), 400, "logprobs"),
        (body(top_logprobs=2), 400, "logprobs: true"),
        (body(logprobs=True, top_logprobs=21), 400, "or equal to 20"),
        (body(logprobs=True, top_logprobs=1.5), 400, "valid integer"),
        (body(logprobs=True, stream=True), 400, "stream"),
        (body(stream_options={"include_usage": True}), 400, "stream_options"),
        (body(stream=True, stream_options={"x": True}), 400, "stream_options"), (body(tools=[{}]), 400, "tools"),
        (body(presence_penalty=1), 400, "presence_penalty"), (body(foo=1), 400, "foo: unknown key"),
        (body(max_tokens=-1), 400, "max_tokens"), (body(max_tokens=1.5), 400, "max_tokens"),
        (body(max_tokens=10**9), 400, "at most 400"), (body(max_tokens="x"), 400, "max_tokens"),
        (body(max_tokens=True), 400, "max_tokens"), (body(temperature="hot"), 400, "temperature"),
        (body(temperature=-1), 400, "temperature"), (body(top_p=2), 400, "top_p"), (body(stop=5), 400, "stop"),
        (body(stop=[1]), 400, "stop"), (body(stream="yes"), 400, "stream"),
        (body(messages=user("汉" * 1000)), 400, "600 are possible"),
        ('{"max_tokens": Infinity}', 400, "Infinity"), ('{"temperature": NaN}', 400, "NaN"), ("", 400, "broken JSON"),
        ("[" * 10_000, 400, "nested too deep"), ("[1]", 400, "an object is needed"), ('{"a": 1, "a": 2}', 400, "twice"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400, "surrogate"),
        ("x" * 30_000, 413, "20,000 bytes"),
        ("\udcff", 400, "not UTF-8"),
    ],
)  # fmt: skip
def test_wrong_requests_get_openai_s_error_object(client: openai.OpenAI, sent: str, status: int, message: str) -> None:
    error = refusal(client, "chat/completions", sent, status)
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}
    if error["param"] is not None and "possible" not in message:
        assert error["message"].startswith(error["param"]) or error["param"] == "model"


def refusal(client: openai.OpenAI, route: str, sent: str, status: int = 400) -> dict[str, Any]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{client.base_url}{route}", sent.encode(errors="surrogateescape"))
    assert caught.value.code == status
    error: dict[str, Any] = json.load(caught.value)["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ["x"] * 65, "n": 2}, "n", "130 answers"), ({"prompt": [1, "x"]}, "prompt", "token ids"),
        ({"prompt": [10**6]}, "prompt", "found 1,000,000"), ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [-1]}, "prompt", "token ids"), ({"prompt": [[]]}, "prompt", "none of them empty"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "with echo only"),
        ({"prompt": "x", "echo": True, "stream": True}, "echo", "not while streaming"),
        ({}, "prompt", "required"), ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "none of them empty"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "equal to 20"),
        ({"prompt": "x", "top_logprobs": 1}, "top_logprobs", "unknown key"),
        ({"prompt": "x", "messages": user("x")}, "messages", "unknown key"),
        ({"prompt": "x", "best_of": 2}, "best_of", "only 1"),
    ],
)  # fmt: skip
def test_wrong_requests_for_completions(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    """The route says what a request is, whatever fields it has."""
    error = refusal(client, "completions", json.dumps(fields))
    assert error["param"] == param and message in error["message"]


def test_numbers_may_be_written_as_clients_write_them(client: openai.OpenAI) -> None:
    sent = body(max_tokens=4.0, n=1.0, temperature=1, presence_penalty=0.0, frequency_penalty=0, logprobs=False)
    with urllib.request.urlopen(f"{client.base_url}chat/completions", sent.encode()) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] <= 4


class Ping(ProtocolRequest):
    """Another protocol, as small as one can be."""

    say: str

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        return headers.get("x-key", "")

    @staticmethod
    def error(refused: Refused) -> dict[str, Any]:
        return {"wrong": refused.field or str(refused)}

    def generation(self) -> GenerationRequest:
        return GenerationRequest([self.say, user(self.say)], max_tokens=3)

    def answer(self, completions: Sequence[Any], name: str) -> dict[str, Any]:
        return {"said": [completion.completion_tokens for completion in completions], "by": name}

    def events(self, name: str) -> EventStream:
        raise Refused(400, "stream: is not possible here.", "stream")


def test_another_protocol_is_one_class_and_one_route(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ROUTES", {**app.ROUTES, "/ping": Ping})
    with serving(run, api_key="SECRET") as client:

        def post(values: dict[str, Any], key: str = "SECRET") -> Any:
            address = str(client.base_url).replace("/v1/", "/ping")
            return urllib.request.urlopen(urllib.request.Request(address, json.dumps(values).encode(), {"x-key": key}))

        assert json.load(post({"say": "问题"})) == {"said": [3, 3], "by": "tuned"}
        for values, key, status, wrong in (
            ({"say": 1}, "SECRET", 400, "say"), ({"say": "x", "n": 2}, "SECRET", 400, "n"),
            ({"say": "x", "model": "y"}, "SECRET", 404, "model"), ({"say": "x"}, "", 401, "API key is missing"),
            ({"say": "x", "stream": True}, "SECRET", 400, "stream"),
        ):  # fmt: skip
            with pytest.raises(urllib.error.HTTPError) as caught:
                post(values, key)
            assert caught.value.code == status and wrong in json.load(caught.value)["wrong"]


def test_half_a_request_is_not_waited_for_without_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMITS", dataclasses.replace(LIMITS, seconds=0.5))
    with serving(run) as client, socket.create_connection(("127.0.0.1", client.base_url.port or 0), timeout=20) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in line.recv(200).partition(b"\r\n")[0]


@pytest.mark.parametrize("key", ["密钥", "two words"])
def test_a_key_that_no_client_can_send(key: str) -> None:
    with pytest.raises(UserError, match="--api-key"):
        serve.main(["--run", "nowhere", "--api-key", key])


def test_an_empty_key_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from cmexam_tune.inference import serving

    monkeypatch.setenv(serve.KEY, "")
    kept: list[Any] = []
    monkeypatch.setattr(loading, "load_writer", lambda *given, **options: (None, None))
    monkeypatch.setattr(app, "application", lambda *given, **more: kept.append(given) or serving)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *given, **more: None)
    serve.main(["--run", ".", "--port", "0"])
    assert kept[0][4] is None


def test_health_completions_and_stop(client: openai.OpenAI) -> None:
    with urllib.request.urlopen(str(client.base_url).replace("/v1/", "/health")) as health:
        assert json.load(health) == {"status": "ok"}
    got = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=8)
    text = got.choices[0].text
    assert text and got.usage is not None and got.usage.completion_tokens <= 8
    cut = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=8, stop=text[2])
    assert cut.usage is not None and cut.usage.completion_tokens < got.usage.completion_tokens
    assert cut.choices[0].text == text[: text.index(text[2])] and cut.choices[0].finish_reason == "stop"


def test_the_key(run: Path) -> None:
    with serving(run, api_key="SECRET") as client:
        assert client.chat.completions.create(model="tuned", messages=user("x")).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="WRONG").chat.completions.create(model="tuned", messages=user("x"))
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="WRONG").models.list()


def test_requests_are_answered_together_as_they_would_be_alone(run: Path) -> None:

    config, loaded = loading.load_writer(run)
    texts = [f"{EXAM}{i}" * (1 + i % 3) for i in range(16)]
    alone = [conversation.reply(config, loaded, user(text)).text for text in texts]
    batcher, style = DynamicBatcher(loaded, 16), prompts.resolve_style(config.prompt)
    waiting = [batcher.submit(conversation.to_request(user(text), style), config) for text in texts]
    assert [one.future.result().text.strip() for one in waiting] == alone
    assert batcher.batches <= 2
    system = [{"role": "system", "content": "你是医生"}, *user("x")]
    bad, good = (batcher.submit(conversation.to_request(m, style), config) for m in (system, user(texts[0])))
    assert good.future.result().text.strip() == alone[0]
    with pytest.raises(UserError, match="no system message"):
        bad.future.result()


def test_likelihood_mode_works_against_this_server(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letters are those that transformers finds most probable."""
    import torch

    config, loaded = loading.load_writer(run)
    model, tokenizer = loaded.model, cast(Any, loaded.tokenizer)
    letters = {letter: tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in "ABCDE"}
    with torch.no_grad():
        # A model that likes to answer in letters.
        cast(Any, model).get_output_embeddings().weight[list(letters.values())] *= 8
    file = folder / "data" / "train.questions.jsonl"
    wanted: dict[str, str | None] = {}
    for question in itertools.islice(jsonl.read(file, Question), 6):
        text = prompts.prompt(question, "answer") + prompts.answer_head(question, "", "answer").rstrip()
        with torch.no_grad():
            logits = model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits[0, -1]
        best = max(question.options, key=lambda letter: float(logits[letters[letter]]))
        wanted[question.id] = best if letters[best] in logits.topk(20).indices else None
    monkeypatch.setattr(loading, "load_writer", lambda run, overrides, **options: (config, loaded))
    with serving(run) as client:
        there = [f"model.base_url={client.base_url}", "model.model_name_or_path=tuned", "prompt.style=answer",
                 "generation.mode=likelihood", "generation.answer_sets=single"]  # fmt: skip
        text_mode = predict("zeroshot_vllm", file, tmp_path / "t.jsonl", [*there, "prompt.template=none"], limit=6)
        chat_mode = predict("zeroshot_vllm", file, tmp_path / "c.jsonl", there, limit=6)
    assert {one.question_id: one.answer for one in jsonl.read(text_mode, Prediction)} == wanted
    assert len([answer for answer in wanted.values() if answer]) >= 4
    assert any(one.answer for one in jsonl.read(chat_mode, Prediction))


def test_a_watch_is_not_told_what_the_templates_stop_strings_cut_off(run: Path) -> None:
    from cmexam_tune.models.generation.streaming import RowOptions

    config, loaded = loading.load_writer(run, ["generation.max_new_tokens=60"])
    whole = DynamicBatcher(loaded, 1).submit(conversation.to_request(user("x")), config).future.result().text
    stop = whole[20:22]

    class Stopping(DynamicBatcher):
        def _decoder(self, config: Any) -> Any:
            decoder = super()._decoder(config)
            decoder.stops = (stop,)
            return decoder

    texts = list[str]()
    options = RowOptions(top=0, tell=texts.append)
    written = Stopping(loaded, 1).submit(conversation.to_request(user("x")), config, options).future.result()
    assert written.text == whole[: whole.index(stop)] and written.finish == "stop"
    assert len(set(texts)) > 3 and all(written.text.startswith(text) for text in texts)
    assert written.logprobs and all(token.start < len(written.text) for token in written.logprobs)


def test_work_stops_when_nobody_waits(run: Path) -> None:

    config, loaded = loading.load_writer(run, ["generation.max_new_tokens=1500", "generation.min_new_tokens=1500"])
    batcher = DynamicBatcher(loaded, 4)
    waiting = batcher.submit(conversation.to_request(user("x")), config)
    while not batcher.batches:
        time.sleep(0.01)
    waiting.abandon()
    assert waiting.future.result(timeout=60).completion_tokens < 1500


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_cannot_be(port: int) -> None:
    with pytest.raises(UserError, match="--port"):
        serve.listen("127.0.0.1", port)
    with serve.listen("127.0.0.1", 0) as opened, pytest.raises(UserError, match="Choose another"):
        serve.listen("127.0.0.1", opened.getsockname()[1])


def test_an_exam_question_is_asked_as_in_training() -> None:
    options = {"A": "青霉素", "B": "阿司匹林", "C": "维生素C"}
    wanted = prompts.prompt(Question("q", "下列属于抗菌药的是", options, None), "answer")
    assert conversation.in_style(EXAM, "answer") == wanted
    for other in ("你好", "A 甲\nB 乙", "感冒怎么办\nA 只有一个"):
        assert conversation.in_style(other, "answer") == other


def test_lines_become_messages() -> None:
    lines = iter(["\n", "a\n", "b\n", "\n", "\n", "/reset\n", "c\n", "/exit"])
    assert list(chat.messages_of(lines)) == ["a\nb", "/reset", "c\n/exit"]


def test_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "sys.stdin",
        io.StringIO(f"{EXAM}\n\n再说一遍\n\n{'长' * 200_000}\n\n/help\n/hepl\n/reset\n{EXAM}\n\n/quit\nnever\n"),
    )
    assert chat.main(["--run", str(run)]) is None
    printed = capsys.readouterr()
    assert "tokens, this model has 2,048 positions. Say it shorter" in printed.err
    said = printed.out.rstrip("\n").split("\n\n")
    assert len(said) == 3 and said[2] == f"{chat.HELP}\n/hepl: unknown.\n{chat.HELP}\n{said[0]}"


def test_a_message_that_cannot_be_answered_ends_no_conversation(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen-1 refuses more tokens than its `seq_length`; what was said before stays, the message does not."""
    reply, asked = conversation.reply, []

    def refuse_the_second(config: Any, loaded: Any, messages: Any) -> Any:
        asked.append([message["content"] for message in messages])
        if len(asked) == 2:
            raise UserError("beyond seq_length=8192")
        return reply(config, loaded, messages)

    monkeypatch.setattr(conversation, "reply", refuse_the_second)
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n\nthird\n\n"))
    assert chat.main(["--run", str(run)]) is None
    assert "beyond seq_length=8192" in capsys.readouterr().err
    assert [messages[-1] for messages in asked] == ["first", "second", "third"]
    assert asked[2][0] == "first" and "second" not in asked[2]


def test_prefix_runs_answer_too(folder: Path) -> None:
    run = trained(folder, "ptuning_chatglm2", "chatglm2", "tuning.num_virtual_tokens=4")
    config, loaded = loading.load_writer(run)
    first = conversation.reply(config, loaded, user(NO_EXAM))
    assert first == conversation.reply(config, loaded, user(NO_EXAM)) and first.prompt_tokens > 10
    with serving(run) as client:
        asked: Any = {"model": "tuned", "messages": user(NO_EXAM)}
        chunks = list(client.chat.completions.create(**asked, stream=True))
        got = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == got.message.content
    assert (got.message.content or "").strip() == first.text
    assert got.logprobs is not None and got.logprobs.content
    assert all(token.logprob == token.top_logprobs[0].logprob for token in got.logprobs.content)


def test_a_classifier_cannot_talk(folder: Path) -> None:
    run = trained(folder, "head_bert", "bert")
    with pytest.raises(UserError, match="writes no text"):
        loading.load_writer(run)


def test_a_model_that_an_engine_computes_is_not_served_a_second_time() -> None:
    with pytest.raises(UserError, match=r"model\.engine=vllm: vllm serves by itself"):
        serve.main(["--config", "zeroshot_qwen", "--port", "0", "model.engine=vllm"])
