"""A model behind an address: a real server on the loopback address that fails in every way."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from fake_openai import KEY, Fault, Said, Script, serving

from cmexam_tune.config import Config, load_config
from cmexam_tune.core import jsonl, variants
from cmexam_tune.core.errors import ConfigError, TrainingStopped, UserError
from cmexam_tune.core.schema import Case, Prediction, Question, Turn
from cmexam_tune.models.families.endpoint import Remote
from cmexam_tune.models.families.endpoint.client import Client, Request, _Pace
from cmexam_tune.predict import predict
from cmexam_tune.prompts import Asked, rounds

OPTIONS = {"A": "甲", "B": "乙", "C": "丙"}


def config(url: str, *changes: str) -> Config:
    words = [
        "model.family=endpoint", "model.model_name_or_path=m", f"model.base_url={url}", "prompt.template=auto",
        "prompt.style=cmb_answer", "generation.max_retries=2", "generation.max_new_tokens=32", *changes,
    ]  # fmt: skip
    return load_config("lora_llama", words)


def questions(count: int, **more: Any) -> list[Question]:
    return [Question(str(n), f"第{n}题", OPTIONS, "B", **more) for n in range(count)]


def asked(items: list[Question], *turns: Turn) -> list[Asked]:
    return [Asked(item, lambda shown: shown.stem, rounds(turns)) for item in items]


def answers(url: str, count: int, *changes: str) -> list[Prediction]:
    return sorted(Remote(config(url, *changes)).answer(asked(questions(count))), key=lambda p: int(p.question_id))


def of(number: int, fault: Fault, times: int = 99) -> Script:
    """Return a script that answers B, and fails `times` times for the question `number`."""
    left = [times]

    def script(body: dict[str, Any], count: int) -> Any:
        if f"第{number}题" in body["messages"][-1]["content"] and left[0]:
            left[0] -= 1
            return fault
        return "答案是B。"

    return script


def test_sixteen_at_once_and_every_question_once() -> None:
    together = threading.Barrier(16, timeout=20)

    def script(body: dict[str, Any], count: int) -> str:
        if count:  # the first goes alone; then nobody is answered before sixteen have asked
            together.wait()
        return "答案是B。"

    with serving(script) as server:
        found = answers(server.url, 97)
    assert [p.question_id for p in found] == [str(n) for n in range(97)]
    assert {(p.text, p.answer, p.finish) for p in found} == {("答案是B。", "B", "stop")}
    assert sorted(server.texts()) == sorted(f"第{n}题" for n in range(97))
    assert server.busiest == 16


def test_what_is_sent() -> None:
    changes = [
        "prompt.system=你好", "generation.do_sample=true", "generation.temperature=0.7", "generation.top_p=0.9",
        "generation.max_new_tokens=5", "generation.repetition_penalty=1.1", "generation.stop_strings=[x]",
        "generation.extra_body={reasoning_effort: low}", "generation.seed=3",
    ]  # fmt: skip
    with serving(lambda body, count: "B") as server:
        list(Remote(config(server.url, *changes)).answer(asked(questions(1), Turn("问", "答"))))
        list(Remote(config(server.url)).answer(asked(questions(1))))
        list(Remote(config(server.url, "prompt.template=bianque2")).answer(asked(questions(1), Turn("问", "答"))))
        list(Remote(config(server.url, "generation.extra_body={max_completion_tokens: 9}")).answer(asked(questions(1))))
    first, plain, wrapped, newer = server.bodies
    assert first == {
        "model": "m", "temperature": 0.7, "top_p": 0.9, "max_tokens": 5, "repetition_penalty": 1.1, "stop": ["x"],
        "reasoning_effort": "low", "seed": zlib.crc32(b"3/0"),
        "messages": [
            {"role": "system", "content": "你好"}, {"role": "user", "content": "问"},
            {"role": "assistant", "content": "答"}, {"role": "user", "content": "第0题"},
        ],
    }  # fmt: skip
    assert plain == {
        "model": "m", "temperature": 0.0, "max_tokens": 32, "messages": [{"role": "user", "content": "第0题"}],
    }  # fmt: skip
    assert wrapped["prompt"] == "病人：问\n医生：答\n病人：第0题\n医生：" and wrapped["stop"] == ["\n病人："]
    assert server.paths[2] == "/v1/completions"
    assert newer["max_completion_tokens"] == 9 and "max_tokens" not in newer


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        (Fault(429, headers={"Retry-After": "1"}), 1.0), (Fault(500), 0.3), (Fault(503), 0.3), (Fault(0), 0.3),
    ],
)  # fmt: skip
def test_what_passes_is_asked_again(fault: Fault, seconds: float) -> None:
    with serving(of(3, fault, times=1)) as server:
        start = time.monotonic()
        found = answers(server.url, 6)
    assert [p.answer for p in found] == ["B"] * 6 and len(server.bodies) == 7
    assert time.monotonic() - start >= seconds


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(400, "too many tokens"), "400: too many tokens"),
        (Fault(500, "down"), "500: down"),
        (Fault(0), "disconnected"),
        (Fault(200, raw=b"<html>"), "no completion|Expecting value"),
        (Fault(200, raw=b'{"choices": []}'), "no completion"),
    ],
)
def test_what_fails_for_good_is_said_and_the_rest_goes_on(fault: Fault, reason: str) -> None:
    with serving(of(3, fault)) as server:
        found = answers(server.url, 6, "generation.max_retries=1")
    failed = found.pop(3)
    assert [p.answer for p in found] == ["B"] * 5
    assert (failed.text, failed.answer, failed.finish) == ("", None, "error")
    import re

    assert failed.reason and re.search(reason, failed.reason), failed.reason


def test_a_filtered_or_cut_answer_and_thoughts() -> None:
    said = {
        "第0题": Said(None, "content_filter"),
        "第1题": Said("答案是", "length"),
        "第2题": Said("B", thought="A还是C"),
    }
    with serving(lambda body, count: said[body["messages"][-1]["content"]]) as server:
        held, cut, thought = answers(server.url, 3)
    assert held.finish == "error" and "content filter" in str(held.reason)
    assert (cut.finish, cut.answer) == ("length", None)
    assert thought.text == "<think>\nA还是C\n</think>\n\nB"


def test_a_slow_answer_ends_at_the_time_limit() -> None:
    def script(body: dict[str, Any], count: int) -> str:
        if "第2题" in body["messages"][-1]["content"]:
            time.sleep(1.0)
        return "B"

    with serving(script) as server:
        found = answers(server.url, 4, "generation.timeout=0.3", "generation.max_retries=0")
    assert [p.finish for p in found] == ["stop", "stop", "error", "stop"]
    assert "generation.timeout=0.3" in str(found[2].reason)


# --- what stops at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            Fault(401, f"Incorrect API key provided: {KEY}"),
            r"the key is refused \(Incorrect API key provided: \*\*\*\)",
        ),
        (Fault(403, "no access"), "the key is refused"),
        (Fault(404, "model m does not exist"), "no model 'm' there.*does not exist"),
    ],
)
def test_wrong_key_model_or_address_stops_at_the_first_request(
    fault: Fault, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with serving(lambda body, count: fault) as server, pytest.raises(UserError, match=message) as caught:
        answers(server.url, 50, "model.api_key_env=MY_KEY")
    assert len(server.bodies) == 1 and KEY not in str(caught.value)
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_nobody_there() -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*cannot be reached.*Is the server running"):
        answers("http://127.0.0.1:9/v1", 50)


def test_a_setting_that_the_server_refuses_stops_after_three() -> None:
    with serving(lambda body, count: Fault(400, "unknown field")) as server:
        with pytest.raises(UserError, match="first 3 requests failed: 400: unknown field"):
            answers(server.url, 50)
        assert len(server.bodies) == 3
        assert [p.finish for p in answers(server.url, 2)] == ["error", "error"]


def test_a_server_that_goes_down_ends_the_run_and_what_came_stays() -> None:
    got = []
    with serving(lambda body, count: "B" if count < 40 else Fault(500)) as server:
        remote = Remote(config(server.url, "generation.max_retries=0", "generation.concurrency=4"))
        with pytest.raises(TrainingStopped, match="last 8 requests failed, the last one with: 500"):
            for prediction in remote.answer(asked(questions(500))):
                got.append(prediction)
    assert len([p for p in got if p.answer]) == 40 and len(server.bodies) < 80


def test_no_key_of_another_address_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda body, count: "B") as server:
        answers(server.url, 1)
    assert KEY not in str(server.headers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.base_url=null"], "model.base_url"),
        (["model.base_url=127.0.0.1:8000"], "must start with http"),
        (["model.base_url=http://u:p@h/v1"], "holds a user, a password"),
        (["model.base_url=http://h:99999/v1"], "is no address"),
        (["model.api_key_env=sk-Very-Secret-123"], "must be the name of an environment variable"),
        (["model.api_key_env=NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["model.api_key_env=sk_secret"], "variable that it names is not set"),
        (["generation.num_beams=4"], "generation.num_beams"),
        (["prompt.template=nothing"], "unknown"),
    ],
)
def test_settings_that_cannot_be(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Remote(config("http://127.0.0.1:9/v1", *changes))
    assert "ecret" not in str(caught.value)


def test_it_cannot_be_trained() -> None:
    family: Any = variants.load("families", "endpoint")
    with pytest.raises(ConfigError, match="only answers"):
        family.load(config("http://h/v1").model, questions(1))


# --- what is counted ---------------------------------------------------------------------------------------------


def test_usage() -> None:
    with serving(of(3, Fault(400, "no"))) as server:
        remote = Remote(config(server.url))
        list(remote.answer(asked(questions(10))))
    assert remote.usage.plain() == {
        "requests": 10, "prompt_tokens": 63, "completion_tokens": 27, "finish": {"error": 1, "stop": 9},
        "models": ["m-0613"], "system_fingerprints": ["fp_1"], "errors": {"400: no": 1},
    }  # fmt: skip


def test_requests_per_minute_count_repeated_ones_too() -> None:
    with serving(of(0, Fault(500, headers={"Retry-After": "0.001"}), times=1)) as server:
        answers(server.url, 3, "generation.requests_per_minute=600")
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(gaps) == 3 and min(gaps) > 0.09


def test_pace_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = _Pace(60, lambda: now[0])
    for _ in range(3):
        pace(None)
    now[0] = 200.0
    pace(None)
    assert slept == [0.0, 1.0, 2.0, 0.0]


# --- letters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["structured_outputs", "guided_choice", "regex"])
def test_constrained_in_the_servers_dialect(dialect: str) -> None:
    def script(body: dict[str, Any], count: int) -> Any:
        if dialect not in body:
            return "我想是B"
        choices = body[dialect]
        choices = choices["choice"] if dialect == "structured_outputs" else choices
        return "答案是AC" if "AC" in str(choices) else "答案是B"

    several = [dataclasses.replace(item, kind="multiple") for item in questions(3)]
    with serving(script) as server:
        remote = Remote(config(server.url, "generation.mode=constrained"))
        found = list(remote.answer(asked(questions(4))))
        both = list(remote.answer(asked(several)))
    assert {(p.text, p.answer) for p in found} == {("答案是B", "B")} and len(found) == 4
    assert {p.answer for p in both} == {"AC"}


@pytest.mark.parametrize("answer", ["我想是B", Fault(400, "unknown field")])
def test_constrained_is_refused_where_it_is_not_offered(answer: Any) -> None:
    with (
        serving(lambda body, count: answer) as server,
        pytest.raises(UserError, match="needs a server that writes only"),
    ):
        answers(server.url, 5, "generation.mode=constrained")


@pytest.mark.parametrize(
    ("tops", "letter"),
    [
        ([{"A": -0.5, "B": -1.0}], "A"),
        ([{"答案": -0.1, "A": -5.0}, {"是": -0.1}, {"C": -0.4, "A": -1.2}], "C"),
        ([{" B": -0.2, "A": -1.0}], "B"),
        ([{"我": -0.2, "C": -3.0, "A": -4.0}], "C"),
        ([{"我": -0.2}, {"想": -0.1}], None),
    ],
)
def test_likelihood_takes_the_most_probable_letter(tops: list[dict[str, float]], letter: str | None) -> None:
    with serving(lambda body, count: Said("x", logprobs=tops)) as server:
        (found,) = answers(server.url, 1, "generation.mode=likelihood")
    assert found.answer == letter
    assert server.bodies[0]["logprobs"] is True and server.bodies[0]["top_logprobs"] == 20


def test_likelihood_of_a_text_model_asks_behind_the_answers_first_words() -> None:
    with serving(lambda body, count: Said("B", logprobs=[{"B": -0.2, "A": -1.0}])) as server:
        (found,) = answers(server.url, 1, "generation.mode=likelihood", "prompt.template=none")
    assert found.answer == "B" and server.bodies[0]["prompt"] == "第0题答案是" and server.bodies[0]["max_tokens"] == 1


def test_likelihood_is_refused_where_it_is_not_offered() -> None:
    with serving(lambda body, count: "B") as server:
        with pytest.raises(UserError, match="needs log-probabilities, and the server sends none"):
            answers(server.url, 5, "generation.mode=likelihood")
        with pytest.raises(ConfigError, match="5 questions may have several"):
            answers(server.url, 5, "generation.mode=likelihood", "generation.answer_sets=multiple")
        with pytest.raises(ConfigError, match="cannot be normalised"):
            answers(server.url, 5, "generation.mode=likelihood", "generation.prior_normalization=true")


# --- the whole program -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_lose_and_double_nothing(kills: int, tmp_path: Path) -> None:
    count = 60 + 60 * kills
    jsonl.write(tmp_path / "q.jsonl", questions(count))
    words = ["--config", "zeroshot_vllm", "--questions", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "p.jsonl")]
    command = [sys.executable, "-m", "cmexam_tune.predict", *words, "generation.concurrency=4"]
    with serving(lambda body, n: "B", delay=0.02) as server:
        command.append(f"model.base_url={server.url}")
        for _ in range(kills):
            before = len(server.bodies)
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + 60
            while len(server.bodies) < before + 40 and time.monotonic() < deadline:
                time.sleep(0.005)
            process.kill()
            process.wait()
        traced = [command[0], "-X", "importtime", *command[1:]]
        done = subprocess.run(traced, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE), "seconds for nothing"
        # What is asked twice is at most what was under way at a kill.
        assert count <= len(server.bodies) <= count + kills * 2 * 4
    found = [one.question_id for one in jsonl.read(tmp_path / "p.jsonl", Prediction)]
    assert found == [str(n) for n in range(count)]
    assert f"{count} predictions" in done.stderr and "answered by served-model-0613" in done.stderr


@pytest.mark.parametrize("program", ["judge", "annotate"])
def test_a_killed_judge_or_annotator_asks_nothing_twice(program: str, tmp_path: Path) -> None:
    jsonl.write(tmp_path / "q.jsonl", questions(12))
    jsonl.write(tmp_path / "c.cases.jsonl", [Case(str(n), "", "病史。", (Turn("诊断？", "炎。"),)) for n in range(60)])
    jsonl.write(tmp_path / "p.jsonl", [Prediction(f"{n}:1", f"答{n}") for n in range(60)])
    words = {
        "judge": ["--predictions", "p.jsonl", "--cases", "c.cases.jsonl", "--out", "judged"],
        "annotate": ["--questions", "q.jsonl", "--out", "a.jsonl"],
    }[program]
    scores = '{"fluency": 1, "relevance": 2, "completeness": 3, "proficiency": 4}'
    with serving(lambda body, n: scores if program == "judge" else "不符合", delay=0.02) as server:
        command = [
            sys.executable, "-m", f"cmexam_tune.{program}", *words, "--config", "zeroshot_vllm",
            "generation.concurrency=4", f"model.base_url={server.url}",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while len(server.bodies) < 30 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.wait()
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "of 60 are answered already" in done.stderr
        # What is asked twice is at most what was under way at the kill.
        assert 60 <= len(server.bodies) <= 60 + 2 * 4


def test_votes_and_examples_and_a_restart_in_the_middle(tmp_path: Path) -> None:
    jsonl.write(tmp_path / "q.jsonl", questions(3, facets={"exam_class": "c"}))
    pool = [dataclasses.replace(one, id=f"v{one.id}", stem=f"例{one.id}") for one in questions(4)]
    jsonl.write(tmp_path / "v.jsonl", [dataclasses.replace(one, facets={"exam_class": "c"}) for one in pool])
    down = [True]

    def script(body: dict[str, Any], count: int) -> Any:
        if down[0] and count >= 10:
            return Fault(400, "down")
        return "答案是A。" if body["seed"] % 3 else "答案是B。"

    words = [
        "prompt.shots=3", f"prompt.shots_from={tmp_path}/v.jsonl", "generation.votes=5", "generation.do_sample=true",
        "generation.temperature=0.7", "generation.seed=7",
    ]  # fmt: skip
    with serving(script) as server:
        out = predict(
            "zeroshot_vllm", tmp_path / "q.jsonl", tmp_path / "p.jsonl", [f"model.base_url={server.url}", *words]
        )
        first = len(server.bodies)
        down[0] = False
        predict("zeroshot_vllm", tmp_path / "q.jsonl", out, [f"model.base_url={server.url}", *words])
        assert (first, len(server.bodies)) == (15, 20)
    found = list(jsonl.read(out, Prediction))
    assert [len(one.votes) for one in found] == [5, 5, 5] and {one.finish for one in found} == {"stop"}
    for one in found:
        seeds = [zlib.crc32(f"7/{one.question_id}#{n}".encode()) for n in range(5)]
        assert one.answer == ("A" if sum(bool(seed % 3) for seed in seeds) > 2 else "B")
    body = server.bodies[0]
    assert len(body["messages"]) == 7 and body["messages"][0]["content"].count("例") == 1
    served = json.loads(Path(f"{out}.meta.json").read_text())["result"]["served"]
    assert [start["requests"] for start in served] == [15, 5]


# --- the house ---------------------------------------------------------------------------------------------------


def test_it_loads_no_torch() -> None:
    code = "import sys, cmexam_tune.models.families.endpoint as e; e.client; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_requests_are_not_drawn_ahead_of_need() -> None:
    drawn = []

    def requests() -> Any:
        for number in range(1000):
            drawn.append(number)
            yield Request(str(number), {"messages": [{"role": "user", "content": str(number)}]})

    with serving(lambda body, count: "B") as server:
        settings = config(server.url)
        replies = Client(settings.model, settings.generation).send(requests())
        for _ in range(5):
            next(replies)
        replies.close()  # type: ignore[attr-defined]
    assert len(drawn) <= 5 + 2 * 16 + 1
    assert json.dumps(drawn)
