"""`model.engine`: answers are those of the model in this process, and no server outlives who started it."""

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_programs
import pytest
from fake_openai import Server, serving
from kit import make_config, questions

from cmexam_tune import config as configs
from cmexam_tune import prompts
from cmexam_tune.__main__ import main
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Prediction

pytest.importorskip("torch")
import fake_vllm

from cmexam_tune.inference import conversation, loading
from cmexam_tune.models import Loaded, engines, families
from cmexam_tune.models.completion import Completion
from cmexam_tune.models.engines import launchers
from cmexam_tune.models.generation.decoder import Likelihood

FAKE = Path(__file__).with_name("fake_engine.py")
QUESTIONS = questions(7)


@pytest.fixture
def local() -> tuple[configs.Config, Loaded]:
    config = make_config(prompt__max_target_length=12)
    return config, loading.load(loading.Source(config))


def elsewhere(server: Server, config: configs.Config, loaded: Loaded, tmp_path: Path) -> tuple[configs.Config, Loaded]:
    """Return what `loading.load` returns for `model.engine: vllm`, with a server that runs already."""
    model = dataclasses.replace(config.model, engine="vllm", engine_command="true")
    served = engines.load(model, None, tmp_path / "log")
    engine: Any = served.model
    engine.server.port = int(server.url.split(":")[2].split("/")[0])
    engine.server._process = type("Running", (), {"poll": staticmethod(lambda: None)})()
    tokenizer: Any = loaded.tokenizer
    server.tokens = lambda body: tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
    return dataclasses.replace(config, model=model), served


def answers(config: configs.Config, loaded: Loaded) -> dict[str, Completion]:
    engine = families.writer(config.model.family, "test").engine(loaded, config)
    return {
        completion.request.question.id: completion
        for completion in engine.answer(prompts.default_prompts(QUESTIONS, config))
    }


MODES: list[dict[str, Any]] = [
    {"mode": "generate"},
    {"mode": "generate", "thinking_tokens": 4, "max_new_tokens": 3},
    {"mode": "constrained"},
    {"mode": "constrained", "answer_sets": "multiple"},
    {"mode": "likelihood"},
    {"mode": "likelihood", "answer_sets": "multiple", "length_normalization": True},
    {"mode": "likelihood", "prior_normalization": True},
]


@pytest.mark.parametrize("generation", MODES, ids=lambda generation: "-".join(map(str, generation.values())))
def test_answers_are_those_of_the_model_in_this_process(
    generation: dict[str, Any], local: tuple[configs.Config, Loaded], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = make_config(prompt__max_target_length=12, generation=generation)
    expected = answers(config, local[1])
    with serving(fake_vllm.script(local[1])) as server:
        told = answers(*elsewhere(server, config, local[1], tmp_path))
    assert told.keys() == expected.keys() and len(told) == len(QUESTIONS)
    for key, completion in expected.items():
        same = ("text", "finish", "letters", *(("completion_tokens",) if generation["mode"] == "generate" else ()))
        for name in same:
            assert getattr(told[key], name) == getattr(completion, name), (key, name)
    assert all(type(body["prompt"][0]) is int for body in server.bodies)
    assert "other tokens" not in capsys.readouterr().err


def test_likelihoods_are_those_of_the_model_in_this_process(
    local: tuple[configs.Config, Loaded], tmp_path: Path
) -> None:
    config = make_config(prompt__max_target_length=12, generation={"mode": "likelihood", "answer_sets": "multiple"})
    requests = prompts.default_prompts(QUESTIONS[:5], config)
    family = families.writer("llama", "test")
    decoder: Any = family.engine(local[1], config)
    expected = {item.question.id: scores for item, scores in Likelihood(decoder).scores(decoder.ask(requests))}
    with serving(fake_vllm.script(local[1])) as server:
        settings, served = elsewhere(server, config, local[1], tmp_path)
        engine: Any = family.engine(served, settings)
        told = {item.question.id: scores for item, scores in engine.scores(engine.ask(requests))}
    assert sum(map(len, expected.values())) > 150
    assert {key: pytest.approx(scores, abs=1e-5) for key, scores in expected.items()} == told


def test_a_server_that_scores_no_given_tokens(
    local: tuple[configs.Config, Loaded], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Letters come from its list of allowed texts; where it shows none among its best 20, that is counted."""
    for mode in ("constrained", "likelihood"):
        config = make_config(prompt__max_target_length=12, generation={"mode": mode, "answer_sets": "single"})
        expected = answers(config, local[1])
        with serving(fake_vllm.script(local[1], scores=False, token_ids=False)) as server:
            settings, served = elsewhere(server, config, local[1], tmp_path)
            engine: Any = families.writer("llama", "test").engine(served, settings)
            told = {
                completion.request.question.id: completion
                for completion in engine.answer(prompts.default_prompts(QUESTIONS, settings))
            }
        seen = [key for key in told if told[key].letters is not None]
        assert all(told[key].letters == expected[key].letters for key in seen)
        assert engine.usage.unseen == len(told) - len(seen) == engine.usage.plain()["letters_unseen"]
        assert mode == "likelihood" or len(seen) == len(QUESTIONS)
    assert "logprob_token_ids" in capsys.readouterr().err


def test_a_tokenizer_that_disagrees_is_told(
    local: tuple[configs.Config, Loaded], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(fake_vllm.script(local[1])) as server:
        settings, served = elsewhere(server, local[0], local[1], tmp_path)
        server.tokens = lambda body: [1, 2, 3]
        told = answers(settings, served)
    assert len(told) == len(QUESTIONS)
    assert capsys.readouterr().err.count("makes 3 other tokens of a prompt") == 1


def test_talk_with_a_served_model(local: tuple[configs.Config, Loaded], tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "你好"}]
    expected = conversation.reply(*local, turns)
    with serving(fake_vllm.script(local[1])) as server:
        assert conversation.reply(*elsewhere(server, local[0], local[1], tmp_path), turns) == expected


# --- what is refused before anything is started ----------------------------------------------------------------


def adapter(folder: Path, **values: Any) -> str:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "bias": "none", **values}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "DoRA"),
    ({"bias": "all"}, "trained biases"),
    ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    ({"peft_type": "PREFIX_TUNING"}, "no LoRA"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_adapters_that_no_server_computes(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = make_config().model
    model = dataclasses.replace(
        model, engine="vllm", engine_command="true", adapter_name_or_path=adapter(tmp_path / "a", **values)
    )
    with pytest.raises(UserError, match=words) as caught:
        engines.load(model, None, tmp_path / "log")
    assert "export --merge" in str(caught.value)


SETTINGS: list[tuple[list[str], str]] = [
    (["generation.num_beams=2"], "num_beams"),
    (["model.load_in_4bit=true"], "4 bits"),
    (["model.family=chatglm"], "cannot compute family chatglm"),
    (["model.engine=vllmm"], "vllm"),
    (["model.engine_command=", "model.engine=sglang"], "CMEXAM_TUNE_SGLANG_PYTHON"),
    (["model.engine_arguments={port: 1}"], "port"),
]


@pytest.mark.parametrize(("words", "message"), SETTINGS, ids=[message for _, message in SETTINGS])
def test_settings_that_no_server_keeps(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CMEXAM_TUNE_SGLANG_PYTHON", raising=False)
    started = tmp_path / "started"
    command = f"model.engine_command=touch {shlex.quote(str(started))}"
    with pytest.raises(UserError, match=message):
        predict(tmp_path, [command, "model.engine=vllm", *words])
    assert not started.exists() and not (tmp_path / "p.jsonl").exists()


def test_a_recipe_cannot_start_a_command(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("extends: zeroshot_qwen\nmodel: {engine_command: rm -rf /}\n")
    with pytest.raises(ConfigError, match="a file cannot ask for a command"):
        configs.load_config(tmp_path / "r.yaml")


# --- the command line of the server ------------------------------------------------------------------------------


def test_commands_hand_over_what_was_asked_for(tmp_path: Path) -> None:
    model = dataclasses.replace(
        make_config().model, engine="vllm", engine_command="serve it",
        engine_arguments={"max_model_len": 4096, "tensor_parallel_size": 2, "enforce_eager": True, "seed": None},
    )  # fmt: skip
    served = launchers.Served(model, "bfloat16", 8, tmp_path / "run", 24)
    command = launchers.VLLM().command(served, 77)
    assert command[:2] == ["serve", "it"] and "--enforce-eager" in command and "--seed" not in command
    options = dict(itertools.pairwise(command))
    expected = {
        "--model": model.model_name_or_path, "--dtype": "bfloat16", "--max-model-len": "4096", "--port": "77",
        "--data-parallel-size": "4", "--max-lora-rank": "32", "--generation-config": "vllm", "--host": "127.0.0.1",
        "--lora-modules": f"{served.adapter_name}={tmp_path / 'run'}",
    }  # fmt: skip
    assert {key: options.get(key) for key in expected} == expected
    lists = dataclasses.replace(
        served,
        model=dataclasses.replace(model, engine_arguments={"middleware": ["a", "b"], "enable_log_requests": False}),
    )
    command = launchers.VLLM().command(lists, 77)
    assert command[command.index("--middleware") :] == ["--middleware", "a", "b", "--no-enable-log-requests"]


SGLANG: dict[str, dict[str, Any]] = {
    "--model-path": {"required": True},
    "--served-model-name": {},
    "--dtype": {"choices": ("auto", "half", "float16", "bfloat16", "float", "float32")},
    "--sampling-defaults": {"choices": ("openai", "model")},
    "--revision": {},
    "--trust-remote-code": {"action": "store_true"},
    "--json-model-override-args": {"type": json.loads},
    "--dp-size": {"type": int, "default": 1},
    "--tp-size": {"type": int, "default": 1},
    "--tensor-parallel-size": {"type": int, "dest": "tp_size"},
    "--pp-size": {"type": int, "default": 1},
    "--enable-lora": {"action": "store_true"},
    "--lora-paths": {"nargs": "*"},
    "--lora-target-modules": {"nargs": "*"},
    "--max-lora-rank": {"type": int},
    "--disable-radix-cache": {"action": "store_true"},
    "--host": {},
    "--port": {"type": int},
}
"""Options as SGLang 0.5.23 reads them (sglang/srt/arg_groups/fields, arg_utils.py): no flag has a twin with `no-`."""


@pytest.mark.parametrize(
    ("arguments", "copies"),
    [
        ({}, 8),
        ({"tp_size": 4}, 2),
        ({"tensor_parallel_size": 4}, 2),
        ({"tp_size": 2, "pp_size": 2}, 2),
        ({"tp_size": 8, "disable_radix_cache": False, "lora_target_modules": ["q_proj", "v_proj"]}, 1),
    ],
)
def test_sglang_reads_its_command(arguments: dict[str, Any], copies: int, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag, reading in SGLANG.items():
        parser.add_argument(flag, **reading)
    model = dataclasses.replace(
        make_config().model, engine="sglang", engine_command="serve", engine_arguments=arguments, revision="main",
        trust_remote_code=True, config={"rope_theta": 1e6},
    )  # fmt: skip
    served = launchers.Served(model, "bfloat16", 8, tmp_path / "run", 24)
    read = vars(parser.parse_args(launchers.SGLang().command(served, 77)[1:]))
    assert read["dp_size"] == copies and read["tp_size"] * read["pp_size"] * copies == 8
    expected = {
        "model_path": model.model_name_or_path, "dtype": "bfloat16", "revision": "main", "trust_remote_code": True,
        "json_model_override_args": {"rope_theta": 1e6}, "max_lora_rank": 24, "sampling_defaults": "openai",
        "lora_paths": [f"{served.adapter_name}={tmp_path / 'run'}"], "enable_lora": True, "port": 77,
        "lora_target_modules": arguments.get("lora_target_modules"), "disable_radix_cache": False,
    }  # fmt: skip
    assert {name: read[name] for name in expected} == expected
    # `base:adapter` is how its protocol asks for an adapter (entrypoints/openai/serving_base.py).
    assert launchers.SGLang().model_name(served) == f"{served.name}:{served.adapter_name}"


# --- the child ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if (tmp_path / "pids").exists():
        assert ended(pids(tmp_path)), "a server is left"


def predict(folder: Path, words: list[str]) -> int | None:
    return main(command(folder, words))


def command(folder: Path, words: list[str], count: int = 60) -> list[str]:
    if not (folder / "q.jsonl").exists():
        jsonl.write(folder / "q.jsonl", questions(count))
        (folder / "r.yaml").write_text(configs.dump_config(make_config(generation={"concurrency": 2})))
    files = [
        "--config",
        str(folder / "r.yaml"),
        "--questions",
        str(folder / "q.jsonl"),
        "--out",
        str(folder / "p.jsonl"),
    ]
    return ["predict", *files, *words]


def fake(folder: Path) -> list[str]:
    words = [sys.executable, str(FAKE), str(folder)]
    return ["model.engine=vllm", f"model.engine_command={shlex.join(words)}"]


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.005)
    return reached()


def ended(pids: list[int], seconds: float = 20) -> bool:
    """Whether processes end in time."""
    return wait_until(lambda: not any(map(is_running, pids)), seconds)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


def test_a_prediction_starts_and_ends_its_server(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict(folder, fake(folder))
    predictions = list(jsonl.read(folder / "p.jsonl", Prediction))
    assert [p.answer for p in predictions] == ["A"] * 60 and asked(folder) == 60
    result = json.loads((folder / "p.jsonl.meta.json").read_text())["result"]
    engine = {key: result["decoding"][key] for key in ("engine", "engine_version", "dtype", "batch_invariant")}
    assert engine == {"engine": "vllm", "engine_version": "0.0.fake", "dtype": "float32", "batch_invariant": False}
    assert "vllm starts; what it says is in" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"other model\.engine"):
        main(command(folder, []))
    predict(folder, [*fake(folder), "model.engine_command=false"])  # nothing is left to start it for


def test_a_row_is_reproduced_by_an_engine(folder: Path) -> None:
    """What a file cannot ask for is said again to each step."""
    command(folder, [], 2)
    (folder / "r.yaml").rename(folder / "zeroshot_own.yaml")
    (folder / "q.jsonl").rename(folder / "test.questions.jsonl")
    words = [str(folder / "zeroshot_own.yaml"), "--data", str(folder), "--out", str(folder / "out")]
    main(["reproduce", *words, *fake(folder), "model.engine_arguments={seed: 1}"])
    answers = jsonl.read(folder / "out" / "zeroshot_own" / "seed1" / "predictions.jsonl", Prediction)
    assert [p.answer for p in answers] == ["A", "A"] and (folder / "out" / "comparison.md").exists()


def test_a_server_that_cannot_start(folder: Path) -> None:
    (folder / "broken").touch()
    with pytest.raises(UserError, match="no cards here") as caught:
        predict(folder, fake(folder))
    assert "p.jsonl.engine.log" in str(caught.value) and not (folder / "p.jsonl").exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for processes in /proc")
def test_kills_leave_no_server_and_lose_and_double_nothing(folder: Path) -> None:
    words = command(folder, fake(folder))[1:]

    def answered_ten_more() -> forked_programs.Program:
        most = asked(folder) + 10
        (folder / "most").write_text(str(most))
        program = forked_programs.Program("predict", words)
        assert wait_until(lambda: asked(folder) == most, 300)
        return program

    answered_ten_more().kill()
    assert ended(pids(folder)), "killed predict"
    program = answered_ten_more()
    os.kill(pids(folder)[0], signal.SIGKILL)
    status, _, said = program.wait()
    assert status == 1 and "vllm 0.0.fake has ended. What was answered is kept" in said, said
    assert ended(pids(folder)), "killed server"
    program = answered_ten_more()
    os.kill(pids(folder)[0], signal.SIGKILL)
    program.kill()
    assert ended(pids(folder)), "both"
    (folder / "most").unlink()
    predict(folder, fake(folder))
    predictions = [p.question_id for p in jsonl.read(folder / "p.jsonl", Prediction)]
    assert predictions == [q.id for q in questions(60)]
    assert 60 <= asked(folder) <= 60 + 3 * 2 * 2 + 2, "asked twice is at most what was under way at a kill"
