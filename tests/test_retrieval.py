"""Passages before questions: BM25 equals another implementation, leaks are found and refused, prompts hold them."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from kit import make_config

from cmexam_tune import check, config
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.inference import answering
from cmexam_tune.predict import predict
from cmexam_tune.prompts import retrieval
from cmexam_tune.prompts.retrieval import K1, B, Bm25, Passage, bigrams
from cmexam_tune.quality.passages import leaks

TOPICS = [
    f"{organ}{what}" for organ in ("胃溃疡", "肺结核", "肾炎", "糖尿病") for what in ("首选药物", "典型症状", "并发症")
]


def passages_of(count, seed=0):
    dice = random.Random(seed)
    return [
        Passage(f"p{i}", "，".join(dice.choices(TOPICS, k=dice.randrange(2, 12))) + f"见教材第{i}页。")
        for i in range(count)
    ]


def exam_of():
    stems = (
        "肺结核的典型症状是下列哪一项最常见",
        "糖尿病的首选药物应该选择下列哪一种",
        "肾炎最常见的并发症是下列哪一项",
    )
    explanations = (
        "午后低热、盗汗、乏力、消瘦为全身中毒症状，咳嗽咳痰咯血为呼吸道症状。",
        None,
        "心力衰竭与高血压脑病均可发生，故选C。",
    )
    options = {"A": "低热盗汗", "B": "二甲双胍", "C": "心力衰竭"}
    return [
        Question(f"r:{i}", stem, options, "ABC"[i], explanation)
        for i, (stem, explanation) in enumerate(zip(stems, explanations, strict=True))
    ]


def by_the_formula(passages, text):
    """BM25 as it is written down, passage by passage (Lucene's inverse document frequency)."""
    own = [bigrams(passage.text) for passage in passages]
    mean = sum(sum(counts.values()) for counts in own) / len(own)
    scores = []
    for counts in own:
        score = 0.0
        for pair, times in bigrams(text).items():
            holding = sum(pair in other for other in own)
            rarity = math.log(1 + (len(own) - holding + 0.5) / (holding + 0.5))
            length = 1 - B + B * sum(counts.values()) / mean
            score += times * rarity * counts[pair] / (counts[pair] + K1 * length)
        scores.append(score)
    return scores


def test_scores_are_the_formulas():
    passages = passages_of(40)
    index = Bm25(passages)
    for text in ("肺结核典型症状", "糖尿病糖尿病首选药物见教材第7页", "毫不相干"):
        assert list(index.scores([text])) == pytest.approx(by_the_formula(passages, text))
    assert bigrams("胃，溃疡。") == Counter({"胃溃": 1, "溃疡": 1}) and bigrams("胃") == Counter({"胃": 1})
    assert index.best(Question("x", "ＸＹＺＱ", {"A": "！", "B": "？"}, "A"), 3) == []


def test_scores_are_those_of_bm25s():
    bm25s = pytest.importorskip("bm25s", reason="the second implementation is not installed")
    passages = passages_of(60, 3)
    other = bm25s.BM25(method="lucene", k1=K1, b=B)
    other.index([list(bigrams(passage.text).elements()) for passage in passages], show_progress=False)
    for text in TOPICS:
        theirs = other.get_scores(list(bigrams(text)))
        assert np.allclose(Bm25(passages).scores([text]), theirs, atol=1e-4)


def test_long_passages_are_cut_before_short_ones():
    passages = [Passage("a", "长" * 100), Passage("b", "短" * 4), Passage("c", "中" * 30)]
    said = retrieval.words(passages, 44)
    assert (said.count("长"), said.count("短"), said.count("中")) == (20, 4, 20)
    assert retrieval.words([], 10) == "" and retrieval.words(passages, 500).count("长") == 100


def test_planted_passages_are_found_and_no_others():
    exam, dice = exam_of(), random.Random(1)
    passages = passages_of(300, 5)
    planted = {
        17: f"题库解析：{exam[0].explanation}", 99: f"【题】{exam[1].stem}？答：B", 222: exam[2].stem + "……",
        280: (exam[0].explanation or "")[: 24],
    }  # fmt: skip
    for place, text in planted.items():
        passages[place] = Passage(passages[place].id, passages_of(1, dice.randrange(99))[0].text + text)
    found = {leak.passage_id: (leak.question_id, leak.what) for leak in leaks(passages, exam)}
    assert found == {
        "p17": ("r:0", "explanation"), "p99": ("r:1", "stem"), "p222": ("r:2", "stem"), "p280": ("r:0", "explanation"),
    }  # fmt: skip


@pytest.fixture
def files(tmp_path):
    exam, passages = exam_of(), passages_of(50)
    jsonl.write(tmp_path / "q.questions.jsonl", exam)
    jsonl.write(tmp_path / "books.jsonl", passages)
    jsonl.write(tmp_path / "bank.jsonl", [*passages, Passage("bank:1", exam[0].explanation)])
    return tmp_path


def test_passages_stand_in_front_and_are_noted(files):
    exam = exam_of()
    context = {"passages": str(files / "books.jsonl"), "k": 2}
    asked = make_config(prompt__context=context, generation__mode="likelihood")
    builder = answering.prompt_builder(asked, exam)
    text = builder.request(exam[0]).dialogue().prompt_text
    assert text.startswith(retrieval.HEAD + "[1] ") and "\n[2] " in text and "[3]" not in text
    assert text.endswith(answering.prompt_builder(make_config(), exam).request(exam[0]).dialogue().prompt_text)
    best = builder.passages(exam[0])
    assert all("肺结核" in passage.text for passage in best)
    out = predict(asked, files / "q.questions.jsonl", files / "with.jsonl")
    lines = list(jsonl.read(out, Prediction))
    assert lines[0].context == tuple(passage.id for passage in best) and all(len(line.context) == 2 for line in lines)
    without = predict(make_config(generation__mode="likelihood"), files / "q.questions.jsonl", files / "without.jsonl")
    evaluate([out, without], files / "q.questions.jsonl", files / "report")
    values = json.loads((files / "report" / "report.json").read_text(encoding="utf-8"))
    assert [use["passages"] for use in values["context"]] == [2, 0]
    assert "2 passages of books.jsonl by bm25" in values["identity"]["prompt"]
    # Another file of passages is another experiment.
    jsonl.write(files / "books.jsonl", passages_of(50, 9), overwrite=True)
    with pytest.raises(UserError, match="other context_sha256"):
        predict(asked, files / "q.questions.jsonl", files / "with.jsonl")


def test_the_banks_own_explanations_are_refused_unless_said(files):
    exam = exam_of()
    leaking = {"passages": str(files / "bank.jsonl")}
    with pytest.raises(UserError, match=r"1 of the 51 passages .*'bank:1' the explanation of 'r:0'.*check --questions"):
        answering.prompt_builder(make_config(prompt__context=leaking), exam)
    builder = answering.prompt_builder(make_config(prompt__context={**leaking, "leaks": True}), exam)
    assert "bank:1" in [passage.id for passage in builder.passages(exam[0])]
    found = check.check([files / "q.questions.jsonl"], out=files / "checked", passages=files / "bank.jsonl")
    assert [(leak.passage_id, leak.question_id) for leak in found.leaks] == [("bank:1", "r:0")]
    clean = files / "checked" / "bank.clean.passages.jsonl"
    assert clean.read_bytes() == (files / "books.jsonl").read_bytes()
    answering.prompt_builder(make_config(prompt__context={"passages": str(clean)}), exam)


def test_mistakes_and_the_reference_of_settings(files):
    with pytest.raises(ConfigError, match=r"prompt\.context\.k: .*got 0"):
        make_config(prompt__context={"passages": "x", "k": 0})
    with pytest.raises(ConfigError, match=r"prompt\.context\.by: 'embedding' is not a choice"):
        make_config(prompt__context={"passages": "x", "by": "embedding"})
    with pytest.raises(ConfigError, match=r"prompt\.context.*passages: required key is missing|context\.passages"):
        make_config(prompt__context={"k": 2})
    from cmexam_tune.config import describing

    schema = json.dumps(describing.json_schema())
    assert "$ref" not in schema and '"passages": {' in schema
    bert = make_config("bert", prompt__context={"passages": str(files / "books.jsonl")}, tuning={"method": "head"})
    from cmexam_tune.models.families import Family

    with pytest.raises(ConfigError, match="reads no passages"):
        Family.named("bert").engine(None, bert)
    assert (
        config.load_config("zeroshot_qwen", ["prompt.context.passages=a.jsonl", "prompt.context.k=5"]).prompt.context.k
        == 5
    )
