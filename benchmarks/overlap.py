"""How long `check` takes for CMB-train against both test sets, and what it finds of planted duplicates.

The questions are generated: random characters with the lengths of real ones, and among them copies (options in another
order, other punctuation) and paraphrases of known Jaccard similarity.
"""

import argparse
import json
import platform
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from cmexam_tune.check import check
from cmexam_tune.core import jsonl
from cmexam_tune.core.normalise import jaccard, question_text
from cmexam_tune.core.schema import Question

CHARACTERS = [chr(code) for code in range(0x4E00, 0x4E00 + 2500)]
BEGINNINGS = ("下列关于{}的叙述，错误的是", "患者，男，45岁。{}。最可能的诊断是", "{}的主要作用是", "属于{}的是")
BANDS = ((0.7, 0.8), (0.8, 0.9), (0.9, 1.0))


def words(rng: random.Random, length: int) -> str:
    """Return text of common characters, some far more common than others."""
    return "".join(CHARACTERS[min(int(rng.paretovariate(0.6)) - 1, len(CHARACTERS) - 1)] for _ in range(length))


def question(rng: random.Random, name: str) -> Question:
    """Return a question with the lengths of a real one."""
    stem = rng.choice(BEGINNINGS).format(words(rng, rng.choice((8, 12, 20, 35, 80))))
    options = {letter: words(rng, rng.randint(4, 14)) for letter in "ABCDE"}
    return Question(name, stem, options, rng.choice("ABCDE"))


def copied(rng: random.Random, one: Question, name: str) -> Question:
    """Return the same question with its options in another order and other punctuation."""
    order = rng.sample(sorted(one.options), len(one.options))
    options = {
        letter: one.options[old] + rng.choice(("", "。", " ")) for letter, old in zip("ABCDE", order, strict=True)
    }
    return Question(name, one.stem.replace("，", " , "), options, "ABCDE"[order.index(one.answer or "A")])


def paraphrased(rng: random.Random, one: Question, name: str) -> Question:
    """Return the question with some characters of its stem and options replaced."""
    changes = rng.choice((1, 2, 3, 4))
    texts = [one.stem, *one.options.values()]
    for _ in range(changes):
        which = rng.randrange(len(texts))
        place = rng.randrange(len(texts[which]))
        texts[which] = texts[which][:place] + words(rng, 1) + texts[which][place + 1 :]
    return Question(name, texts[0], dict(zip(one.options, texts[1:], strict=True)), one.answer)


def main() -> None:
    """Print times and recall, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=269_359)
    parser.add_argument("--tests", type=int, nargs="+", default=[11_200, 68_119])
    parser.add_argument("--planted", type=int, default=4000, help="copies, and as many paraphrases")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        tests = [[question(rng, f"t{n}:{i}") for i in range(count)] for n, count in enumerate(args.tests)]
        train = [question(rng, f"q:{i}") for i in range(args.train - 2 * args.planted)]
        pool = rng.sample([one for part in tests for one in part], 2 * args.planted)
        copies = {f"copy:{i}": (copied(rng, one, f"copy:{i}"), one) for i, one in enumerate(pool[: args.planted])}
        others = {f"para:{i}": (paraphrased(rng, one, f"para:{i}"), one) for i, one in enumerate(pool[args.planted :])}
        train += [made for made, _ in (*copies.values(), *others.values())]
        rng.shuffle(train)
        paths = [Path(folder) / f"{name}.questions.jsonl" for name in ("train", *(f"t{n}" for n in range(len(tests))))]
        for path, part in zip(paths, (train, *tests), strict=True):
            jsonl.write(path, part)
        planted = {**copies, **others}
        del train, tests, pool
        start, cpu = time.perf_counter(), time.process_time()
        result = check([paths[0]], paths[1:], Path(folder) / "out")
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    found = {(one.id, one.other_id): one.reason for one in result.overlaps}
    exact = [found.get((name, one.id)) in ("exact", "contradiction") for name, (_, one) in copies.items()]
    recall: dict[str, Counter[bool]] = {}
    for name, (made, one) in others.items():
        score = jaccard(question_text(made.stem, made.options), question_text(one.stem, one.options))
        for low, high in BANDS:
            if low <= score < high:
                recall.setdefault(f"{low} to {high}", Counter())[(name, one.id) in found] += 1
    strange = [pair for pair, reason in found.items() if reason in ("exact", "near") and pair[0] not in planted]
    figures = {
        "questions": args.train,
        "against": sum(args.tests),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "exact_found": f"{sum(exact)} of {len(exact)}",
        "near_found": {band: f"{counts[True]} of {counts.total()}" for band, counts in sorted(recall.items())},
        "found_but_not_planted": len(strange),
        "pairs": {reason: sum(counts.values()) for reason, counts in result.to_dict()["pairs"].items()},
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    text = json.dumps(figures, ensure_ascii=False, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
