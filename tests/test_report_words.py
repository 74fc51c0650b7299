"""A report says every word of its own in the reader's language."""

import csv
import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import real_data

from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation import breakdowns, comparison, grading
from cmexam_tune.report import building, curves, identity, result_tables, writing
from cmexam_tune.report.papers import published_tables

CMEXAM = ("Disease Group", "Clinical Department", "Medical Discipline", "Medical Competency", "Difficulty level")
CMB = ("exam_type", "exam_class", "exam_subject")
SAMPLE = Path(breakdowns.__file__).parents[1] / "sample"
RELEASED = real_data.find("CMB-test-choice-answer.json")
CHINESE = re.compile(r"[\u3400-\u9fff]")


SENTENCES = {
    " predictions, {answered": "{'' if count == 1 else 's'} asked",
    "outputs were cut off by their limit": "outputs reached generation.max_new_tokens and were cut",
    ">Each two runs": "Pairwise (second minus first)",
    "Same readable answer / %": "Same readable answer in both",
    "what would be found four times out of five": "smallest difference in accuracy that would be found with 80% power",
    "points would be found four times": "a difference of",
    "Lines: the right answer": "Rows: correct answer; columns: model's answer.",
    "off the outlined diagonal": "A dark column outside the diagonal means the model favours that letter",
    "' is no program": "error: unknown command ",
    "fewer options than possible": "fewer than {",
    "  not read: ": "columns ignored: ",
    "it holds the sampling of questions": "Accuracy: questions and seeds; other metrics: seeds only.",
    "seed(s) a row": "} per row.",
    "process(es)": "per host, {",
    "GiB of the host's": "host RAM {",
    "a trained adapter as a loadable model": "write a run as a merged model or adapter",
    "it needs another build of PyTorch": "V100 needs a different PyTorch build",
    "the same outputs by every published scorer": "the same outputs scored by every published script",
    "tiny random models cannot do more": "that is all a tiny random model can show",
    "条，其中 0 条仍在思考": "请调大 generation.max_new_tokens",
    "从 ${before} 到": "与 ${before} 相比",
}
"""Sentence that newcomers stumbled over, as it stood in a source -> what stands there now."""


def test_sentences_that_nobody_understood_stay_away():
    home = SAMPLE.parent
    paths = [path for kind in ("*.py", "*.js", "*.yaml") for path in home.rglob(kind)]
    paths += [home.parent / name for name in ("README.md", "README.zh.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert [words for words in SENTENCES if words in text] == []
    assert [words for words in SENTENCES.values() if words not in text] == []


def test_a_score_that_is_not_there_is_explained():
    way = comparison.ScoreDecomposition(
        "cmb", 3, 50.0, None, None, None, None, None, 0, "questions with one right letter", "accuracy", ()
    )
    told = result_tables.decompositions((way,))
    assert told.lines[0][-2] == "-" and told.note.endswith("-: none of these questions counts there")
    some = dataclasses.replace(way, theirs=50.0)
    assert "none of these" not in result_tables.decompositions((some,)).note


def sample_values():
    """Yield (facet, value) of every question of the shipped sample."""
    with (SAMPLE / "cmexam/test_with_annotations.csv").open(encoding="utf-8-sig", newline="") as handle:
        for row in csv.DictReader(handle):
            yield from ((facet, row[facet]) for facet in CMEXAM if row[facet])
    for path in (SAMPLE / "cmb").glob("*.json"):
        for row in json.loads(path.read_text(encoding="utf-8")):
            yield from ((facet, row[facet]) for facet in CMB if row.get(facet))


def assert_named(values):
    for facet, value in sorted(set(values)):
        name = breakdowns.define(facet).recognise(value)
        assert name.en and not CHINESE.search(name.en), (facet, value, name)
        assert CHINESE.search(name.zh), (facet, value, name)


def test_every_value_of_the_sample_has_a_name_in_both_languages():
    values = set(sample_values())
    assert len(values) > 60
    assert_named(values)


@pytest.mark.skipif(not RELEASED.is_file(), reason="CMB's released answers are not here")
def test_every_value_of_cmb_has_a_name_in_both_languages():
    rows = json.loads(RELEASED.read_text(encoding="utf-8"))
    values = {(facet, row[facet]) for row in rows for facet in CMB}
    assert len({value for facet, value in values if facet == "exam_subject"}) > 150
    assert_named(values)


def test_every_group_of_the_papers_has_a_name_in_both_languages():
    groups = [(d.facet, name.name) for d in breakdowns.definitions() for name in d.values]
    assert len([facet for facet, _ in groups if facet == "Disease Group"]) >= 27
    assert_named(groups)
    for facet in published_tables.beside("cmexam", questions()).facets:
        assert_named((facet.facet, group) for group in facet.cells)


def questions():
    with (SAMPLE / "cmexam/test_with_annotations.csv").open(encoding="utf-8-sig", newline="") as handle:
        rows = list(csv.DictReader(handle))
    options = {"A": "one", "B": "two"}
    return [
        Question(str(i), "stem", options, "A", facets={facet: row[facet] for facet in CMEXAM if row[facet]})
        for i, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    asked = questions()
    runs = {
        name: grading.grade(asked, [Prediction(one.id, f"答案: {answer}") for one in asked])
        for name, answer in (("this run", "A"), ("zeroshot.jsonl", "B"))
    }
    graded, other = runs.values()
    built = building.build(graded, "standard", {}, published=published_tables.beside("cmexam", asked))
    scores = {name: grading.score(items, "standard") for name, items in runs.items()}
    built = dataclasses.replace(
        built,
        runs=scores,
        agreement=comparison.agreement(runs),
        pairs=comparison.pairwise(runs),
        comparison=comparison.compare(other, graded, name="zeroshot.jsonl"),
        training={name: [(1, 0.1), (2, 0.3)] for name in curves.NAMES},
        identity=identity.Identity("2026-01-01", "standard", "q.jsonl", 30, prompt="style answer, template auto"),
        bridges={
            name: comparison.decompose(graded, grading.grade(asked, [i.prediction for i in graded], name), name)
            for name in ("cmmlu", "medevalkit", "huatuo2-vote")
        },
    )
    out = tmp_path_factory.mktemp("words")
    writing.write(built, runs, out, latex=True)
    return out


def shown(report, language):
    """Return the page's parts in one language, without what is hidden there; see shown_page.js."""
    if shutil.which("node") is None:
        pytest.skip("no node here to run the page's script")
    script = Path(__file__).with_name("shown_page.js")
    command = ["node", str(script), str(report / "report.html"), language]
    parts = json.loads(subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout)
    hidden = {"en": "zh", "zh": "en"}[language]
    return {
        name: re.sub(rf'<span class="(?:soft )?{hidden}">.*?</span>', "", text)
        for name, text in parts.items()
        if name not in ("data", "lang")
    }


def test_an_english_page_has_no_chinese(report):
    parts = shown(report, "en")
    assert "Cardiology" in parts["cards"] and "Emergency medicine" in parts["main"]
    chips = re.findall(r'<span class="tag"[^>]*>.*?</span>', parts["cards"])
    assert len(chips) > 40
    for name, text in parts.items():
        # The outputs themselves and the rule names of published scripts are what they are.
        own = re.sub(r"<pre.*?</pre>|data-\w+=\"[^\"]*\"|多项选择题|<code>.*?</code>", "", text, flags=re.DOTALL)
        assert not CHINESE.search(own.replace("故选C", "")), (
            name,
            CHINESE.search(own).string[:0],
            CHINESE.findall(own),
        )


def test_a_chinese_page_says_our_words_in_chinese(report):
    parts = shown(report, "zh")
    assert "心内科" in parts["cards"]
    text = " ".join(parts.values())
    text = re.sub(r"data-\w+=\"[^\"]*\"|<code>.*?</code>|<pre.*?</pre>", "", text, flags=re.DOTALL)
    for words in (
        "this run",
        "This run",
        "style answer",
        "template auto",
        "Human volunteers",
        "four options, one right letter",
        "all but those printed",
        "Overall comparison",
        "Comparing",
    ):
        assert words not in text, (words, text[text.find(words) - 200 : text.find(words) + 50])
    assert "本次模型" in parts["first"] and "本次模型" in parts["run"]
    assert "CMExam 总体对比" in text


def test_every_curve_of_a_training_is_drawn_and_named(report):
    """Supervised or rewarded: whatever `curves` takes from the log."""
    for language in ("en", "zh"):
        page = shown(report, language)
        for figure in curves.FIGURES:
            assert str(figure.title if language == "en" else figure.title.zh) in page["main"]
            assert page[f"curve-{figure.key}"].count("<path") == len(figure.names)


def test_a_difference_says_which_is_subtracted_from_which(report):
    """The tuned run has answers A, all that is right; its baseline B."""
    for name in ("report.md", "report.tex"):
        text = (report / name).read_text(encoding="utf-8")
        assert text.count("second minus first") >= 2, name
        assert "zeroshot.jsonl" in text and "Each two runs" not in text
    markdown = (report / "report.md").read_text(encoding="utf-8")
    assert "zeroshot.jsonl \\| this run: " in markdown
    assert "| this run \\| zeroshot.jsonl | -" in markdown
    page = shown(report, "en")["main"]
    assert page.count("second minus first") >= 3 and "→ zeroshot" not in page
    assert "后者减前者" in shown(report, "zh")["main"]


def test_names_that_people_gave_are_not_translated(report):
    assert "zeroshot.jsonl" in shown(report, "zh")["first"]


def test_a_baseline_has_a_row_of_its_own():
    asked = questions()
    runs = [[Prediction(one.id, f"答案: {letter}", letter) for one in asked] for letter in "AB"]
    against = evaluate(runs[0], asked, baseline=runs[1])
    lines = {line[0]: line for line in result_tables.headline(against).lines}
    assert list(lines) == ["this run", "the baseline"]
    assert against.comparison.scores["accuracy_ci"]
    assert [line[0] for line in result_tables.tables(against)[0].lines] == list(lines)


def test_cards_tell_what_the_record_says(tmp_path):
    """How an output ended, what it had read, how sure the model was; nothing where nothing is known."""
    exam = [Question(f"q{i}", f"题{i}", {"A": "甲", "B": "乙"}, "A") for i in range(3)]
    lines = [
        Prediction("q0", "答案: B", "B", finish="length", context=("p<1>", "p2")),
        Prediction("q1", "B", "B", probabilities={"A": 0.2, "B": 0.8}),
        Prediction("q2", "答案: B", "B"),
    ]
    evaluate(lines, exam, tmp_path)
    cards = shown(tmp_path, "en")["cards"].split("</article>")
    assert re.findall(r"</span> <code>(.*?)</code>", cards[0]) == ["length", "p&lt;1&gt;, p2"]
    assert "ended by" in cards[0] and "passages" in cards[0]
    assert "<code>B 0.8, A 0.2</code>" in cards[1]
    assert "<code>" not in cards[2]
    assert "参考段落" in shown(tmp_path, "zh")["cards"]
