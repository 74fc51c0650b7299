"""BLEU and ROUGE against sacreBLEU, rouge-score and plain definitions."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.evaluation import text_metrics

ROOT = Path(__file__).resolve().parents[1]
ALPHABET = "心力衰竭急性加重最常见的诱因是呼吸道感染。，A12 b\n"


def _texts(seed, count=150, longest=60):
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(longest))) for _ in range(count)]


HYPOTHESES = [*_texts(1), "", "甲", "甲乙丙", "   ", "😀𠮷甲", "\ud800x"]
REFERENCES = [*_texts(2), "甲", "甲甲甲", "甲乙丙", "甲", "😀甲𠮷", "x\ud800"]


@pytest.mark.parametrize("unit", ["char", "jieba", "zh"])
def test_every_pair_equals_rouge_score(unit):
    from rouge_score.rouge_scorer import RougeScorer

    class Tokenizer:
        def tokenize(self, text):
            return list(text_metrics.tokenizer(unit)(text))

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=Tokenizer())
    pairs = list(zip(HYPOTHESES, REFERENCES, strict=True))[: None if unit == "char" else -1]
    stats = text_metrics.pair_statistics(*zip(*pairs, strict=True), unit=unit)
    for (hypothesis, reference), pair in zip(pairs, stats, strict=True):
        for name, expected in scorer.score(reference, hypothesis).items():
            assert getattr(pair, name) == pytest.approx(tuple(expected), abs=1e-9)


@pytest.mark.parametrize("unit", ["char", "zh"])
@pytest.mark.parametrize("count", [1, 7, 150])
def test_corpus_bleu_equals_sacrebleu(unit, count):
    from sacrebleu.metrics import BLEU

    hypotheses, references = HYPOTHESES[:count], REFERENCES[:count]
    scores = text_metrics.aggregate(text_metrics.pair_statistics(hypotheses, references, unit=unit))
    for n in (1, 2, 4):
        expected = BLEU(tokenize=unit, max_ngram_order=n).corpus_score(hypotheses, [references]).score
        assert scores[f"bleu{n}"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("hypothesis", "reference"), [("甲乙", "丙丁"), ("甲", "甲乙丙"), ("甲丙乙", "甲乙丙"), ("", "甲")]
)
def test_small_corpora_equal_sacrebleu(hypothesis, reference):
    from sacrebleu.metrics import BLEU

    stats = text_metrics.pair_statistics([hypothesis], [reference])
    for n in (1, 2, 4):
        expected = BLEU(tokenize="char", max_ngram_order=n).corpus_score([hypothesis], [[reference]]).score
        assert text_metrics.aggregate(stats)[f"bleu{n}"] == pytest.approx(expected, abs=1e-9)


def test_matches_are_clipped_counts_over_any_number_of_pairs():
    for hypothesis, reference, matches in text_metrics.matched(HYPOTHESES, REFERENCES, lambda text: text):
        for n in range(4):
            h, r = (Counter(text[i : i + n + 1] for i in range(len(text) - n)) for text in (hypothesis, reference))
            assert matches[n] == (h & r).total()


def test_counting_stays_exact_beyond_64_bits():
    # 60,000 different symbols: four of them and a pair index need more than 63 bits.
    symbols = "".join(map(chr, range(0x10000, 0x10000 + 60_000)))
    ((_, _, matches),) = text_metrics.matched([symbols], [symbols[:30_000] + symbols[30_001:]], lambda text: text)
    assert matches == (59_999, 59_997, 59_995, 59_993)


def test_identity_order_and_subsets():
    same = text_metrics.aggregate(text_metrics.pair_statistics(["感染是最常见的诱因"] * 3, ["感染是最常见的诱因"] * 3))
    assert list(same.values()) == pytest.approx([100] * len(same))
    stats = text_metrics.pair_statistics(HYPOTHESES, REFERENCES)
    assert stats[40:60] == text_metrics.pair_statistics(HYPOTHESES[40:60], REFERENCES[40:60])
    assert text_metrics.aggregate(stats[::-1]) == pytest.approx(text_metrics.aggregate(stats))
    assert set(text_metrics.aggregate([]).values()) == {None}


def test_unsmoothed_bleu_is_zero_without_a_match_of_some_order():
    stats = text_metrics.pair_statistics(["甲丙乙"], ["甲乙丙"])
    assert text_metrics.aggregate(stats, "none")["bleu2"] == 0
    assert text_metrics.aggregate(stats)["bleu2"] > 0


def test_signature_names_tokeniser_level_smoothing_and_versions():
    for unit in ("char", "jieba", "zh"):
        lines = text_metrics.signature(unit)
        assert set(lines) == {"bleu1", "bleu2", "bleu4", "rouge1", "rouge2", "rougeL"}
        assert all(f"tok:{unit}" in line and "level:" in line and "version:" in line for line in lines.values())
        assert "smooth:exp" in lines["bleu4"]


def test_tokenisers_that_drop_chinese_are_refused():
    from rouge_score.tokenizers import DefaultTokenizer

    with pytest.raises(ConfigError, match="drops Chinese"):
        text_metrics.pair_statistics(["甲"], ["甲"], unit=DefaultTokenizer().tokenize)
    assert text_metrics.pair_statistics(["甲 乙"], ["甲 乙"], unit=str.split)[0].reference_length == 2
    with pytest.raises(ConfigError, match="did you mean 'jieba'"):
        text_metrics.tokenizer("jeiba")


def test_as_many_hypotheses_as_references():
    with pytest.raises(ValueError, match="2 hypotheses for 1 references"):
        text_metrics.pair_statistics(["甲", "乙"], ["甲"])


def test_local_metric_of_the_evaluate_library(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    evaluate = pytest.importorskip("evaluate")
    path = ROOT / "cmexam_tune" / "interop" / "exam_text.py"
    metric = evaluate.load(str(path), cache_dir=str(tmp_path))
    pairs = [(h, r) for h, r in zip(HYPOTHESES[:20], REFERENCES[:20], strict=True) if r.strip()]
    hypotheses, references = zip(*pairs, strict=True)
    result = metric.compute(predictions=hypotheses, references=references)
    expected = text_metrics.aggregate(text_metrics.pair_statistics(hypotheses, references))
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert "tok:char" in result["signature"]["bleu4"]
    words = metric.compute(predictions=hypotheses, references=references, unit="jieba")
    assert words["bleu1"] != result["bleu1"]


def test_benchmark_runs_on_the_sample(tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "benchmarks/metrics.py", "--limit", "20", "--json", str(tmp_path / "times.json")]
    subprocess.run(command, check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    result = json.loads((tmp_path / "times.json").read_text())
    assert result["pairs"] == 20
    assert result["largest_difference"] < 1e-9
