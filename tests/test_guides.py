"""Every command of every document runs as it stands, or says what it needs and is parsed by its own program.

In a folder with the shipped sample under the exams' file names, bash reads each page's blocks (`shell_stubs.py`). What
readers can run only with weights or a server says so in a comment, and gets a tiny model or a small server here; what
needs a card, the network or minutes is parsed only. Long pages run with `-m slow`, then with all the steps they ask
for.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs_blocks
import kit
import pytest
import shell_stubs
import yaml
from docs_blocks import ROOT
from docs_commands import KEY, Reader, check_names, known_keys, parse_command
from fake_openai import serving

pytest.importorskip("torch")

from cmexam_tune import __main__, config, train
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Case, Prediction, Question
from cmexam_tune.models.generation import sampling
from cmexam_tune.preprocess import preprocess

SAMPLE = ROOT / "cmexam_tune" / "sample"
FILES = {".yaml", ".json", ".jsonl", ".safetensors", ".bin", ".csv", ".md"}
"""Endings of names that look like `section.key`."""
LONG = {"README.md", "docs/quickstart.md", "docs/recipes.md", "lora/README.md", "ptuning/README.md"}
RUN = [
    pytest.param(page, id=name, marks=[pytest.mark.slow] if name in LONG else [])
    for page, name in zip(docs_blocks.PAGES, docs_blocks.NAMES, strict=True)
    if docs_blocks.shell(page) and ".zh." not in name
]


# --- the folder that a reader would have --------------------------------------------------------------------------

RAW = {
    "train.csv": "cmexam/train.csv", "val.csv": "cmexam/val.csv",
    "test_with_annotations.csv": "cmexam/test_with_annotations.csv", "CMB-train-merge.json": "cmb/train.json",
    "CMB-val-merge.json": "cmb/val.json", "CMB-test-choice-question-merge.json": "cmb/test.json",
    "CMB-test-choice-answer.json": "cmb/test_answers.json", "CMB-Clin-qa.json": "cmb/clin.json",
}  # fmt: skip
QUESTIONS = {
    "train": "train.csv", "val": "val.csv", "test_with_annotations": "test_with_annotations.csv",
    "CMB-train-merge": "CMB-train-merge.json", "CMB-val-merge": "CMB-val-merge.json",
    "CMB-test-choice-question-merge": "CMB-test-choice-question-merge.json", "CMB-Clin-qa": "CMB-Clin-qa.json",
}  # fmt: skip
PLACES = {
    "train": ["train", "mine", "out/data/train", "data/mine/train"],
    "val": ["val", "out/data/val"],
    "test_with_annotations": ["test", "data/test", "out/data/test_with_annotations", "data/mine/test"],
    "CMB-val-merge": ["out/cmb/val"],
    "CMB-test-choice-question-merge": ["out/cmb/test", "data/cmb/test"],
}
"""Where else pages look for a file of questions."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every page's folder is filled from: raw files, eight questions of each, tiny models and runs."""
    folder = tmp_path_factory.mktemp("shared")
    raw = folder / "data" / "raw"
    raw.mkdir(parents=True)
    for name, source in RAW.items():
        shutil.copy(SAMPLE / source, raw / name)
    preprocess("cmexam", [raw / name for name in RAW if name.endswith(".csv")], folder / "data" / "cmexam")
    preprocess("cmb", [raw / name for name in QUESTIONS.values() if name.endswith(".json")], folder / "data" / "cmb")
    for name in set(QUESTIONS) - {"CMB-Clin-qa"}:
        made = next(folder.glob(f"data/*/{name}.questions.jsonl"))
        if "CMB-val" not in name:  # examples come from there
            made.write_text("".join(made.read_text("utf-8").splitlines(keepends=True)[:8]), encoding="utf-8")
        for place in PLACES.get(name, ()):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(made, folder / f"{place}.questions.jsonl")
    make_files(folder)
    return folder


def make_files(folder: Path) -> None:
    """Write the small files of their own that readers bring."""
    import openpyxl

    book = openpyxl.Workbook()
    book.active.append(["题干", "A", "B", "C", "D", "E", "答案", "科室"])
    book.active.append(["感冒首选", "休息", "手术", "放疗", "化疗", "透析", "A", "内科"])
    for name in ("bank.xlsx", "my.xlsx"):
        book.save(folder / name)
    item = {"q": "一加一", "choices": ["一", "二"], "key": 1}
    (folder / "ward.jsonl").write_text(json.dumps(item) + "\n", encoding="utf-8")
    passage = {"id": "im:1", "text": "胃溃疡的典型症状是餐后上腹痛。"}
    (folder / "books.jsonl").write_text(json.dumps(passage, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.copy(SAMPLE / "cmb" / "clin.json", folder / "CMB-Clin-qa.json")
    for name in ("train", "val"):
        shutil.copy(SAMPLE / "cmexam" / f"{name}.csv", folder / "data" / f"{name}.csv")
    shutil.copy(SAMPLE / "cmexam" / "val.csv", folder / "data" / "test.csv")
    for name in ("predictions.jsonl", "out/predictions.jsonl", "a.jsonl", "b.jsonl", "c.jsonl"):
        rows = jsonl.read(folder / "test.questions.jsonl", Question)
        jsonl.write(folder / name, [Prediction(row.id, "答案: A") for row in rows])
    turns = [case for case in jsonl.read(folder / "data" / "cmb" / "CMB-Clin-qa.cases.jsonl", Case)]
    jsonl.write(folder / "qwen.jsonl", [
        Prediction(f"{case.id}:{turn}", "多休息。") for case in turns for turn in range(1, len(case.turns) + 1)
    ])  # fmt: skip


def make_run(folder: Path, recipe: str, out: str) -> None:
    """Train a tiny model for one step."""
    model = kit.checkpoint(config.load_config(recipe).model.family, hidden=32, layers=2)
    changes = [
        f"model.model_name_or_path={model}", f"out={folder / out}", f"data.train={folder / 'train.questions.jsonl'}",
        "data.validation=[]", "training.max_steps=1", "training.eval_strategy=no", "training.save_strategy=no",
        "data.num_workers=1", "training.disable_tqdm=true",
    ]  # fmt: skip
    train.train(config.load_config(recipe, changes))


RUNS = {
    "runs/lora_llama": "lora_llama.yaml", "runs/ptuning_chatglm": "ptuning_chatglm.yaml", "out/run": "lora_llama.yaml",
    "runs/seed1": "lora_llama.yaml", "runs/seed2": "lora_llama.yaml", "runs/seed3": "lora_llama.yaml",
}  # fmt: skip
"""Runs that pages speak of."""


@pytest.fixture
def world(page: Path, shared: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder for one page: what it speaks of and does not make itself."""
    text = "\n".join(docs_blocks.shell(page))
    made = tuple(re.findall(r"(?:--out |--output_dir |\bout=)([\w./-]+)", text))
    for name in ("cmexam_tune", "recipes", "ptuning", "lora", "preprocess", "benchmarks", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    for block in docs_blocks.blocks(page):
        if named := re.match(r"# (my_\w+[/.][\w/.]+).*\n", block.text):
            (tmp_path / named[1]).parent.mkdir(exist_ok=True)
            (tmp_path / named[1]).write_text(block.text, encoding="utf-8")
    shell_stubs.install(tmp_path)
    for source in sorted(shared.rglob("*")):
        place = source.relative_to(shared)
        if source.is_file() and not str(place).startswith((*made, *RUNS)):
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, tmp_path / place)
    for out, recipe in RUNS.items():
        if re.search(rf"--(run|run-folder|average)\b[^\n]* {out}\b", text) and out not in made:
            if not (shared / out).exists():
                make_run(shared, recipe, out)
            shutil.copytree(shared / out, tmp_path / out, dirs_exist_ok=True)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        del sys.modules[name]


def says(body: dict[str, Any], count: int) -> str:
    """Answer as a judge where one is asked for, else as someone who sits an exam."""
    judged = '{"fluency": 4, "relevance": 3, "completeness": 3, "proficiency": 2}'
    return judged if "fluency" in str(body) else "答案是A。"


def script(page: Path) -> str:
    """Return a page's shell blocks as one script in which every command knows what it needs."""
    lines, last = [], ""
    for block in docs_blocks.shell(page):
        for line, wanted in docs_blocks.marked(block):
            if (words := ",".join(sorted(wanted))) != last:
                lines.append(f"export NEEDS='{words}'")
                last = words
            lines.append(re.sub(r" &$", "", line))  # nothing runs beside the rest
    return "\n".join(lines)


# --- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs(page: Path, world: Path, request: pytest.FixtureRequest) -> None:
    """The Chinese pages hold equal commands: `test_readme.py`."""
    whole = request.config.option.markexpr == "slow"
    with serving(says) as server:
        reader = Reader(world, server.url, whole)
        done = shell_stubs.run(script(page), world, reader.call)
    assert done.returncode == 0, f"{reader.ran[-1:]}\n{done.stdout}"
    assert reader.ran


@pytest.mark.parametrize("page", docs_blocks.PAGES, ids=docs_blocks.NAMES)
def test_a_page_names_what_exists(page: Path) -> None:
    """Commands and keys in blocks, sentences and tables; a block says its language."""
    assert {block.language for block in docs_blocks.blocks(page)} <= docs_blocks.LANGUAGES
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^ {4,}(cmexam-tune|python|bash|make|torchrun) ", text, re.MULTILINE), "no fence"
    for command, _ in docs_blocks.commands(page):
        check_names([word for word in docs_blocks.split(command) if not re.match(r"\w+=", word)])
    for span in docs_blocks.inline(page):
        first, *more = span.split()
        if first in ("python", "bash", "make", "torchrun", "deepspeed", "cmexam-tune"):
            check_names(docs_blocks.split(span))
        elif first in __main__.PROGRAMS and (" --" in span or "..." in span):
            check_names(["cmexam-tune", *docs_blocks.split(span)])
        elif KEY.fullmatch(first.partition("=")[0]) and Path(first).suffix not in FILES:
            assert {word.partition("=")[0] for word in (first, *more) if KEY.match(word)} <= known_keys(), span


@pytest.mark.parametrize("page", [page for page in docs_blocks.PAGES if "```yaml" in page.read_text("utf-8")],
                         ids=lambda page: str(page.relative_to(ROOT)))  # fmt: skip
def test_a_config_on_a_page_can_be_read(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(block for block in docs_blocks.blocks(page) if block.language == "yaml"):
        (tmp_path / f"{number}.yaml").write_text(block.text, encoding="utf-8")
        if "apiVersion" in yaml.safe_load(block.text):  # Kubernetes' own
            continue
        made = config.load_config(tmp_path / f"{number}.yaml")
        if "explain" in made.prompt.style:  # room for what it asks for
            assert sampling.default_max_new_tokens(made) == made.prompt.max_target_length


@pytest.mark.parametrize("program", __main__.PROGRAMS)
def test_examples_in_the_help_are_commands(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main([program, "--help"])
    shown = re.sub(r"\\\n\s+", " ", capsys.readouterr().out)
    examples = [line.strip() for line in shown.splitlines() if re.match(r" +(cmexam-tune|torchrun|deepspeed) ", line)]
    assert examples, "no example"
    for example in examples:
        words = docs_blocks.split(re.split(r"\s{3,}", example)[0])
        check_names(words) if "..." in example else parse_command(words)


@pytest.mark.parametrize("command", [
    "vllm serve x", "cmexam-tune tran --config x", "cmexam-tune stats --question x", "python no.py", "make nothing",
    "cmexam-tune train --config lora_llama.yaml", "cmexam-tune train --config lora_llama.yaml training.lr=1",
    "torchrun -m cmexam_tune.train --config lora_llama.yaml", "not-a-command", "bash recipes/nothing.sh",
])  # fmt: skip
def test_a_command_that_cannot_run_fails(command: str, tmp_path: Path) -> None:
    """No block escapes: this is what happens to a new one without a mark."""
    shell_stubs.install(tmp_path)
    reader = Reader(tmp_path, "", whole=False)

    def call(call: shell_stubs.Call) -> int:
        try:
            return reader.call(call)
        except (AssertionError, UserError, SystemExit, pytest.fail.Exception):
            return 2

    assert shell_stubs.run(command, tmp_path, call).returncode != 0
