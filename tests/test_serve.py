"""chat and serve: a trained run answers in the terminal and to the real OpenAI client."""

import contextlib
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from cmexam_tune import chat, prompts, serve, tiny
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.preprocess import preprocess
from cmexam_tune.train import train

SAMPLE = Path(__file__).resolve().parents[1] / "cmexam_tune" / "sample" / "cmexam"
EXAM = "下列属于抗菌药的是\nA. 青霉素\nB、阿司匹林\nC 维生素C"


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


LIMITS = serve.Limits(body=20_000, prompt_tokens=600, output_tokens=400, seconds=60)


@contextlib.contextmanager
def serving(run: Path, **more: Any) -> Iterator[openai.OpenAI]:
    config, loaded = chat.load(run)
    with serve.listen("127.0.0.1", 0) as opened:
        app = serve.application(config, loaded, "tuned", LIMITS, **more)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
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
    assert [model.id for model in client.models.list()] == ["tuned"]


def test_completion_is_what_chat_says(client: openai.OpenAI, run: Path) -> None:
    config, loaded = chat.load(run)
    expected = chat.reply(config, loaded, user(EXAM))
    got = client.chat.completions.create(model="tuned", messages=user(EXAM))
    assert got.choices[0].message.content == expected.text
    assert got.usage is not None and got.usage.prompt_tokens == expected.prompt_tokens > 10
    longer = client.chat.completions.create(model="tuned", messages=user(EXAM), max_tokens=1)
    assert longer.usage is not None and longer.usage.completion_tokens == 1
    assert longer.choices[0].finish_reason == "length"


def test_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tuned", messages=user(EXAM)).choices[0].message.content
    stream = client.chat.completions.create(model="tuned", messages=user(EXAM), stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


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
        (body(messages=[]), 400, "at least one message"),
        (body(messages=[{"role": "tool", "content": "x"}]), 400, "messages[0]"),
        (body(messages=[{"role": "assistant", "content": "x"}]), 400, "must have the role user"),
        (body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0]"),
        (body(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]), 400, "messages[0]"),
        (body(messages="x"), 400, "messages"), (body(messages=None, prompt=""), 400, "messages"),
        (body(n=2), 400, "n: only 1"), (body(logprobs=True), 400, "logprobs"), (body(tools=[{}]), 400, "tools"),
        (body(presence_penalty=1), 400, "presence_penalty"), (body(foo=1), 400, "foo: is not supported"),
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
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{client.base_url}chat/completions", sent.encode(errors="surrogateescape"))
    assert caught.value.code == status
    error = json.load(caught.value)["error"]
    assert message in error["message"] and set(error) == {"message", "type", "param", "code"}


def test_health_completions_and_stop(client: openai.OpenAI) -> None:
    with urllib.request.urlopen(str(client.base_url).replace("/v1/", "/health")) as health:
        assert json.load(health) == {"status": "ok"}
    got = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=8)
    text = got.choices[0].text
    assert text and got.usage is not None and got.usage.completion_tokens <= 8
    cut = client.completions.create(model="tuned", prompt="问题: 高血压", max_tokens=8, stop=text[2])
    assert cut.choices[0].text == text[: text.index(text[2])] and cut.choices[0].finish_reason == "stop"


def test_the_key(run: Path) -> None:
    with serving(run, api_key="SECRET") as client:
        assert client.chat.completions.create(model="tuned", messages=user("x")).choices
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="WRONG").chat.completions.create(model="tuned", messages=user("x"))


def test_requests_are_answered_together_as_they_would_be_alone(run: Path) -> None:
    from cmexam_tune.prediction.together import Together

    config, loaded = chat.load(run)
    texts = [f"{EXAM}{i}" * (1 + i % 3) for i in range(16)]
    alone = [chat.reply(config, loaded, user(text)).text for text in texts]
    together = Together(loaded, 16)
    waiting = [together.submit(chat.put(config, loaded, user(text)), config) for text in texts]
    assert [one.future.result().text.strip() for one in waiting] == alone
    assert together.batches <= 2
    system = [{"role": "system", "content": "你是医生"}, *user("x")]
    bad, good = (together.submit(chat.put(config, loaded, m), config) for m in (system, user(texts[0])))
    assert good.future.result().text.strip() == alone[0]
    with pytest.raises(UserError, match="no system message"):
        bad.future.result()


def test_work_stops_when_nobody_waits(run: Path) -> None:
    from cmexam_tune.prediction.together import Together

    config, loaded = chat.load(run, ["generation.max_new_tokens=1500", "generation.min_new_tokens=1500"])
    together = Together(loaded, 4)
    waiting = together.submit(chat.put(config, loaded, user("x")), config)
    while not together.batches:
        time.sleep(0.01)
    waiting.abandon()
    assert waiting.future.result(timeout=60).tokens < 1500


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_cannot_be(port: int) -> None:
    with pytest.raises(UserError, match="--port"):
        serve.listen("127.0.0.1", port)
    with serve.listen("127.0.0.1", 0) as opened, pytest.raises(UserError, match="Choose another"):
        serve.listen("127.0.0.1", opened.getsockname()[1])


def test_an_exam_question_is_asked_as_in_training() -> None:
    options = {"A": "青霉素", "B": "阿司匹林", "C": "维生素C"}
    wanted = prompts.prompt(Question("q", "下列属于抗菌药的是", options, None), "answer")
    assert chat._ask(EXAM, "answer") == wanted
    for other in ("你好", "A 甲\nB 乙", "感冒怎么办\nA 只有一个"):
        assert chat._ask(other, "answer") == other


def test_lines_become_messages() -> None:
    lines = iter(["\n", "a\n", "b\n", "\n", "\n", "/reset\n", "c\n", "/exit"])
    assert list(chat.messages_of(lines)) == ["a\nb", "/reset", "c\n/exit"]


def test_terminal(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{EXAM}\n\n再说一遍\n\n/help\n/reset\n{EXAM}\n\n/exit\nnever\n"))
    assert chat.main(["--run", str(run)]) is None
    said = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert len(said) == 3 and said[2] == f"{chat.HELP}\n{said[0]}"


def test_prefix_runs_answer_too(folder: Path) -> None:
    run = trained(folder, "ptuning_chatglm2", "chatglm2", "tuning.num_virtual_tokens=4")
    config, loaded = chat.load(run)
    first = chat.reply(config, loaded, user(EXAM))
    assert first == chat.reply(config, loaded, user(EXAM)) and first.prompt_tokens > 10


def test_a_classifier_cannot_talk(folder: Path) -> None:
    run = trained(folder, "head_bert", "bert")
    with pytest.raises(UserError, match="writes no text"):
        chat.load(run)
