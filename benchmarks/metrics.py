"""BLEU and ROUGE of Chinese explanations: this project's, rouge-score's and sacreBLEU's, values and seconds in one run.

    python benchmarks/metrics.py --questions data/cmexam/val.questions.jsonl [--json times.json]

Each reference is an explanation of the questions file; each hypothesis is that explanation with 30% of its characters
deleted and 10% replaced (seeded). Without `--questions` the sample is used. rouge-score's LCS is quadratic in Python,
so `--limit` shortens the run. All three run in one process on one core, on characters; ours is the best of three runs,
the others are run once.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import text_metrics

ROUGES = ("rouge1", "rouge2", "rougeL")


class Characters:
    """rouge-score's tokeniser interface with this project's characters."""

    def tokenize(self, text: str) -> list[str]:
        return list(text_metrics.tokenizer("char")(text))


def corrupted(references: Sequence[str], seed: int = 7) -> list[str]:
    rng = random.Random(seed)
    result = []
    for i, text in enumerate(references):
        other = references[(i + 1) % len(references)]
        draws = [(rng.random(), char) for char in text]
        result.append("".join(rng.choice(other) if u < 0.4 else char for u, char in draws if u >= 0.3))
    return result


def references_of(path: Path | None) -> list[str]:
    if path is None:
        from cmexam_tune.exams import cmexam

        folder = Path(cmexam.__file__).parents[1] / "sample" / "cmexam"
        questions = list(cmexam.read(sorted(folder.glob("*.csv"))))
    else:
        questions = list(jsonl.read(path, Question))
    return [question.explanation for question in questions if question.explanation]


def timed(function: Callable[[], Any], runs: int = 1) -> tuple[Any, float]:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - start)
    return result, best


def compare(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    ours = timed(lambda: text_metrics.aggregate(text_metrics.pair_statistics(hypotheses, references)), runs=3)
    scorer = RougeScorer(ROUGES, tokenizer=Characters())
    pairs, rouge_seconds = timed(lambda: [scorer.score(r, h) for h, r in zip(hypotheses, references, strict=True)])
    rouge = {name: 100 * sum(pair[name].fmeasure for pair in pairs) / len(pairs) for name in ROUGES}
    bleu, bleu_seconds = timed(
        lambda: {
            f"bleu{n}": BLEU(tokenize="char", max_ngram_order=n).corpus_score(hypotheses, [references]).score
            for n in text_metrics.BLEU_ORDERS
        }
    )
    return {
        "pairs": len(references),
        "mean_characters": sum(map(len, references)) / len(references),
        "ours": ours[0],
        "rouge_score": rouge,
        "sacrebleu": bleu,
        "largest_difference": max(abs(ours[0][name] - value) for name, value in {**rouge, **bleu}.items()),
        "seconds": {"ours_bleu_and_rouge": ours[1], "rouge_score": rouge_seconds, "sacrebleu": bleu_seconds},
        "times_as_fast_as_rouge_score": rouge_seconds / ours[1],
        "times_as_fast_as_both": (rouge_seconds + bleu_seconds) / ours[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="questions file with explanations (default: the sample)")
    parser.add_argument("--limit", type=int, help="only the first N explanations")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    references = references_of(arguments.questions)[: arguments.limit]
    result = compare(corrupted(references), references)
    seconds = result["seconds"]
    print(f"{result['pairs']} pairs, mean {result['mean_characters']:.0f} characters")
    print(f"{'':<8}{'ours':>10}{'library':>10}")
    for name, value in {**result["sacrebleu"], **result["rouge_score"]}.items():
        print(f"{name:<8}{result['ours'][name]:>10.4f}{value:>10.4f}")
    print(f"largest difference {result['largest_difference']:.1e}")
    print(f"seconds: ours {seconds['ours_bleu_and_rouge']:.2f} (BLEU-1/2/4 and ROUGE-1/2/L together), ", end="")
    print(f"rouge-score {seconds['rouge_score']:.2f}, sacrebleu {seconds['sacrebleu']:.2f}")
    print(f"ours is {result['times_as_fast_as_rouge_score']:.0f} times as fast as rouge-score for the three ROUGE")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
