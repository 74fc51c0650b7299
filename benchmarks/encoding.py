"""Encoding as many questions as CMB-train has: memory of a process, and the start of a run whose cache is ready.

Each side runs in a process of its own: lists of Python integers (as one would hold them), and the memory-mapped tables
of `cmexam_tune.training.data.encoding`, first made and then found in the cache.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CMB_TRAIN = 269_359


def write_questions(path, count):
    """Write questions of about CMB-train's size: 300 tokens for a tokenizer of Chinese characters."""
    from cmexam_tune.core import jsonl
    from cmexam_tune.core.schema import Question
    from cmexam_tune.tiny import texts

    words = "".join(character for text in texts() for character in text if "一" <= character <= "鿿")

    def made():
        for i in range(count):
            start = i * 37 % (len(words) - 400)
            options = {letter: words[start + 9 * n : start + 9 * n + 8] for n, letter in enumerate("ABCDE")}
            stem, explanation = words[start : start + 60 + i % 40], words[start + 100 : start + 200 + i % 60]
            yield Question(f"q:{i}", stem, options, "ABCDE"[i % 5], explanation)

    jsonl.write(path, made())


def world(folder):
    """Return config, family, model and questions of the run that is measured."""
    from cmexam_tune.config import parse_config
    from cmexam_tune.models.families.llama import Llama

    llama = Llama()
    from cmexam_tune.training.data.questions import QuestionFiles

    config = parse_config({
        "data": {"train": [f"{folder}/train.jsonl"]},
        "prompt": {"style": "answer_explain", "max_source_length": 512, "max_target_length": 512},
        "model": {"family": "llama", "model_name_or_path": f"{folder}/model"},
        "tuning": {"method": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05},
        "out": f"{folder}/run",
    })  # fmt: skip
    return config, llama, llama.load(config.model), QuestionFiles((f"{folder}/train.jsonl",))


def measure(side, folder):
    """Print seconds, megabytes above the loaded model, and tokens of one side as JSON."""
    config, family, loaded, questions = world(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if side == "lists":
        encoded = family.encode(loaded, list(questions), config.prompt, config.model)
        tokens = sum(len(row["input_ids"]) for row in encoded.rows)
    else:
        from cmexam_tune.training.data import encoding

        encoder = encoding.Encoder(config.prompt, config.model, family, loaded, Path(folder) / "cache")
        tokens = sum(encoder.encode(questions).lengths)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "megabytes": (peak - before) / 1024, "whole": peak / 1024, "tokens": tokens}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=CMB_TRAIN, help="questions (default: as CMB-train, %(default)s)")
    parser.add_argument("--lists", type=int, default=20_000, help="questions of the side with lists (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        measure(*options.job)
        return
    from cmexam_tune import tiny

    figures = {}
    for count, sides in ((options.lists, ("lists",)), (options.count, ("made", "found"))):
        with tempfile.TemporaryDirectory() as folder:
            tiny.build("llama", f"{folder}/model")
            write_questions(f"{folder}/train.jsonl", count)
            for side in sides:
                command = [sys.executable, __file__, "--job", side, folder]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                figures[side] = {"questions": count, **json.loads(done.stdout.splitlines()[-1])}
                found = figures[side]
                print(
                    f"{side:6} {count:,} questions, {found['tokens']:,} tokens: {found['seconds']:.1f} s, "
                    f"{found['megabytes']:,.0f} MB above the model, "
                    f"{found['megabytes'] * 2**20 / found['tokens']:.1f} bytes a token",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
