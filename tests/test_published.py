"""Published numbers: the package's tables against the checked copy, and which questions they are of."""

import json
from pathlib import Path

import pytest
import yaml

from cmexam_tune import reproduce
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import breakdowns
from cmexam_tune.report.papers import published_tables, reproduced_tables

CHECKED = Path(__file__).resolve().parents[2] / "shared" / "research" / "published_tables.yaml"
TABLES = [(exam, f"table{number}") for exam, last in (("cmexam", 8), ("cmb", 8)) for number in range(3, last + 1)]


@pytest.mark.skipif(not CHECKED.exists(), reason="the checked tables are not here")
@pytest.mark.parametrize(("exam", "name"), TABLES)
def test_every_cell_equals_the_checked_copy(exam: str, name: str) -> None:
    theirs = yaml.safe_load(CHECKED.read_text(encoding="utf-8"))[exam][name]["rows"]
    ours = published_tables.table(exam, name).lines
    expected = [
        (row["name"], row.get("setting"), shots, part)
        for row in theirs
        for shots, part in ((0, row), (3, row.get("few_shot")))
        if part
    ]
    assert len(ours) == len(expected) >= 5
    for line, (title, setting, shots, part) in zip(ours, expected, strict=True):
        assert (line.name, line.setting, line.shots) == (title, setting, shots)
        numbers = {key: value for key, value in part.items() if type(value) in (int, float) and key != "dataset_value"}
        renamed = {
            "accuracy_macro" if key == "average" and "physician" in part else key: value
            for key, value in numbers.items()
        }
        assert line.values == renamed


def test_every_group_of_the_paper_is_one_of_ours() -> None:
    numbers = published_tables.beside("cmexam", [Question("q", "题", {"A": "甲", "B": "乙"}, "A")])
    assert len(numbers.facets) == 5 and len(numbers.rows) == 17
    for facet in numbers.facets:
        known = {one.name for one in breakdowns.define(facet.facet).values}
        found = numbers.of_facet(facet.facet)
        assert found is not None and set(found.cells) <= known and len(found.cells) == len(facet.cells), facet.facet


def test_the_average_of_cmb_is_the_mean_of_its_categories() -> None:
    """An identity of the paper; the few lines that break it say so."""
    broken = 0
    for name in ("table3", "table4"):
        for line in published_tables.table("cmb", name).lines:
            values = dict(line.values)
            average = values.pop("accuracy_macro")
            values.pop("average_mean", None)
            broken += abs(sum(values.values()) / 6 - average) > 0.2
    assert broken == 6


def test_other_questions_get_a_caveat() -> None:
    few = [Question("q", "题", {"A": "甲", "B": "乙"}, "A")]
    assert "not of these 1 questions" in published_tables.beside("cmexam", few).caveat
    assert "11200" in published_tables.beside("cmb", few).caveat
    classes = [one.zh for one in breakdowns.define("exam_class").values]
    whole = [
        Question(f"{name}:{i}", "题", {"A": "甲", "B": "乙"}, "A", facets={"exam_class": name})
        for name in classes
        for i in range(400)
    ]
    assert published_tables.beside("cmb-cot-3shot", whole).caveat == ""


def test_runs_beside_the_tables_of_groups(tmp_path: Path) -> None:
    """Two seeds of one row; the group means are worked by hand, the published cells are those of the paper."""
    for seed, easy in ((1, 60.0), (2, 64.0)):
        folder = tmp_path / f"ptuning_chatglm/seed{seed}/report"
        folder.mkdir(parents=True)
        cells = {"1": {"accuracy": easy}, "5.0": {"accuracy": None}, "3": {"accuracy": 30.0}}
        report = {"overall": {"n": 10, "accuracy": 50.0}, "by_facet": {"Question Difficulty Level": cells}}
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
        (folder / "report.html").write_text("<p>")
    found = reproduced_tables.collect(tmp_path)
    lines = {line[0]: line[1:] for line in reproduced_tables.by_groups(8, found).lines}
    assert lines["1 容易"] == ("62.0±2.8", "74.60", "58.50", "31.40", "61.50", "56.50")
    assert lines["3 中等"][:2] == ("30.0±0.0", "51.30") and lines["5 极难"][0] == "-"
    assert len(reproduced_tables.by_groups(4, found).lines) == 16
    reproduce.main(["--table5", "--out", str(tmp_path)])
    assert "EM 急诊医学科" in (tmp_path / "table5.md").read_text(encoding="utf-8")
