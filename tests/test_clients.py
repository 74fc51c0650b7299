"""Clients and harnesses as their users run them, each in an environment of its own, against `cmexam-tune serve`; and
the validator of Every Eval Ever on what we seal.

The environments are made where the package index can be reached; CMEXAM_TUNE_CLIENTS names the folder that keeps them.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_sealed
from test_own_server import call, served, train

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.interop.sealing import sealed_folder

pytestmark = pytest.mark.slow
HOME = Path(os.environ.get("CMEXAM_TUNE_CLIENTS", Path(tempfile.gettempdir()) / "cmexam_tune_clients"))
PACKAGES = {
    "openai": ("openai", "langchain-openai"),
    "litellm": ("litellm",),
    "lmeval": ("lm-eval[api]", "transformers"),
    "evalscope": ("evalscope",),
    "opencompass": ("opencompass", "pyarrow<19"),  # its numpy<2
    "inspect": ("inspect_ai", "openai"),
    "every_eval_ever": ("every-eval-ever==0.3.0",),
}
"""Environment -> what is installed there: litellm and inspect_ai want different releases of openai."""
COUNT = 4


def environment(name: str, python: str = sys.executable) -> Path:
    """Return the folder of an environment's programs, made if it is not there."""
    programs, done = HOME / f"env-{name}" / "bin", HOME / f"env-{name}" / "installed"
    if not done.is_file():
        made = subprocess.run([python, "-m", "venv", programs.parent], capture_output=True, text=True)
        if not made.returncode:
            install = [programs / "python", "-m", "pip", "install", "--quiet", *PACKAGES[name]]
            made = subprocess.run(install, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(
                f"{', '.join(PACKAGES[name])} cannot be installed: {made.stderr.strip().splitlines()[-1][:200]}"
            )
        done.touch()
    return programs


def run(folder: Path, *words: str | Path, **variables: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # fmt: skip # noqa: E501
    values = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | offline | variables
    done = subprocess.run([*map(str, words)], cwd=folder, env=values, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def likes_letters(model: Path) -> None:
    """Make letters probable: of a server's most probable tokens only 20 are seen."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    weights: Any = AutoModelForCausalLM.from_pretrained(model)
    letters = [tokenizer(letter, add_special_tokens=False)["input_ids"][-1] for letter in "ABCDE"]
    with torch.no_grad():
        weights.get_output_embeddings().weight[letters] *= 8
    weights.save_pretrained(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clients")
    train(made)
    likes_letters(made / "tiny")
    exam = [one for one in jsonl.read(made / "data" / "train.questions.jsonl", Question) if len(one.answer or "") == 1]
    jsonl.write(made / "q.questions.jsonl", exam[:COUNT])
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


def asked(folder: Path) -> list[Question]:
    return list(jsonl.read(folder / "q.questions.jsonl", Question))


OPENAI = """
import asyncio, sys, openai
base, model = sys.argv[1:]
client = openai.OpenAI(base_url=base, max_retries=0)
ask = dict(model=model, messages=[{"role": "user", "content": "感冒怎么办？"}], max_tokens=8)
whole = client.chat.completions.create(**ask, seed=1)
text = whole.choices[0].message.content
stream = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text
assert stream[-1].usage == whole.usage and client.models.retrieve(model).id == client.models.list().data[0].id
assert len(client.chat.completions.create(**ask, n=2, temperature=1.0, store=True, metadata={"a": "b"}).choices) == 2
logs = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices[0].logprobs.content
assert len(logs[0].top_logprobs) == 3
echo = client.completions.create(model=model, prompt=[[1, 2, 3]], max_tokens=1, echo=True, logprobs=1).choices[0]
assert len(echo.logprobs.tokens) >= 3 and echo.logprobs.token_logprobs[0] is None
try:
    client.chat.completions.create(**{**ask, "model": "other"})
    raise SystemExit("another model answered")
except openai.NotFoundError as error:
    assert "not served here" in error.body["message"]
async def many():
    client = openai.AsyncOpenAI(base_url=base, max_retries=0)
    return await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(8)))
assert {one.choices[0].message.content for one in asyncio.run(many())} == {text}
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI, OpenAI
base, model = sys.argv[1:]
common = dict(base_url=base, model=model, max_tokens=8, temperature=0, max_retries=0)
chat = ChatOpenAI(**common, seed=3)
text = chat.invoke("感冒怎么办？").content
assert "".join(part.content for part in chat.stream("感冒怎么办？")) == text
assert [one.content for one in chat.batch(["感冒怎么办？"] * 2)] == [text] * 2
assert chat.bind(logprobs=True).invoke("感冒怎么办？").response_metadata["logprobs"]["content"]
assert all(OpenAI(**common).batch(["问题", "答案"]))
"""
LITELLM = """
import sys, litellm
base, model = sys.argv[1:]
common = dict(api_base=base, api_key="any", max_tokens=8)
ask = dict(model=f"openai/{model}", messages=[{"role": "user", "content": "感冒怎么办？"}], **common)
text = litellm.completion(seed=1, **ask).choices[0].message.content
assert "".join(part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **ask)) == text
assert len(litellm.completion(n=2, temperature=1.0, **ask).choices) == 2
assert litellm.text_completion(model=f"text-completion-openai/{model}", prompt="问题", **common).choices[0].text
"""


@pytest.mark.parametrize(("name", "code"), [("openai", OPENAI), ("openai", LANGCHAIN), ("litellm", LITELLM)])
def test_a_client(name: str, code: str, folder: Path, address: str) -> None:
    run(folder, environment(name) / "python", "-c", code, address, "run")


def export(folder: Path, tool: str) -> Path:
    task = folder / f"task-{tool}"
    if not task.is_dir():
        call(folder, "export", "--task", tool, "--questions", "q.questions.jsonl", "--out", task.name)
    return task


def lm_eval(folder: Path, task: Path, name: str, model: str, address: str, *words: str) -> list[dict[str, Any]]:
    """Run lm-eval and return its samples, whose file `evaluate` reads with the same questions."""
    route = "chat/completions" if "chat" in model else "completions"
    where = f"base_url={address}/{route},model=run,num_concurrent=2,tokenizer={folder / 'tiny'}"
    out = folder / f"out-{name}-{model}"
    where = where.rpartition(",tokenizer=")[0] if "chat" in model else where
    run(
        folder, environment("lmeval") / "lm_eval", "--include_path", task, "--tasks", name, "--model", model,
        "--model_args", where, "--log_samples", "--output_path", out, *words,
    )  # fmt: skip
    (path,) = out.rglob("samples_*.jsonl")
    assert evaluate(path, asked(folder)).overall["n"] == COUNT
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("model", "words"), [("local-chat-completions", ["--apply_chat_template"]), ("local-completions", [])]
)
def test_lm_eval_generates(model: str, words: list[str], folder: Path, address: str) -> None:
    limit = ["--gen_kwargs", "max_gen_toks=8"]
    samples = lm_eval(folder, export(folder, "lm-eval"), "q", model, address, *words, *limit)
    assert [sample["doc"]["id"] for sample in samples] == [question.id for question in asked(folder)]
    assert all(sample["resps"][0][0] for sample in samples)


LIKELIHOOD = """\
task: ll
dataset_path: ""
custom_dataset: !function utils.load
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_target: "{{letters.index(answer)}}"
doc_to_choice: "{{letters | list}}"
target_delimiter: "\\n答案是"
metric_list:
  - metric: acc
"""


def test_lm_eval_compares_log_likelihoods(folder: Path, address: str) -> None:
    """They are the sums that transformers gives for the same tokens, with the same weights in this process."""
    import torch

    from cmexam_tune.inference import loading

    task = export(folder, "lm-eval")
    (task / "ll.yaml").write_text(LIKELIHOOD, encoding="utf-8")
    samples = lm_eval(folder, task, "ll", "local-completions", address, "--batch_size", "2")
    _, loaded = loading.load_writer(folder / "run")
    tokenizer: Any = loaded.tokenizer
    for sample in samples:
        for (start, rest), response in zip(
            (one.values() for one in sample["arguments"].values()), sample["resps"], strict=True
        ):
            # lm-eval sends a context without the tokenizer's own special tokens, unless it is told to add BOS.
            ids, context = tokenizer([start + rest, start], add_special_tokens=False)["input_ids"]
            count = len(ids) - len(context)
            with torch.no_grad():
                logs = loaded.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
            wanted = sum(float(logs[place - 1, ids[place]]) for place in range(len(ids) - count, len(ids)))
            assert float(response[0][0]) == pytest.approx(wanted, abs=2e-3)


def test_evalscope(folder: Path, address: str) -> None:
    task = export(folder, "evalscope")
    code = f"""
from evalscope import TaskConfig, run_task
arguments = {{"local_path": {str(task)!r}, "subset_list": ["q_single"]}}
run_task(TaskConfig(model="run", api_url={address!r}, api_key="any", eval_type="openai_api", datasets=["general_mcq"],
    dataset_args={{"general_mcq": arguments}}, generation_config={{"max_tokens": 8}}, work_dir="evalscope"))
"""
    run(folder, environment("evalscope") / "python", "-c", code)
    (path,) = (folder / "evalscope").rglob("predictions/*/*.jsonl")
    assert evaluate(path, asked(folder)).overall["n"] == COUNT


SERVED = """
from opencompass.models import OpenAISDK

roles = [dict(role="HUMAN", api_role="HUMAN"), dict(role="BOT", api_role="BOT", generate=True)]
models = [dict(
    abbr="served", type=OpenAISDK, path="run", key="any", openai_api_base={address!r}, tokenizer_path={tokenizer!r},
    meta_template=dict(round=roles), query_per_second=9, max_out_len=8, max_seq_len=4096, batch_size=2, temperature=0)]
"""


def test_opencompass(folder: Path, address: str) -> None:
    task = export(folder, "opencompass")
    (task / "models").mkdir()
    text = SERVED.format(address=address, tokenizer=str(folder / "tiny"))
    (task / "models" / "served.py").write_text(text, encoding="utf-8")
    run(
        folder, environment("opencompass") / "opencompass", "--config-dir", task, "--datasets", "q", "--models",
        "served", "--work-dir", folder / "opencompass", "--debug",
    )  # fmt: skip
    (path,) = (folder / "opencompass").rglob("predictions/*/*.json")
    (scores,) = (folder / "opencompass").rglob("results/*/*.json")
    report = evaluate(path, asked(folder), profile="opencompass-cmb")
    assert report.overall["n"] == COUNT
    # Its own score of the same outputs.
    assert json.loads(scores.read_text(encoding="utf-8"))["accuracy"] == pytest.approx(report.overall["accuracy"])


def test_inspect(folder: Path, address: str) -> None:
    """The exported task runs, and its log is read by our ids."""
    run(
        # It takes paths from where it is only.
        export(folder, "inspect"), environment("inspect") / "inspect", "eval", "q.py", "--model",
        "openai-api/run/run", "--max-tokens", "8", "--seed", "7", "--log-format", "json", "--log-dir",
        folder / "inspect", "--display", "plain", RUN_BASE_URL=address, RUN_API_KEY="any",
    )  # fmt: skip
    (path,) = (folder / "inspect").glob("*.json")
    log = json.loads(path.read_text(encoding="utf-8"))
    assert log["status"] == "success" and [s["id"] for s in log["samples"]] == [q.id for q in asked(folder)]
    report = evaluate(path, asked(folder), profile="opencompass-cmb")
    assert report.overall["n"] == COUNT


@pytest.mark.parametrize("mode", ["generate", "constrained", "likelihood"])
def test_our_own_predict_answers_alike_here_and_there(mode: str, folder: Path, address: str) -> None:
    same = [f"generation.mode={mode}", "prompt.style=zeroshot", "generation.answer_sets=single"]
    same += ["generation.max_new_tokens=8"] if mode == "generate" else []
    there = [f"model.base_url={address}", "model.model_name_or_path=run"]
    local = ["--questions", "q.questions.jsonl", "--out", f"local-{mode}.jsonl", "prompt.max_source_length=4000", *same]
    remote = ["--questions", "q.questions.jsonl", "--out", f"remote-{mode}.jsonl", *there, *same]
    call(folder, "predict", "--run", "run", *local)
    call(folder, "predict", "--config", "zeroshot_vllm", *remote)
    texts, answers = (
        [{one.question_id: getattr(one, field) for one in jsonl.read(folder / f"{side}-{mode}.jsonl", Prediction)}
         for side in ("local", "remote")] for field in ("text", "answer")
    )  # fmt: skip
    assert len(answers[0]) == COUNT and answers[0] == answers[1]
    assert mode != "generate" or texts[0] == texts[1]
    assert "warning" not in (folder / f"remote-{mode}.jsonl.meta.json").read_text(encoding="utf-8")


def test_every_eval_ever_takes_what_is_sealed(tmp_path: Path) -> None:
    """Merge-ready where the model is named as on the hub; of one in a folder nobody knows the developer."""
    python = next(filter(None, map(shutil.which, ("python3.12", "python3.13"))), sys.executable)
    programs = environment("every_eval_ever", python)
    asked, written = test_sealed.write(tmp_path, test_sealed.exam())
    note = Path(f"{written}.meta.json")
    note.write_text(
        note.read_text("utf-8").replace("/somewhere/secret/tiny-llama", "HuggingFaceTB/SmolLM2-135M"), "utf-8"
    )
    sealed_folder.seal(written, asked, tmp_path / "sealed", "export", "2026-01-02")
    files = [str(path.relative_to(tmp_path / "sealed")) for path in (tmp_path / "sealed").glob("data/*/*/*/*")]
    said = run(tmp_path / "sealed", programs / "python", "-m", "every_eval_ever", "validate", *files)
    assert len(files) == 2 and "2 passed, 0 warning-only, 0 failed" in said, said
