"""Rows of the papers from raw file to table, with tiny models; killed once in the middle, the end is the same."""

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked_programs
import pytest

from cmexam_tune import reproduce, tiny
from cmexam_tune.core.errors import UserError
from cmexam_tune.report.papers import entries, published_tables, reproduced_tables
from cmexam_tune.report.table import Table

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "cmexam_tune" / "sample"
METHODS = {"ptuning_chatglm": "chatglm", "lora_llama": "llama", "head_bert": "bert"}
PUBLISHED = {"ptuning_chatglm": "ChatGLM-CMExam", "lora_llama": "LLaMA-CMExam", "head_bert": "BERT-CMExam"}
FEW = [
    "training.max_steps=2", "training.global_batch_size=4", "training.per_device_train_batch_size=4",
    "training.eval_strategy=no", "training.save_strategy=no", "data.max_train_samples=8", "generation.max_new_tokens=4",
    "training.disable_tqdm=true",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    built = {row: tiny.build(family, folder / family, hidden=32) for row, family in METHODS.items()}
    long = [f"{row}:prompt.max_source_length=512" for row in METHODS if row != "head_bert"]
    return [*(f"{row}:model.model_name_or_path={path}" for row, path in built.items()), *long]


def words(out: Path, models: list[str], *more: str, rows: Sequence[str] = tuple(METHODS)) -> list[str]:
    of_rows = [word for word in models if word.partition(":")[0] in rows]
    return [*rows, "--out", str(out), "--seeds", "1,2", "--data", str(SAMPLE / "cmexam"), *FEW, *of_rows, *more]


def overall(out: Path) -> dict[str, Any]:
    found = sorted(out.glob(f"*/seed*/{reproduced_tables.REPORT}"))
    return {str(p.relative_to(out)): json.loads(p.read_text(encoding="utf-8"))["overall"] for p in found}


@pytest.mark.parametrize(
    "rows", [("lora_llama", "head_bert"), pytest.param(tuple(METHODS), marks=pytest.mark.slow)], ids=len
)
def test_two_seeds_killed_in_the_middle(
    tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str], rows: tuple[str, ...]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reproduce.main(words(whole, models, "--table3", rows=rows))
    printed = capsys.readouterr().out
    names = sorted(path.parent.name for path in whole.glob(f"*/seed*/{reproduced_tables.REPORT.parts[0]}"))
    explaining = len(rows) - 1  # a classifier explains nothing
    assert names == [
        name for seed in ("seed1", "seed2") for name in [seed] * len(rows) + [f"{seed}-explain"] * explaining
    ]
    for row in rows:
        assert PUBLISHED[row] in printed
    for table in printed.split("row  ", 1)[1].split("model  ", 1):  # the comparison, and Table 3
        caveats = next(line for line in table.splitlines() if "published numbers are of" in line)
        assert "not of these 30 questions; not the recipe's: " in caveats
        assert "model.model_name_or_path=bert" in caveats and "training.max_steps=2" in caveats
        assert "training.seed" not in caveats and "prompt.style" not in caveats
    for stem in ("comparison", "table3"):
        for suffix in (".md", ".tex", ".html"):
            assert "18.3" in (whole / f"{stem}{suffix}").read_text(encoding="utf-8"), "LLaMA-CMExam as published"

    process = forked_programs.Program("reproduce", words(broken, models, rows=rows))
    deadline = time.monotonic() + 120
    while not list(broken.glob("lora_llama/seed1/predictions.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    assert len(overall(broken)) < len(overall(whole))
    reproduce.main(words(broken, models, rows=rows))
    assert overall(broken) == overall(whole)
    assert (broken / "comparison.md").read_text() == (whole / "comparison.md").read_text()


def test_off_the_shelf_and_cmb(tmp_path: Path, models: list[str]) -> None:
    model = models[1].partition("=")[2]
    changes = [f"model.model_name_or_path={model}", *FEW, "generation.max_new_tokens=2"]
    table = reproduce.reproduce(
        ["zeroshot_qwen_cmb"], tmp_path, data=SAMPLE / "cmb", overrides=changes, plan=reproduce.Plan((1, 2))
    )
    assert len(list(tmp_path.glob("zeroshot_qwen_cmb/seed*"))) == 1
    assert table.lines[0][:2] == ("zeroshot_qwen_cmb", "Acc")


def cmb_files(folder: Path) -> Path:
    """Write raw CMB files of two classes, with four validation questions of each."""
    items = json.loads((SAMPLE / "cmb" / "val.json").read_text(encoding="utf-8"))
    two = [next(item for item in items if item["exam_class"] == name) for name in ("执业医师", "护士执业资格")]
    for stem, count in (("CMB-val-merge", 4), ("CMB-test-choice-question-merge", 2)):
        copies = [
            {**item, "id": None, "question": f"{stem}{n}{item['question']}"} for item in two for n in range(count)
        ]
        for item in copies:
            del item["id"]
        path = folder / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(copies, ensure_ascii=False), encoding="utf-8")
    return folder


def test_a_row_of_cmb_in_its_four_settings(tmp_path: Path, models: list[str]) -> None:
    model = models[1].partition("=")[2]
    few = [f"model.model_name_or_path={model}", "generation.max_new_tokens=3", "generation.min_new_tokens=1"]
    out = tmp_path / "a # b: [c]"
    data = cmb_files(tmp_path / "raw # 1: [x]")
    argv = ["zeroshot_yi_6b_cmb", "--data", str(data), "--out", str(out), *few]
    assert reproduce.main(argv) is None
    runs = sorted(path.name for path in out.glob("zeroshot_yi_6b_cmb/seed*"))
    assert runs == ["seed1", "seed1-answer-3shot", "seed1-cot", "seed1-cot-3shot"]
    lines = reproduced_tables.cmb(reproduced_tables.collect(out)).lines
    assert [line[:2] for line in lines] == [
        ("Yi-6B-Chat (zeroshot_yi_6b_cmb)", "answer-only"), ("  published", "answer-only"),
        ("Yi-6B-Chat (zeroshot_yi_6b_cmb)", "CoT"), ("  published", "CoT"),
    ]  # fmt: skip
    assert lines[1][2:] == (
        "67.25 (68.70)", "76.38 (77.06)", "68.50 (69.38)", "67.83 (68.00)", "61.75 (62.44)", "53.50 (55.88)",
        "65.87 (66.91)",
    )  # fmt: skip
    reports = {
        run: json.loads((out / "zeroshot_yi_6b_cmb" / run / reproduced_tables.REPORT).read_text()) for run in runs
    }
    zero, three = (reports[run]["by_facet"]["exam_type"]["医师考试"]["accuracy"] for run in runs[:2])
    assert lines[0][2] == f"{zero:.2f} ({three:.2f})" and lines[0][4] == "-"
    config = json.loads((out / "zeroshot_yi_6b_cmb" / "seed1-cot-3shot" / "predictions.jsonl.meta.json").read_text())
    assert config["config"]["prompt"]["shots"] == 3 and config["config"]["prompt"]["style"] == "cmb_cot"
    assert "65.87 (66.91)" in (out / "cmb.md").read_text() and "Yi-6B-Chat" in (out / "comparison.tex").read_text()
    # Killed before the report's last file was there, and answered again after the report.
    page, old = (out / "zeroshot_yi_6b_cmb" / run / "report" / "report.html" for run in runs[:2])
    page.unlink()
    os.utime(old, (1, 1))
    assert reproduce.main(argv) is None
    assert page.is_file() and old.stat().st_mtime > 1


def test_caveats_stand_below_the_published_numbers(tmp_path: Path) -> None:
    put(tmp_path, "zeroshot_gpt4_cmb/seed1-cot", n=11200, accuracy=50.0, accuracy_macro=50.0)
    note = reproduced_tables.cmb(reproduced_tables.collect(tmp_path)).note
    assert "printed average is off its columns" in note and "not k/n of the released test set" in note


def test_every_printed_line_runs_or_says_why_not() -> None:
    for exam, tables in (("cmexam", ("table3",)), ("cmb", ("table3", "table4"))):
        for line in (line for table in tables for line in published_tables.table(exam, table).lines):
            if line.name in entries.NOTHING_TO_RUN:
                with pytest.raises(UserError, match="there is nothing to run"):
                    entries.find(line.name)
            else:
                assert entries.find(f"{exam}/{line.name}").exam == exam
    assert entries.find("cmb/GPT-4").settings == ("answer", "answer-3shot", "cot", "cot-3shot")
    assert entries.find("JianPeiGPT").settings == entries.find("lora_llama").settings == ("answer",)


def test_an_endpoint_row_is_checked_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set"):
        reproduce.reproduce(["GPT-3.5-turbo"], tmp_path / "o", data=SAMPLE / "cmexam")
    assert not (tmp_path / "o").exists()


def test_missing_weights_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        reproduce.reproduce(["lora_huatuo", "head_bert"], tmp_path / "o", data=SAMPLE / "cmexam")
    text = str(caught.value)
    assert "hf download huggyllama/llama-7b" in text and "hf download google-bert/bert-base-chinese" in text
    assert "https://github.com/SCIR-HI/Huatuo-Llama-Med-Chinese" in text
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [(["lora_lama"], "did you mean 'lora_llama'"), (["Vicuna-CMEXAM"], "did you mean 'Vicuna-CMExam'")],
)
def test_unknown_rows(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        reproduce.reproduce(names, tmp_path)


@pytest.mark.parametrize(
    "argv", [["--out", "x"], ["lora_llama", "--out", "x", "--seeds", "a"], ["--table3", "--out", "nowhere"]]
)
def test_wrong_command_lines(argv: list[str]) -> None:
    with pytest.raises(UserError):
        reproduce.main(argv)


def test_missing_data(tmp_path: Path, models: list[str]) -> None:
    with pytest.raises(UserError, match=r"no test file of cmexam .*--data"):
        reproduce.reproduce(["lora_llama"], tmp_path / "o", data=tmp_path, overrides=models)


def test_overrides_for_one_row(tmp_path: Path) -> None:
    words = ["training.seed=3", "lora_llama:out=x", "LLaMA-CMExam:tuning.r=2", "head_bert:out=y", "out=a:b"]
    assert entries.own_overrides(words, entries.find("lora_llama")) == [
        "training.seed=3",
        "out=x",
        "tuning.r=2",
        "out=a:b",
    ]
    with pytest.raises(UserError, match="lora_lama: is no row, did you mean 'lora_llama'"):
        reproduce.reproduce(["lora_llama"], tmp_path / "o", overrides=["lora_lama:tuning.r=2"])


def test_a_published_name_finds_its_recipe() -> None:
    assert entries.find("ChatGLM-CMExam").recipe == "ptuning_chatglm"
    assert entries.find("ptuning_chatglm.yaml") == entries.find("ptuning_chatglm")


# --- tables ------------------------------------------------------------------------------------------------------


def put(out: Path, place: str, **overall: Any) -> None:
    path = out / place / reproduced_tables.REPORT
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"overall": overall, "by_facet": {}}), encoding="utf-8")
    path.with_suffix(".html").write_text("<p>")


def test_scores_by_hand(tmp_path: Path) -> None:
    for seed, accuracy in ((1, 44.0), (2, 46.0)):
        put(tmp_path, f"ptuning_chatglm/seed{seed}", n=10000, accuracy=accuracy, weighted_f1=accuracy / 100, bleu1=None)
        put(tmp_path, f"ptuning_chatglm/seed{seed}-explain", n=10000, accuracy=1.0, weighted_f1=0.01, bleu1=31.0 + seed)
    put(tmp_path, "my_own/seed1", n=400, accuracy=50.0, weighted_f1=0.5, bleu1=None)
    first, second = reproduced_tables.collect(tmp_path)
    accuracy = first.scores["accuracy"]
    assert (accuracy.mean, accuracy.deviation) == (45.0, pytest.approx(2**0.5))
    half = 1.96 * (45 * 55 / 10000 + 2 / 2) ** 0.5
    assert accuracy.interval == pytest.approx((45 - half, 45 + half))
    bleu, t = first.scores["bleu1"], math.tan(0.475 * math.pi)  # with two seeds Student's t is Cauchy's distribution
    assert bleu.mean == 32.5 and bleu.interval == pytest.approx((32.5 - t * 0.5, 32.5 + t * 0.5))
    assert second.entry.title == "my_own" and second.scores["accuracy"].deviation is None
    table = {(line[0], line[1]): line[2:] for line in reproduced_tables.comparison([first, second]).lines}
    assert table["ChatGLM-CMExam (ptuning_chatglm)", "Acc"][:4] == ("10000", "45.00±1.41", "45.3±1.4", "-0.30")
    assert table["ChatGLM-CMExam (ptuning_chatglm)", "BLEU-1"][3] == "+1.40"
    assert table["my_own", "Acc"] == ("400", "50.00", "-", "-", "45.10 to 54.90")
    wide = reproduced_tables.table3([first, second])
    assert wide.lines[1][:4] == ("  published", "45.3±1.4", "45.2±1.4", "31.1±0.23")


def test_equal_seeds_have_no_interval(tmp_path: Path) -> None:
    for seed in (1, 2):
        put(tmp_path, f"head_bert/seed{seed}", n=30, accuracy=20.0, weighted_f1=0.1)
    (row,) = reproduced_tables.collect(tmp_path)
    table = {line[1]: line[-1] for line in reproduced_tables.comparison([row]).lines}
    assert table["F1"] == "-" and " to " in table["Acc"]


def test_a_table_and_its_reports_are_written(tmp_path: Path) -> None:
    reproduced_tables.write(Table(("a", "b"), (("c", "d"),)), tmp_path / "t", ["x/report.html"])
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert '<a href="x/report.html">' in page and "default-src 'none'" in page
    assert (tmp_path / "t.md").is_file() and (tmp_path / "t.tex").is_file()
