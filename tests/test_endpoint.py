"""A model behind an address: a real server on the loopback address that fails in every way."""

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_openai import END, KEY, Fault, Said, Script, serving, vllm
from kit import run_program

from cmexam_tune import annotate, evaluate, judge
from cmexam_tune.config import Config, ModelConfig, load_config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import ConfigError, TrainingStopped, UserError
from cmexam_tune.core.schema import Case, Prediction, Question, Turn
from cmexam_tune.models import families
from cmexam_tune.models.completion import to_prediction
from cmexam_tune.models.families import Family
from cmexam_tune.models.families.endpoint import Remote
from cmexam_tune.models.families.endpoint.client import Client
from cmexam_tune.models.families.endpoint.remote import DIALECTS
from cmexam_tune.predict import main as predict_main
from cmexam_tune.predict import predict
from cmexam_tune.prompts import PromptRequest, rounds

OPTIONS = {"A": "甲", "B": "乙", "C": "丙"}


def config(url: str, *changes: str) -> Config:
    words = [
        "model.family=endpoint", "model.model_name_or_path=m", f"model.base_url={url}", "prompt.template=auto",
        "prompt.style=cmb_answer", "generation.max_retries=2", "generation.max_new_tokens=32", *changes,
    ]  # fmt: skip
    return load_config("lora_llama", words)


def questions(count: int, **more: Any) -> list[Question]:
    return [Question(str(n), f"第{n}题", OPTIONS, "B", **more) for n in range(count)]


def asked(items: list[Question], *turns: Turn) -> list[PromptRequest]:
    return [PromptRequest(item, lambda shown: shown.stem, rounds(turns)) for item in items]


def ordered(remote: Remote, requests: list[PromptRequest]) -> list[Prediction]:
    return sorted(map(to_prediction, remote.answer(requests)), key=lambda p: int(p.question_id))


def answers(url: str, count: int, *changes: str) -> list[Prediction]:
    return ordered(Remote(config(url, *changes)), asked(questions(count)))


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
        (Fault(429, "come back", {"Retry-After": "600"}), "429: come back"),
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
            for prediction in map(to_prediction, remote.answer(asked(questions(500)))):
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
        (["model.base_url=http://h/v1#sk-Secret"], "or a fragment"),
        (["model.base_url=http://h\u200b/v1"], "model.base_url.*cannot be used"),
        ([f"model.base_url=http://{'h' * 70_000}/v1"], "model.base_url.*cannot be used"),
        (["generation.extra_body={messages: []}"], "generation.extra_body: messages is what is asked"),
        (["generation.requests_per_minute=1e-300"], "requests_per_minute: should be greater"),
        (["model.base_url=http://h:99999/v1"], "is no address"),
        (["model.api_key_env=sk-Very-Secret-123"], "must be the name of an environment variable"),
        (["model.api_key_env=NOT_SET_HERE"], "NOT_SET_HERE is not set"),
        (["model.api_key_env=sk_secret"], "variable that it names is not set"),
        (["generation.num_beams=4"], "generation.num_beams"),
        (["generation.thinking_tokens=100"], "generation.thinking_tokens: a server has no such setting"),
        (["prompt.template=nothing"], "unknown"),
    ],
)
def test_settings_that_cannot_be(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Remote(config("http://127.0.0.1:9/v1", *changes))
    assert "ecret" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["nothing://h", "http://h\u200b:1"])
def test_a_broken_proxy_is_one_message(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigError, match=r"model.base_url: .* or a proxy that the environment names"):
        Remote(config("http://h/v1"))


def test_it_cannot_be_trained() -> None:
    family: Any = Family.named("endpoint")
    with pytest.raises(ConfigError, match="only answers"):
        family.load(config("http://h/v1").model, questions(1))


def test_a_family_that_only_answers_needs_nothing_else() -> None:
    class Parrot(families.Writer):
        only_answers = True

        def open(self, model: ModelConfig, questions: Any, device: str) -> families.Loaded:
            return families.Loaded.nothing()

        def engine(self, loaded: families.Loaded, config: Config) -> Any:
            return self

    model = dataclasses.replace(config("http://h/v1").model, family="parrot")
    assert Parrot().load(model) == families.Loaded.nothing()
    with pytest.raises(ConfigError, match="family parrot only answers"):
        Parrot().load(model, questions(1))


# --- what is counted ---------------------------------------------------------------------------------------------


def test_usage() -> None:
    with serving(of(3, Fault(400, "no"))) as server:
        remote = Remote(config(server.url))
        list(remote.answer(asked(questions(10))))
    assert remote.usage.plain() == {
        "requests": 10, "prompt_tokens": 63, "completion_tokens": 27, "finish": {"error": 1, "stop": 9},
        "letters_unseen": 0,
        "models": ["m-0613"], "system_fingerprints": ["fp_1"], "errors": {"400: no": 1},
    }  # fmt: skip


def test_requests_per_minute_count_repeated_ones_too() -> None:
    with serving(of(0, Fault(500, headers={"Retry-After": "0.001"}), times=1)) as server:
        answers(server.url, 3, "generation.requests_per_minute=600")
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(gaps) == 3 and min(gaps) > 0.05  # 0.1 when sent; the first may arrive late


# --- letters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["structured_outputs", "guided_choice", "regex", "grammar"])
def test_constrained_in_the_servers_dialect(dialect: str) -> None:
    def script(body: dict[str, Any], count: int) -> Any:
        if dialect not in body:
            return "答案是B"  # an ignored field, and a model that writes an allowed text all the same
        choices = body[dialect]
        choices = choices["choice"] if dialect == "structured_outputs" else choices
        liked = ("答案是AC", "答案是B", "答案是C")
        return next(text for text in liked if re.search(rf"{text}\b", str(choices)))

    several = [dataclasses.replace(item, kind="multiple") for item in questions(3)]
    with serving(script) as server:
        remote = Remote(config(server.url, "generation.mode=constrained"))
        found = list(map(to_prediction, remote.answer(asked(questions(4)))))
        both = list(map(to_prediction, remote.answer(asked(several))))
    assert {(p.text, p.answer) for p in found} == {("答案是B", "B")} and len(found) == 4
    assert {p.answer for p in both} == {"AC"}


def test_a_grammar_of_llama_cpp() -> None:
    """GBNF as llama.cpp's grammars/README.md has it: quoted alternatives, a quotation mark behind a backslash."""
    grammar = DIALECTS["grammar"](["答案是A", ' "B"'])["grammar"]
    assert grammar == 'root ::= "答案是A" | " \\"B\\""'


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
        remote = Remote(config(server.url, "generation.mode=likelihood"))
        (found,) = map(to_prediction, remote.answer(asked(questions(1))))
    assert found.answer == letter and remote.usage.unseen == (letter is None)
    assert server.bodies[-1]["logprobs"] is True and server.bodies[-1]["top_logprobs"] == 20


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


LOCAL = "BACB"
"""What the model of the fake server holds for most probable behind 答案是, for each of four questions."""


def opinionated(prompt: str, tokens: Any) -> dict[str, float]:
    """Know the answer behind the words of the style, say A when it begins itself, E where the words are spelled oddly.

    As vLLM 0.32 did: its grammar let 答案是 be written in other tokens than any text the model had learnt from.
    """
    question = int(re.findall(r"第(\d)题", prompt)[-1])
    if prompt.endswith(("答案是", "答案:")) and not tokens:
        space = " " if prompt.endswith(":") else ""
        return {f"{space}A": -1.5, f"{space}C": -1.6, END: -5.0, "。": -3.0, space + LOCAL[question]: -0.4}
    if not prompt.endswith(("<assistant>", "题")):
        return {END: -0.1}
    return {
        "": {"A": -0.3, "B": -2.0, "C": -2.1, "答": -4.0, "答案是": -5.0},
        "答": {"案是": -0.1}, "答案是": {"C": -0.1, "A": -3.0, "B": -3.1},
    }.get("".join(tokens), {END: -0.1})  # fmt: skip


@pytest.mark.parametrize("mode", ["likelihood", "constrained"])
@pytest.mark.parametrize("template", ["auto", "none"])
@pytest.mark.parametrize("write", ["答案是{letters}。", "答案: {letters}"])
def test_letters_are_what_follows_the_forced_words(mode: str, template: str, write: str) -> None:
    words = [f"generation.mode={mode}", f"prompt.template={template}", f"prompt.write='{write}'"]
    with serving(vllm(opinionated)) as server:
        remote = Remote(config(server.url, *words))
        found = ordered(remote, asked(questions(4)))
    assert "".join(str(p.answer) for p in found) == LOCAL
    assert [p.text for p in found] == [write.partition("{")[0] + letter for letter in LOCAL]
    assert remote.usage.mode is None


def test_a_style_that_begins_with_the_letters_needs_no_words() -> None:
    def model(prompt: str, tokens: Any) -> dict[str, float]:
        return {"B": -0.1, "A": -2.0} if not tokens and prompt.endswith("<assistant>") else {END: -0.1}

    for mode in ("likelihood", "constrained"):
        with serving(vllm(model)) as server:
            (found,) = answers(server.url, 1, f"generation.mode={mode}", "prompt.write='{letters}'")
        assert found.text == found.answer == "B" and not any("continue_final_message" in b for b in server.bodies)


@pytest.mark.parametrize("how", ["ignored", "refused", "template refuses the closed one"])
def test_who_takes_forced_words(how: str) -> None:
    there = vllm(opinionated, continues=how != "ignored")

    def script(body: dict[str, Any], count: int) -> Any:
        forced = body.get("messages", [{}])[-1].get("role") == "assistant"
        if forced and how != "ignored" and ("continue_final_message" in body) == (how == "refused"):
            return Fault(400, "that is not possible")
        return there(body, count)

    with serving(script) as server:
        remote = Remote(config(server.url, "generation.mode=likelihood"))
        found = ordered(remote, asked(questions(4)))
    forced = how.startswith("template")
    assert "".join(str(p.answer) for p in found) == (LOCAL if forced else "AAAA")
    assert remote.usage.mode == (None if forced else "first-letter")


@pytest.mark.parametrize(("mode", "name"), [("likelihood", "first-letter"), ("constrained", "constrained-words")])
def test_another_way_has_another_name_on_screen_in_the_note_and_in_the_report(
    mode: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jsonl.write(tmp_path / "q.jsonl", questions(4))
    for known in (True, False):
        out, folder = tmp_path / f"{known}.jsonl", tmp_path / str(known)
        with serving(vllm(opinionated, continues=known)) as server:
            words = [f"model.base_url={server.url}", f"generation.mode={mode}", "prompt.style=cmb_answer"]
            predict("zeroshot_vllm", tmp_path / "q.jsonl", out, words)
            predict("zeroshot_vllm", tmp_path / "q.jsonl", out, words)  # once more: nothing is asked, the name stays
        evaluate.evaluate(out, tmp_path / "q.jsonl", folder)
        told, html = capfd.readouterr().err, (folder / "report.html").read_text()
        report = json.loads((folder / "report.json").read_text())
        assert report["identity"]["mode"] == (mode if known else name)
        assert (name in told) == (not known) == bool(re.search(f'"mode": ?"{name}"', html)), told
        assert ("not comparable" in told) == (not known)


# --- what a server may say ---------------------------------------------------------------------------------------


def good(**fields: Any) -> dict[str, Any]:
    """Return a good reply with other fields."""
    return {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "B"}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}, **fields,
    }  # fmt: skip


def said(content: Any, **more: Any) -> dict[str, Any]:
    return good(choices=[{"finish_reason": "stop", "message": {"role": "assistant", "content": content, **more}}])


def logs(value: Any) -> dict[str, Any]:
    return good(choices=[{"finish_reason": "stop", "message": {"content": "B"}, "logprobs": value}])


DEEP = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LIES: dict[str, Any] = {
    "number": 5, "text": "hello", "list": [], "null": None, "no choices": {}, "true": True,
    "choices text": good(choices="B"), "choices number": good(choices=5), "choices object": good(choices={"0": 1}),
    "choices null": good(choices=None), "choices [5]": good(choices=[5]), "choices [null]": good(choices=[None]),
    "choices [{}]": good(choices=[{}]), "choices [[]]": good(choices=[[]]), "choices ['B']": good(choices=["B"]),
    "message text": good(choices=[{"message": "B"}]), "message list": good(choices=[{"message": ["B"]}]),
    "message number": good(choices=[{"message": 5}]), "message {}": good(choices=[{"message": {}}]),
    "content number": said(5), "content object": said({"text": "B"}), "content true": said(True),
    "content parts": said([{"type": "text", "text": "B"}]), "content part of number": said([{"text": 5}]),
    "content [[[]]]": said([[[]]]), "content null": said(None), "thought is a list": said("B", reasoning=["A"]),
    "half a surrogate pair": said("B\ud800"), "halves in thought": said("B", reasoning_content="\udfffA"),
    "usage number": good(usage=5), "usage texts": good(usage={"prompt_tokens": "1", "completion_tokens": []}),
    "usage huge": good(usage={"prompt_tokens": 10**30, "completion_tokens": -1}),
    "model list": good(model=["m"]), "model number": good(model=5), "model long": good(model="m" * 5_000_000),
    "fingerprint object": good(system_fingerprint={"a": 1}), "finish list": good(choices=[
        {"finish_reason": ["stop"], "message": {"content": "B"}}]),
    "logprobs text": logs("B"), "logprobs list": logs([1]), "logprobs of texts": logs({"content": "BBB"}),
    "logprobs without numbers": logs({"content": [{"token": "B", "logprob": "x", "top_logprobs": []}]}),
    "logprobs of infinity": logs({"content": [{"token": "B", "logprob": -1e999, "top_logprobs": None}]}),
    "logprobs of a text": logs({"tokens": 1, "token_logprobs": None, "top_logprobs": [5]}),
    "deep": DEEP, "deep below": b"[" * 900 + b"]" * 900, "digits": b'{"choices": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"choices": "\xff"}', "UTF-16": '{"choices": []}'.encode("utf-16"), "nothing": b"", "html": b"<p>",
    "NaN": b'{"choices": [NaN]}', "cut": json.dumps(good()).encode()[:-9],
}  # fmt: skip


def lying(victim: str, lie: Fault) -> Script:
    """Return a script that lies where the victim's words are, and is honest to all others."""

    def script(body: dict[str, Any], count: int) -> Any:
        tops = [{"B": -0.1, "A": -2.0}] if body.get("logprobs") else None
        return lie if victim in body["messages"][0]["content"] else Said("答案是B", logprobs=tops)

    return script


def served(*words: str) -> int:
    """Call predict as its command does and return its exit status."""
    with pytest.raises(SystemExit) as end:
        cli.run(predict_main, ["--config", "zeroshot_vllm", "--questions", "q.jsonl", "--out", "p.jsonl", *words])
    return end.value.code  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "generate") for name in LIES] + [(name, "likelihood") for name in LIES if "log" in name or "[" in name],
)
def test_a_lie_is_one_message_or_one_failed_question(name: str, mode: str) -> None:
    lie = Fault(200, raw=LIES[name] if isinstance(LIES[name], bytes) else json.dumps(LIES[name]).encode())
    settings = [f"generation.mode={mode}", "generation.max_retries=0"]
    with serving(lying("第2题", lie)) as server:
        found = answers(server.url, 4, *settings)
    assert [p.answer for p in found[:2] + found[3:]] == ["B"] * 3
    assert bool(found[2].reason) == (found[2].finish == "error")
    with serving(lying("第", lie)) as server, contextlib.suppress(UserError):
        answers(server.url, 4, *settings)


@pytest.mark.parametrize(("failing", "status"), [(0, 0), (1, 1), (7, 1)])
def test_the_exit_status_says_that_questions_are_left(
    failing: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl.write("q.jsonl", questions(8))
    victims = {f"第{number}题" for number in range(1, failing + 1)}

    def script(body: dict[str, Any], count: int) -> Any:
        return Fault(400) if any(name in body["messages"][0]["content"] for name in victims) else "答案是B"

    with serving(script) as server:
        assert served(f"model.base_url={server.url}", "generation.max_retries=0") == status
        victims.clear()
        assert served(f"model.base_url={server.url}", "generation.max_retries=0") == 0


def test_lies_end_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl.write("q.jsonl", questions(2 * len(LIES)))
    lies = [lie if isinstance(lie, bytes) else json.dumps(lie).encode() for lie in LIES.values()]

    def script(body: dict[str, Any], count: int) -> Any:
        question = int(re.findall(r"第(\d+)题", body["messages"][0]["content"])[0])
        return Fault(200, raw=lies[question // 2]) if question % 2 else "答案是B"

    with serving(script) as server:
        assert served(f"model.base_url={server.url}", "generation.max_retries=0") == 1
    found = list(jsonl.read("p.jsonl", Prediction))
    assert [p for p in found[::2] if p.answer != "B"] == [] and len(found) == 2 * len(LIES)
    failed = sum(p.finish == "error" for p in found)
    result = json.loads(Path("p.jsonl.meta.json").read_text())["result"]
    assert failed > 30 and result["failed"] == failed and result["answered"] == len(found) - failed


@pytest.mark.parametrize("program", [annotate, judge])
def test_lies_end_no_judge_and_no_annotator(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl.write("q.jsonl", questions(20))
    jsonl.write("c.cases.jsonl", [Case(str(n), "", "病史。", (Turn("诊断？", "炎。"),)) for n in range(100)])
    jsonl.write("p.jsonl", [Prediction(f"{n}:1", f"答{n}") for n in range(100)])
    lies = [lie if isinstance(lie, bytes) else json.dumps(lie).encode() for lie in LIES.values()]
    with serving(lambda body, n: Fault(200, raw=lies[n // 2 % len(lies)]) if n % 2 else "不符合") as server:
        words = ["--config", "zeroshot_vllm", f"model.base_url={server.url}", "generation.max_retries=0"]
        if program is judge:
            words += ["--predictions", "p.jsonl", "--cases", "c.cases.jsonl", "--out", "judged"]
        else:
            words += ["--questions", "q.jsonl", "--out", "a.jsonl"]
        with pytest.raises(SystemExit):
            cli.run(program.main, words)
    assert len(server.bodies) >= 100


def drip() -> Any:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    while True:
        time.sleep(0.05)
        yield b" "


def endless_headers() -> Any:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        time.sleep(0.05)
        yield b"X: y\r\n"


def endless() -> Any:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    while True:
        yield b" " * 65536


@functools.cache
def _zipped(times: int) -> bytes:
    body = b"\0" * (200 << 20)
    for _ in range(times):
        body = gzip.compress(body, 1)
    encoding = ", ".join(["gzip"] * times)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def zipped() -> list[bytes]:
    """Send 200 MiB of nothing, compressed."""
    return [_zipped(1)]


def zipped_twice() -> list[bytes]:
    """Send them compressed again."""
    return [_zipped(2)]


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (drip, "no answer within generation.timeout=2 s"), (endless_headers, "no answer within generation.timeout=2 s"),
        (endless, "larger than 8 MiB"), (zipped, "larger than 8 MiB"),
        (zipped_twice, "compressed more than once"),
    ],
)  # fmt: skip
def test_a_reply_has_an_end(wire: Callable[[], Any], reason: str) -> None:
    next(iter(wire()))  # compressing takes its time
    with serving(of(2, Fault(wire=wire))) as server:
        start = time.monotonic()
        found = answers(server.url, 4, "generation.timeout=2", "generation.max_retries=0")
    assert [p.finish for p in found] == ["stop", "stop", "error", "stop"] and reason in str(found[2].reason)
    assert time.monotonic() - start < 15


SPLIT = f"{KEY[:9]}\n{KEY[9:]}"
ECHOES: dict[str, Any] = {
    "model": good(model=KEY), "fingerprint": good(system_fingerprint=f"fp {KEY}"), "text": said(f"B {KEY}"),
    "text in two lines": said(f"B {SPLIT}"), "unseen": said(f"{KEY[:9]}\u200b\0{KEY[9:]}"),
    "thought": said("B", reasoning_content=KEY),
    "thought of vLLM": said("B", reasoning=KEY),
    "parts": said([{"type": "text", "text": KEY[:9]}, {"type": "text", "text": KEY[9:]}]),
    "finish": good(choices=[{"finish_reason": KEY, "message": {"content": "B"}}]), "names": {KEY: KEY, **good(id=KEY)},
    "escaped": json.dumps(said("B @")).replace("@", "".join(f"\\u{ord(c):04x}" for c in KEY)).encode(),
    "error": Fault(400, f"bad key {KEY}"), "error cut": Fault(400, "x" * 285 + KEY), "error split": Fault(400, SPLIT),
    "error 500": Fault(500, KEY), "plain error": Fault(400, raw=f"<p>{KEY}</p>".encode()),
    "plain error cut": Fault(500, raw=b"x" * 285 + KEY.encode()),
    "other error": Fault(400, raw=json.dumps({"k": [KEY]}).encode()),
    "detail": Fault(422, raw=json.dumps({"detail": [{"msg": SPLIT}]}).encode()), "401": Fault(401, "x" * 285 + KEY),
    "403": Fault(403, SPLIT), "404": Fault(404, raw=json.dumps([KEY]).encode()),
    "429": Fault(429, KEY, {"Retry-After": "0.01"}),
    "redirect": Fault(307, headers={"Location": f"http://127.0.0.1:9/{KEY}"}),
    "redirect query": Fault(308, headers={"Location": f"/v1?key={KEY}"}),
    "header": Fault(400, headers={"X-Key": KEY}), "no JSON": Fault(200, raw=KEY.encode()),
    "status line": Fault(wire=lambda: [f"HTTP/9 {KEY}\r\n\r\n".encode()]),
    "reason phrase": Fault(wire=lambda: [f"HTTP/1.1 400 {KEY}\r\nContent-Length: 0\r\n\r\n".encode()]),
    "bad header": Fault(wire=lambda: [f"HTTP/1.1 200 OK\r\n {KEY}\r\n: {KEY}\r\n\r\n".encode()]),
    "encoding": Fault(200, headers={"Content-Encoding": KEY}, raw=b"{}"),
    "token": good(choices=[{"message": {"content": KEY}, "logprobs": {"content": [{"token": KEY, "logprob": -1}]}}]),
    "refusal": said(None, refusal=KEY), "tool call": said("B", tool_calls=[{"function": {"name": KEY}}]),
    "second choice": good(choices=[*good()["choices"], {"message": {"content": KEY}}]),
    "usage": good(usage={KEY: 1, "prompt_tokens": KEY}), "cookie": Fault(403, headers={"Set-Cookie": f"k={KEY}"}),
    "request id": Fault(500, headers={"x-request-id": KEY}), "type and code": Fault(
        400, raw=json.dumps({"error": {"message": None, "type": KEY, "code": KEY, "param": KEY}}).encode()),
    "list of errors": Fault(400, raw=json.dumps([{"error": {"message": f"x {SPLIT}"}}]).encode()),
    "no JSON cut": Fault(200, raw=b"x" * 285 + KEY.encode()), "wait": Fault(429, headers={"Retry-After": KEY}),
    "no UTF-8": Fault(400, raw=b"\xff" + KEY.encode() + b"\xff"), "host": Fault(
        307, headers={"Location": f"http://{KEY}@127.0.0.1:9/v1"}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "generate") for name in ECHOES]
    + [(name, mode) for name in ("text", "parts", "token", "error cut") for mode in ("likelihood", "constrained")],
)
def test_the_key_reaches_no_file_and_no_screen(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    echo = ECHOES[name]
    echo = json.dumps(echo).encode() if isinstance(echo, dict) else echo
    lie = Fault(200, raw=echo) if isinstance(echo, bytes) else echo
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", KEY)
    jsonl.write("q.jsonl", questions(4))
    for victim in ("第2题", "第"):
        with serving(lying(victim, lie)) as server:
            words = [f"model.base_url={server.url}", "model.api_key_env=MY_KEY", f"generation.mode={mode}"]
            assert served(*words, "generation.max_retries=0", "--overwrite") in (0, 1, 2)
        assert any(KEY in headers["authorization"] for headers in server.headers)
        screen = "".join(capfd.readouterr())
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode()
        for shown in (screen, kept):
            # Neither whole nor broken, and of a cut one no half either.
            assert KEY[:9] not in re.sub(r"\s|\\n|\\u0000|\0|\u200b", "", shown), shown


@pytest.mark.parametrize(
    "setting",
    ["model.base_url=http://h/KEY/v1", "model.model_name_or_path=KEY", "generation.extra_body={api_key: KEY}"],
)
def test_a_key_in_another_setting_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with pytest.raises(ConfigError, match="holds the key") as caught:
        Remote(config("http://127.0.0.1:9/v1", "model.api_key_env=MY_KEY", setting.replace("KEY", KEY)))
    assert KEY not in str(caught.value)


def test_questions_go_to_another_address_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with serving(lambda body, count: "B") as other:
        away = Fault(307, headers={"Location": f"{other.url.replace('127.0.0.1', 'localhost')}/chat/completions"})
        with serving(lambda body, count: away) as server:
            with pytest.raises(UserError, match=r"sends its clients on to http://localhost.*model\.follow_redirects"):
                answers(server.url, 3, "model.api_key_env=MY_KEY")
            assert not other.bodies and len(server.bodies) == 1
            found = answers(server.url, 3, "model.api_key_env=MY_KEY", "model.follow_redirects=true")
    assert [p.answer for p in found] == ["B"] * 3 and len(other.bodies) == 3
    assert KEY not in str(other.headers)


# --- the whole program -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
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
    assert f"{count} questions asked" in done.stderr and "answered by served-model-0613" in done.stderr


def test_an_interrupt_ends_at_once_and_keeps_what_came(tmp_path: Path) -> None:
    jsonl.write(tmp_path / "q.jsonl", questions(60))
    words = ["--config", "zeroshot_vllm", "--questions", "q.jsonl", "--out", "p.jsonl", "generation.concurrency=4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    stuck = threading.Event()

    def script(body: dict[str, Any], count: int) -> str:
        if count >= 20:
            stuck.wait(60)
        return "B"

    with serving(script) as server:
        command = [sys.executable, "-m", "cmexam_tune.predict", *words, f"model.base_url={server.url}"]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
            # A shell starts what runs in its background with interrupts ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while server.busy < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=10)[1]
        stuck.set()
    assert process.returncode == 130 and "interrupted" in told and "Traceback" not in told
    assert "of 60 are done and kept; the same command goes on" in told
    assert len(list(jsonl.read(tmp_path / "p.jsonl", Prediction))) == 20


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
        words += ["--config", "zeroshot_vllm", "generation.concurrency=4", f"model.base_url={server.url}"]
        command = [sys.executable, "-m", f"cmexam_tune.{program}", *words]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while len(server.bodies) < 30 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.wait()
        done = run_program(program, *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "of 60 are done already" in done.stderr
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
            yield number, {"messages": [{"role": "user", "content": str(number)}]}

    with serving(lambda body, count: "B") as server:
        settings = config(server.url)
        replies = Client(settings.model, settings.generation).send(requests())
        for _ in range(5):
            next(replies)
        replies.close()  # type: ignore[attr-defined]
    assert len(drawn) <= 5 + 2 * 16 + 1
    assert json.dumps(drawn)


def test_a_recipe_of_an_address_is_four_lines(tmp_path: Path) -> None:
    """What it does not say is the library's own: no style, length or method has to be named."""
    jsonl.write(tmp_path / "q.jsonl", questions(3))
    with serving(lambda body, count: "答案: B") as server:
        model = f"model:\n  family: endpoint\n  base_url: {server.url}\n  model_name_or_path: m\n"
        (tmp_path / "mine.yaml").write_text(model, encoding="utf-8")
        done = predict(tmp_path / "mine.yaml", tmp_path / "q.jsonl", tmp_path / "p.jsonl")
    assert [prediction.answer for prediction in jsonl.read(done, Prediction)] == ["B"] * 3
    assert json.loads(Path(f"{done}.meta.json").read_text(encoding="utf-8"))["config"]["prompt"]["style"] == "answer"
