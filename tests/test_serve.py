"""chat and serve: a trained run answers in the terminal and to the real OpenAI client."""

import io
import socket
import threading
import time
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


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[openai.OpenAI]:
    settings, loaded = chat.load(run)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(serve.application(settings, loaded, "tuned"), port=port, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    server.should_exit = True
    thread.join()


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tuned"]


def test_completion_is_what_chat_says(client: openai.OpenAI, run: Path) -> None:
    settings, loaded = chat.load(run)
    expected = chat.reply(settings, loaded, user(EXAM))
    got = client.chat.completions.create(model="tuned", messages=user(EXAM))
    assert got.choices[0].message.content == expected.text
    assert got.usage is not None and got.usage.prompt_tokens == expected.prompt_tokens > 10
    longer = client.chat.completions.create(model="tuned", messages=user(EXAM), max_tokens=1)
    assert longer.usage is not None and longer.usage.completion_tokens <= 2


def test_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tuned", messages=user(EXAM)).choices[0].message.content
    stream = client.chat.completions.create(model="tuned", messages=user(EXAM), stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"


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


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"model": "gpt-4", "messages": user("x")}, "is not served here"),
        ({"model": "tuned", "messages": []}, "at least one message"),
        ({"model": "tuned", "messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, r"messages\[0\]"),
        ({"model": "tuned", "messages": [{"role": "assistant", "content": "x"}]}, "must have the role user"),
        ({"model": "tuned", "messages": user("x"), "n": 2}, "one completion"),
        ({"model": "tuned", "messages": user("x"), "max_tokens": -1}, "max_new_tokens"),
        ({"model": "tuned", "messages": user("x"), "temperature": "hot"}, "temperature"),
    ],
)
def test_wrong_requests(client: openai.OpenAI, request_: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(**request_)


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
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{EXAM}\n\n再说一遍\n\n/reset\n{EXAM}\n\n/exit\nnever\n"))
    assert chat.main(["--run", str(run)]) is None
    said = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert len(said) == 3 and said[0] == said[2]


def test_prefix_runs_answer_too(folder: Path) -> None:
    run = trained(folder, "ptuning_chatglm2", "chatglm2", "tuning.num_virtual_tokens=4")
    settings, loaded = chat.load(run)
    first = chat.reply(settings, loaded, user(EXAM))
    assert first == chat.reply(settings, loaded, user(EXAM)) and first.prompt_tokens > 10


def test_a_classifier_cannot_talk(folder: Path) -> None:
    run = trained(folder, "head_bert", "bert")
    with pytest.raises(UserError, match="writes no text"):
        chat.load(run)
