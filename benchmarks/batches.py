"""Prompts of very different lengths, one by one, in full batches, and in the batches that prediction makes of them.

All sides in one run, so that the ratios hold on a busy machine too; times are of the CPU. Padding is computed like any
other token: full batches of long prompts are slower than one prompt at a time. The model is random.

    python benchmarks/batches.py --json batches.json
"""

import argparse
import json
import math
import os
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from cmexam_tune import config, tiny
from cmexam_tune.core.schema import Question
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.generation import decoder
from cmexam_tune.prompts import PromptRequest

LENGTHS = {"exam questions": (60, 200), "explained": (50, 600), "cases": (900, 1800), "mixed": (60, 1800)}
"""Kind of prompts -> shortest and longest, in tokens; cases are those of CMB-Clin with the turns before."""
WRITTEN = 24
SIDES = {"one by one": (1, math.inf), "full batches": (8, math.inf), "now": (8, decoder.PASS_ON_CPU)}
"""Side -> `generation.batch_size`, and the tokens that a forward pass is taken to cost."""


def requests(shortest: int, longest: int, vocab: int, count: int) -> list[PromptRequest]:
    """Prompts of random tokens, their lengths evenly spread."""
    rng = random.Random(0)
    lengths = [shortest + (longest - shortest) * i // (count - 1) for i in range(count)]
    rng.shuffle(lengths)
    questions = [Question(str(i), "-", {letter: letter for letter in "ABCDE"}, None) for i in range(count)]
    return [
        PromptRequest(question, lambda _: "", ids=tuple(rng.choices(range(10, vocab), k=length)))
        for question, length in zip(questions, lengths, strict=True)
    ]


def measure(asked: list[PromptRequest], mode: str, longest: int, model: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each side, the ratios to one by one, and how many answers all sides give alike."""
    family = Llama()
    values: dict[str, Any] = {
        "prompt": {"style": "answer", "max_source_length": longest},
        "model": {"family": "llama", "model_name_or_path": str(model)},
        "tuning": {"method": "full"},
        "out": "-",
    }
    loaded = family.load(config.parse_config(values).model)
    fixed = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN} if mode == "generate" else {}
    seconds, answers = dict.fromkeys(SIDES, math.inf), list[dict[str, str]]()
    for side, (size, padding) in list(SIDES.items()) * rounds:
        decoder.PASS_ON_CPU = padding
        values["generation"] = {"mode": mode, "batch_size": size, **fixed}
        engine = family.engine(loaded, config.parse_config(values))
        started = time.process_time()
        answers.append({completion.request.question.id: completion.text for completion in engine.answer(asked)})
        seconds[side] = min(seconds[side], time.process_time() - started)
    alone = seconds["one by one"]
    same = sum(len({texts[request.question.id] for texts in answers}) == 1 for request in asked)
    return {
        "seconds": seconds,
        "full_ratio": seconds["full batches"] / alone,
        "ratio": seconds["now"] / alone,
        "same_answers": f"{same} of {len(asked)}",
    }


def main() -> None:
    """Measure all kinds in two modes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--count", type=int, default=16, help="prompts of each kind")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="times that each side is measured; the fastest counts")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    figures = {}
    print("| prompts, tokens | mode | one by one, s | full batches | now | full to one by one | now to it | same |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.build("llama", Path(folder) / "model", hidden=arguments.hidden, layers=arguments.layers)
        vocab = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        for kind, (shortest, longest) in LENGTHS.items():
            asked = requests(shortest, longest, vocab, arguments.count)
            for mode in ("generate", "likelihood"):
                row = figures[f"{kind}, {mode}"] = measure(asked, mode, longest, model, arguments.rounds)
                times = " | ".join(f"{value:.2f}" for value in row["seconds"].values())
                ratios = f"{row['full_ratio']:.2f} | {row['ratio']:.2f} | {row['same_answers']}"
                print(f"| {kind}, {shortest} to {longest} | {mode} | {times} | {ratios} |", flush=True)
    if arguments.json:
        machine = {"platform": platform.platform(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        report = {"benchmark": "batches", "ways": figures, "versions": versions, "machine": machine}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
