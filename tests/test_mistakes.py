# ruff: noqa: E501 - a table, one mistake after the other
"""Mistakes of users, over all programs: exit 2, one message that names the place, no traceback, nothing written.

In this process and without a model: a mistake has to be found before anything slow is loaded.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cmexam_tune import __main__
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.schema import Prediction, Question

DEEP = "[" * 100_000
OPTIONS = {"A": "甲", "B": "乙", "C": "丙", "D": "丁", "E": "戊"}
EXPERIMENT: dict[str, Any] = {
    "data": {"train": ["q.jsonl"]},
    "prompt": {"style": "answer", "max_source_length": 256, "max_target_length": 32},
    "model": {"family": "llama", "model_name_or_path": "weights"},
    "tuning": {"method": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0},
    "training": {"learning_rate": 1e-4, "max_steps": 1},
    "out": "run",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad files of every kind."""
    folder = tmp_path_factory.mktemp("world")
    questions = [Question(f"q:{i}", f"题干{i}", OPTIONS, "ABCDE"[i % 5], "因为") for i in range(4)]
    jsonl.write(folder / "q.jsonl", questions)
    jsonl.write(folder / "p.jsonl", [Prediction(q.id, "答案: A", "A") for q in questions])
    jsonl.write(folder / "some.jsonl", [Prediction(q.id, "答案: A", "A") for q in questions[:2]])
    jsonl.write(folder / "others.jsonl", [Prediction(f"x:{i}", "答案: A", "A") for i in range(4)])
    (folder / "exam.csv").write_text("Question,Options,Answer,Explanation\n题,A 甲\nB 乙,A,因\n", encoding="utf-8")
    (folder / "good.yaml").write_text(json.dumps(EXPERIMENT), encoding="utf-8")
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "weights").mkdir()
    (folder / "folder" / "mine").write_text("mine")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere")
    texts = {
        "deep": DEEP, "list": "[1]", "broken": "{", "half": '{"id": "\\ud83d"}', "twice": '{"id": "a", "id": "b"}',
        "long_number": '{"id": ' + "9" * 6000 + "}", "blank": "\n\n", "nan": '{"id": NaN}', "types": '{"id": 1}',
        "prediction": '{"question_id": "q:0", "text": "A"}', "answer": json.dumps({**question(0), "answer": "Z"}),
        "options": json.dumps({**question(0), "options": {"A": "x"}}), "kind": json.dumps({**question(0), "kind": "x"}),
        "same": "\n".join([json.dumps(question(0))] * 2), "no_answer": json.dumps({**question(0), "answer": ""}),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (folder / "gbk.jsonl").write_bytes('{"id": "题"}'.encode("gbk"))
    (folder / "gbk.yaml").write_bytes("out: 输出".encode("gbk"))
    (folder / "gbk.csv").write_bytes("Question,Options,Answer,Explanation\n题,A 甲,A,因\n".encode("gbk"))
    aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    _runs(folder)
    for name, text in {"bomb": aliases, "deep": DEEP[:5000], "list": "- a", "twice": "out: a\nout: b",
                       "itself": "extends: itself.yaml", "orphan": "extends: nowhere", "code": "a: !!python/name:os.system"
                       }.items():  # fmt: skip
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def _runs(folder: Path) -> None:
    """Write finished runs of which one file is damaged, and predictions whose note or lines are."""
    card = {"family": "llama", "method": "lora", "base": "x", "base_adapter": None, "template": "none", "system": None,
            "style": "answer", "num_virtual_tokens": None, "tokenizer": "0"}  # fmt: skip
    good = {"config.yaml": json.dumps(EXPERIMENT), "adapter/cmexam_tune.json": json.dumps(card), "metrics.json": "{}"}
    damaged = BAD_RUNS | {f"metrics_{name}": ("metrics.json", text) for name, text in BAD_METRICS.items()}
    for name, (file, text) in damaged.items():
        run = folder / "runs" / name
        (run / "adapter").mkdir(parents=True)
        for path, content in {**good, file: text}.items():
            (run / path).write_text(content, encoding="utf-8")
    for name, (line, note) in BAD_NOTES.items():
        (folder / f"note_{name}").write_text(line + "\n", encoding="utf-8")
        (folder / f"note_{name}.meta.json").write_text(note, encoding="utf-8")
    config = EXPERIMENT | {"data": {"train": [str(folder / "q.jsonl")]}}
    (folder / "trained").mkdir()
    (folder / "trained" / "config.yaml").write_text(json.dumps(config))
    (folder / "trained" / "log.jsonl").write_text("")


def question(number: int) -> dict[str, Any]:
    return {"id": f"q:{number}", "stem": "题", "options": OPTIONS, "answer": "A"}


BAD_PATHS = [
    ("nowhere", "nowhere"), ("empty", "empty"), ("folder", "is a folder"), ("pipe", "pipe"), ("loop", "loop"),
    ("dangling", "leads nowhere"), ("/dev/null", "/dev/null"), ("/dev/null/x", "/dev/null/x"), ("x" * 300, "xxx"),
    ("a\0b", r"a\x00b"), ("\udcff", r"\udcff"), ("q.jsonl/x", "q.jsonl/x"),
]  # fmt: skip
BAD_QUESTIONS = [
    ("deep.jsonl", "deep.jsonl:1: nested too deep"), ("list.jsonl", "list.jsonl:1: a JSON object"),
    ("broken.jsonl", "broken.jsonl:1: broken JSON"), ("half.jsonl", "half.jsonl:1: "),
    ("twice.jsonl", "'id' stands twice"), ("long_number.jsonl", "6000 digits"), ("blank.jsonl", "blank.jsonl: "),
    ("nan.jsonl", "NaN"), ("types.jsonl", "types.jsonl:1: not a Question: id: should be a valid string"),
    ("prediction.jsonl", "not a Question"), ("answer.jsonl", "answer 'Z'"), ("options.jsonl", "1 options"),
    ("kind.jsonl", "'x' is not a choice"), ("same.jsonl", "same.jsonl:2: duplicate id"), ("gbk.jsonl", "not UTF-8"),
    ("no_answer.jsonl", "no_answer.jsonl:1"), ("exam.csv", "cmexam-tune preprocess cmexam --input exam.csv"),
]  # fmt: skip
_GOOD_NOTE = json.dumps({"versions": {}, "config": {}, "result": {}})
BAD_RUNS = {
    "card_empty": ("adapter/cmexam_tune.json", ""), "card_deep": ("adapter/cmexam_tune.json", DEEP),
    "card_list": ("adapter/cmexam_tune.json", "[]"), "card_lacks": ("adapter/cmexam_tune.json", "{}"),
    "card_type": ("adapter/cmexam_tune.json", '{"family": []}'),
    "config_type": ("config.yaml", json.dumps({**EXPERIMENT, "model": []})), "config_nul": ("config.yaml", "\0"),
}  # fmt: skip
BAD_METRICS = {"deep": DEEP, "twice": '{"a": 1, "a": 2}', "long": f'{{"a": {"9" * 6000}}}', "list": "[]", "broken": "{"}
"""metrics.json is read by the export's model card alone: other programs need nothing of it."""
BAD_NOTES = {
    "deep": ('{"question_id": "q:0", "text": ""}', DEEP), "list": ('{"question_id": "q:0", "text": ""}', "[]"),
    "type": ('{"question_id": "q:0", "text": ""}', '{"versions": {}, "config": []}'),
    "result": ('{"question_id": "q:0", "text": ""}', '{"versions": {}, "result": {"seconds": "x"}}'),
    "no_text": ('{"question_id": "q:0"}', _GOOD_NOTE), "text": ('{"question_id": "q:0", "text": 1}', _GOOD_NOTE),
    "line_deep": (DEEP, _GOOD_NOTE), "line_list": ("[]", _GOOD_NOTE),
}  # fmt: skip
BAD_TYPES = [
    "training.lr_scheduler_kwargs=[1]", "training.report_to=[{}]", "tuning.r=1e30", "generation.eos_token_id={}",
    "generation.bad_words_ids=x",
]  # fmt: skip
BAD_OVERRIDES = [
    ("learning_rate=1e-4", "did you mean 'training.learning_rate'"), ("max_new_tokens=5", "'generation.max_new_tokens'"),
    ("lora_r=8", "lora_r"), ("training.learning_rat=1", "did you mean 'learning_rate'"), ("out=", "out"),
    ("x", "an override is section.key=value"), ("=5", "an override is"), ("training.learning_rate", "an override is"),
    ("training.learning_rate=x", "should be a valid number"), ("training.learning_rate=.nan", "training.learning_rate: nan"),
    ("training.learning_rate=1e400", "inf is no number"), ("training=3", "training: expected a section"),
    ("tuning.r=1.5", "tuning.r: should be a valid integer"), ("tuning.method=lorra", "did you mean 'lora'"), ("tuning.r=0", "tuning.r: should be greater"),
    ("tuning.lora_dropout=1", "lora_dropout"), ("tuning.lora_alpha=-1", "lora_alpha"), ("tuning.rr=1", "unknown key"),
    ("tuning.method=os.path", "os.path: must define one class that inherits from cmexam_tune.models.adapters.Method"),
    ("model.family=qwen", "laid out like llama"), ("model.family=roberta", "laid out like bert"),
    ("model.family=lama", "did you mean 'llama'"), ("model.family=my_lab.none", "no module 'my_lab.none'"),
    ("model.family=.x", "no module '.x'"), ("model.dtype=fp16", "model.dtype: 'fp16' is not a choice"),
    ("prompt.max_source_length=0", "prompt.max_source_length: should be"), ("prompt.max_target_length=-1", "greater than or equal to 1, got -1"),
    ("data.max_train_samples=0", "data.max_train_samples: should be"), ("data.num_workers=-1", "data.num_workers: should be"),
    ("generation.mode=guess", "not a choice"), ("generation.do_sample=maybe", "should be a valid boolean"),
    ("generation.votes=3", "do_sample"), ("generation.top_p=0.5", "add generation.do_sample=true"), ("model.config={a: 1e400}", "inf is no number"),
    ("training.seed=" + "9" * 6000, "training.seed"), ("data.train={a: b}", "no such data.train file"),
    ("training.max_steps=[1]", "training.max_steps"), ("generation.temperature=0.5", "add generation.do_sample=true"),
]  # fmt: skip
BAD_NUMBERS = {
    "training": {"learning_rate": 1e30, "adam_beta1": 1, "max_steps": 0, "save_steps": -5, "seed": 2**40},
    "generation": {"max_new_tokens": 10**9, "temperature": -1, "top_p": 1.1, "votes": 0, "num_return_sequences": 2},
}

Case = tuple[Sequence[str], str]


def cases() -> list[Case]:
    train = ["train", "--config", "good.yaml"]
    evaluate = ["evaluate", "--predictions", "p.jsonl", "--questions", "q.jsonl", "--out", "new"]
    preprocess = ["preprocess", "cmexam", "--input", "exam.csv", "--out", "new"]
    found: list[Case] = []
    for path, message in BAD_PATHS:
        found += [
            (["stats", "--questions", path], message),
            (["train", "--config", "good.yaml", f"data.train={path}"], message),
            ([*preprocess[:3], path, "--out", "new"], "folder" if path == "folder" else message),
            ([*evaluate[:2], path, *evaluate[3:]], message),
            (["check", "--questions", "q.jsonl", "--against", path, "--out", "new"], message),
        ]
    for path, message in BAD_QUESTIONS:
        found += [(["stats", "--questions", path], message)]
        found += [([*evaluate[:4], path, *evaluate[5:]], message)]
    found += [([*train, word], message) for word, message in BAD_OVERRIDES]
    found += [([*train, word], word.partition("=")[0]) for word in BAD_TYPES]
    answer = ["predict", "--questions", "q.jsonl", "--out"]
    found += [([*answer, "new", "--run", f"runs/{name}"], Path(file).name) for name, (file, _) in BAD_RUNS.items()]
    found += [(["export", "--run", f"runs/metrics_{name}", "--out", "new"], "metrics.json: ") for name in BAD_METRICS]
    found += [([*answer, f"note_{name}", "--config", "good.yaml"], f"note_{name}") for name in BAD_NOTES]
    here = [*train, "out=trained"]
    found += [
        ([*here, "prompt.style=anwser"], "did you mean 'answer'"), ([*here, "prompt.template=vicunna"], "'vicuna'"),
        ([*here, "model.model_name_or_path=./trainedd"], "no such folder, did you mean 'trained'"),
        ([*here, "model.model_name_or_path=q.jsonl"], "a file"),
        ([*here, "training.seed=1"], "another experiment; it differs in training.seed"),
    ]  # fmt: skip
    for section, table in BAD_NUMBERS.items():
        found += [([*train, f"{section}.{key}={value}"], f"{section}.{key}: ") for key, value in table.items()]
    for name, message in (("bomb", "aliases"), ("deep", "too deep"), ("list", "must hold sections"),
                          ("gbk", "not UTF-8"), ("twice", "stands twice"), ("itself", "extends itself"), ("orphan", "no such config"),
                          ("code", "not YAML")):  # fmt: skip
        found.append((["train", "--config", f"{name}.yaml"], message))
    found += [
        ([], "usage"), (["trian"], "did you mean 'train'"), (["train"], "--config"), (["train", "--confg", "x"], "--con"),
        (["train", "--config", "lora_lama.yaml"], "did you mean 'lora_llama.yaml'"), (["train", "--config", ""], "config"),
        (["train", "--config", "x" * 5000], "no such config"), ([*train, "out=q.jsonl"], "q.jsonl"),
        ([*train, "out=folder"], "folder"), ([*train, "--overwrite", "out=folder"], "folder"),
        ([*train, "data.train=exam.csv"], "cmexam-tune preprocess cmexam --input exam.csv"),
        (["preprocess", "cmexan", "--input", "exam.csv", "--out", "new"], "did you mean 'cmexam'"),
        ([*preprocess[:-1], "q.jsonl"], "q.jsonl is a file"), ([*preprocess[:-1], "/dev/null/x"], "/dev/null"),
        ([*preprocess, "--styles", "99"], "99"), ([*preprocess, "--format", "x"], "invalid choice"),
        (["preprocess", "my_lab.none", "--input", "exam.csv", "--out", "new"], "my_lab.none"),
        ([*preprocess[:3], "gbk.csv", "--out", "new"], "gbk.csv"), ([*evaluate, "--profile", "standart"], "'standard'"),
        ([*evaluate, "--profile", "my_lab.none"], "my_lab.none"), ([*evaluate[:2], "some.jsonl", *evaluate[3:]], "q:2"),
        ([*evaluate[:2], "others.jsonl", *evaluate[3:]], "x:0"), ([*evaluate, "--baseline", "nowhere"], "nowhere"),
        ([*evaluate[:-1], "q.jsonl"], "q.jsonl"), ([*evaluate[:-1], "/dev/null/x"], "/dev/null"),
        (["predict", "--questions", "q.jsonl", "--out", "new"], "--run"),
        (["predict", "--run", "folder", "--questions", "q.jsonl", "--out", "new"], "folder"),
        (["predict", "--run", "nowhere", "--questions", "q.jsonl", "--out", "new"], "nowhere"),
        (["export", "--run", "folder", "--out", "new"], "no run folder"), (["export", "--run", "folder"], "--out"),
        (["export", "--run", "nowhere", "--out", "new"], "nowhere"), (["export", "--run", "x", "--out", "folder"], "folder"),
        (["export", "--run", "x", "--out", "folder", "--overwrite"], "--overwrite leaves it alone"),
        (["export", "--run", "x", "--out", "q.jsonl", "--overwrite"], "is a file"),
        (["export", "--run", "x", "--out", "new", "--format", "gguf"], "invalid choice"),
        *(([*["export", "--out", "new", "--questions", "q.jsonl"], *source, *word], "take")
          for source in (["--results", "p.jsonl"], ["--task", "lm-eval"], ["--rewards", "verl"])
          for word in (["--license", "mit"], ["--base-model", "a/b"], ["--public"], ["--push", "a/b"], ["--merge"])),
        (["tiny", "--family", "lama", "--out", "new"], "invalid choice"), (["tiny", "--family", "llama"], "--out"),
        (["tiny", "--family", "llama", "--out", "."], "exists"), (["tiny", "--family", "llama", "--out", ".", "--overwrite"],
         "so it stays"), (["tiny", "--family", "llama", "--out", "pipe", "--overwrite"], "pipe"),
        ([*train, "out=."], "name a folder of its own"), ([*train, "out=dangling"], "leads nowhere"),
        ([*train, "out=loop", "--overwrite"], "loop"), ([*train, "out=\udcff"], "not UTF-8"),
        ([*preprocess[:-1], "dangling"], "leads nowhere"), ([*evaluate[:-1], "loop"], "loop"),
        (["annotate", "--questions", "q.jsonl", "--config", "good.yaml", "--out", "loop"], "loop"),
        (["annotate", "--questions", "q.jsonl", "--config", "good.yaml", "--out", "q.jsonl"], "q.jsonl"),
        (["tiny", "--family", "bert", "--out", "/proc/x"], "/proc/"),
        (["chat", "--run", "nowhere"], "nowhere"), (["chat", "--run", "folder"], "folder"), (["chat"], "--run"),
        (["serve", "--run", "nowhere"], "nowhere"), (["serve", "--run", "folder"], "folder"), (["serve"], "--run"),
        (["serve", "--run", "folder", "--port", "x"], "--port"),
        (["reproduce", "--out", "new"], "name at least one row"), (["reproduce", "lora_lama", "--out", "new"], "lora_llama"),
        (["reproduce", "lora_llama", "--out", "new", "--seeds", "x"], "--seeds"),
        (["reproduce", "lora_llama", "--out", "new", "--data", "nowhere"], "weights are missing"),
    ]  # fmt: skip
    for size, values in {
        "hidden": (0, -1, 100, 10**9),
        "layers": (0, -1, 10**6),
        "vocab": (-1, 10**12),
        "seed": (-1,),
    }.items():
        found += [(["tiny", "--family", "bert", "--out", "new", f"--{size}", str(v)], size) for v in values]
    return found


CASES = cases()


def test_there_are_enough() -> None:
    tried = {argv[0] for argv, _ in CASES if argv}
    assert len(CASES) > 200 and len(tried & {*__main__.PROGRAMS}) >= 11


def everything(folder: Path) -> dict[str, Any]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("argv", "message"), CASES, ids=[f"{i}-{' '.join(a)[:60]!a}" for i, (a, _) in enumerate(CASES)]
)
def test_one_message_and_nothing_written(
    argv: Sequence[str], message: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    before = everything(world)
    with pytest.raises(SystemExit) as done:
        cli.run(__main__.main, list(argv))
    printed = capsys.readouterr()
    assert done.value.code == 2, printed.err
    assert message in printed.err + printed.out
    assert len(printed.err) < 3000 and "Traceback" not in printed.err
    assert printed.err.count("error: ") == 1 or argv == []
    lines = [line for line in printed.err.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)), "a mistake is said once"
    assert everything(world) == before
