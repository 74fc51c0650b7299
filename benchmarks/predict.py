"""Prediction of exam answers: the original repository's way beside ours, generated, constrained and by likelihood.

    python benchmarks/predict.py [--questions data/cmexam/val.questions.jsonl] [--json times.json]

The original predicts one question at a time, its prompt padded to 256 tokens, with up to 256 new tokens, greedily. Ours
sorts by length and answers batches. All four run in one process on the same model; the original's way, by far the
slowest, answers a random part of the questions (`--original-count`), ours all of them, and the ratios compare seconds a
question. The original's way is the installed transformers' own `generate`. The model is random (hidden 512, 8 layers,
vocabulary 32,000) and tuned here, shortly, to write its answer and stop: how often it is right does not matter, how
soon it stops does, and that is printed too. Training is not part of any time. Without `--questions` the sample is used;
on a GPU try `--device cuda --dtype bfloat16 --batch-size 128`.

At the end the same questions are asked after three worked examples (`prompt.shots=3`), once with the examples read for
each question and once with their keys and values computed once: the ratio of the two, and how many texts are the same.
"""

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
import vocabulary

from cmexam_tune import config, prompts, tiny
from cmexam_tune.config import Config
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.exams import cmexam
from cmexam_tune.models.completion import to_prediction
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.generation import kv_cache
from cmexam_tune.prompts import PromptBuilder

llama = Llama()

WIDTH, NEW_TOKENS = 256, 256
SAMPLE = Path(tiny.__file__).parent / "sample" / "cmexam"


def read(path: str | None) -> list[Question]:
    return list(jsonl.read(path, Question)) if path else list(cmexam.read(sorted(SAMPLE.glob("*.csv"))))


def first(found: Sequence[Question], count: int) -> list[Question]:
    """The first questions, over and over under new ids if there are fewer."""
    rounds = (found[i % len(found)] for i in range(count))
    return [Question(f"{i}", q.stem, q.options, q.answer, q.explanation) for i, q in enumerate(rounds)]


def settings(folder: Path, arguments: argparse.Namespace, mode: str) -> Config:
    return config.parse_config(
        {
            "prompt": {"style": "answer", "max_source_length": WIDTH, "max_target_length": NEW_TOKENS},
            "model": {"family": "llama", "model_name_or_path": str(folder)},
            "tuning": {"method": "full"},
            "generation": {"mode": mode, "batch_size": arguments.batch_size},
            "out": "unused",
        }
    )


def tune(loaded: Loaded, questions: Sequence[Question], setup: Config, steps: int) -> None:
    """Teach the model to write an answer and EOS; only the label positions go through the output layer."""
    rows = llama.encode(loaded, questions, setup.prompt, setup.model).rows
    model: Any = loaded.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model.train()
    for step in range(steps):
        some = [[rows[(4 * step + i) % len(rows)]] for i in range(4)]
        batch = {name: value.to(model.device) for name, value in llama.collate(loaded, some).items()}
        labels = batch.pop("labels")[:, 1:]
        hidden = model.model(**batch).last_hidden_state[:, :-1]
        chosen = labels != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]).float(), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"\rtuning: step {step} of {steps}, loss {float(loss.detach()):.3f}", end="", flush=True)
    print()
    model.eval()


def original(loaded: Loaded, questions: Sequence[Question], setup: Config) -> Iterator[Prediction]:
    """One question at a time, padded or cut to 256 tokens, up to 256 new tokens."""
    tokenizer: Any = loaded.tokenizer
    tokenizer.padding_side = "left"
    for item in llama.engine(loaded, setup).ask(prompts.default_prompts(questions, setup)):
        inputs = tokenizer.pad({"input_ids": [item.ids[:WIDTH]]}, padding="max_length", max_length=WIDTH)
        tensors = {
            name: torch.tensor(inputs[name], device=loaded.model.device) for name in ("input_ids", "attention_mask")
        }
        with torch.inference_mode():
            out = loaded.model.generate(**tensors, max_new_tokens=NEW_TOKENS, do_sample=False)
        yield Prediction(item.question.id, tokenizer.decode(out[0, WIDTH:], skip_special_tokens=True))


def timed(predictions: Iterable[Prediction], device: str) -> tuple[float, float, dict[str, str]]:
    """Seconds on the clock, seconds of CPU time (which other programs on the machine do not change), and the texts."""
    started, computed = time.perf_counter(), time.process_time()
    texts = {prediction.question_id: prediction.text for prediction in predictions}
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - computed, texts


def measure(
    loaded: Loaded, questions: Sequence[Question], folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    reference: dict[str, str] = {}
    part = random.Random(0).sample(list(questions), min(arguments.original_count, len(questions)))
    for name in ("original", "generate", "constrained", "likelihood"):
        some = part if name == "original" else questions
        setup = settings(folder, arguments, "generate" if name == "original" else name)
        way = original if name == "original" else llama.answer
        timed(way(loaded, questions[: 1 if name == "original" else arguments.batch_size], setup), arguments.device)
        seconds, cpu, texts = timed(way(loaded, some, setup), arguments.device)
        reference = reference or texts
        written = [len(ids) for ids in loaded.tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]]
        wall, computed = 1000 * seconds / len(some), 1000 * cpu / len(some)
        first = results.get("original", {"ms_a_question": wall, "cpu_ms_a_question": computed})
        results[name] = {
            "questions": len(some),
            "ms_a_question": round(wall, 2),
            "cpu_ms_a_question": round(computed, 2),
            "ratio": round(first["ms_a_question"] / wall, 2),
            "cpu_ratio": round(first["cpu_ms_a_question"] / computed, 2),
            "tokens_written": round(sum(written) / len(written), 2),
            "longest": max(written),
            "same_text_as_original": round(sum(texts[q.id] == reference[q.id] for q in part) / len(part), 4),
        }
        print(f"{name:<14}" + "  ".join(f"{key} {value}" for key, value in results[name].items()), flush=True)
    return results


def with_examples(
    loaded: Loaded, questions: Sequence[Question], folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Three-shot prompts, read whole and with their common beginning read once."""
    results: dict[str, Any] = {}
    pool, some = questions[: len(questions) // 4], questions[len(questions) // 4 :]
    for mode in ("generate", "constrained", "likelihood"):
        setup = settings(folder, arguments, mode)
        setup = replace(setup, generation=replace(setup.generation, arguments={"max_new_tokens": 32}))
        # With explanations, as CMB's examples of reasoning have them: prompts of about the length of theirs.
        setup = replace(setup, prompt=replace(setup.prompt, style="answer_explain", shots=3, max_source_length=2048))
        builder = PromptBuilder(setup.prompt, some, pool)
        asked = [builder.request(question) for question in some]
        decoder = llama.engine(loaded, setup)
        tokens = [len(item.ids) for item in decoder.ask(asked)]
        found = {}
        for name, shortest in (("whole", 10**9), ("shared", kv_cache.SHORTEST)):
            kept, kv_cache.SHORTEST = kv_cache.SHORTEST, shortest
            timed(map(to_prediction, decoder.answer(asked[: arguments.batch_size])), arguments.device)
            found[name] = timed(map(to_prediction, decoder.answer(asked)), arguments.device)
            kv_cache.SHORTEST = kept
        whole, shared = found["whole"], found["shared"]
        results[mode] = {
            "questions": len(some),
            "prompt_tokens": round(sum(tokens) / len(tokens)),
            "whole_ms_a_question": round(1000 * whole[0] / len(some), 2),
            "shared_ms_a_question": round(1000 * shared[0] / len(some), 2),
            "ratio": round(whole[0] / shared[0], 2),
            "cpu_ratio": round(whole[1] / shared[1], 2),
            "same_text": round(sum(whole[2][q.id] == shared[2][q.id] for q in some) / len(some), 4),
        }
        print(
            f"3 examples, {mode:<12}" + "  ".join(f"{key} {value}" for key, value in results[mode].items()), flush=True
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", metavar="FILE", help="questions as preprocess writes them; default: the sample")
    parser.add_argument("--count", type=int, default=512, help="questions to answer; default: %(default)s")
    parser.add_argument("--original-count", type=int, default=128, help="of them, the original's way; %(default)s")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="of our side; default: %(default)s, best on few cores"
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=80, help="of the tuning before; default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help="of prediction")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    found = read(arguments.questions)
    questions = first(found, arguments.count)
    with tempfile.TemporaryDirectory() as name:
        sizes = {"hidden": arguments.hidden, "layers": arguments.layers, "vocab": arguments.vocab}
        folder = tiny.build("llama", Path(name) / "model", **sizes)
        vocabulary.learn(folder, found, arguments.vocab)
        setup = settings(folder, arguments, "generate")
        loaded = llama.load(setup.model)
        model: Any = loaded.model
        model.to(arguments.device)
        tune(loaded, questions, setup, arguments.steps)
        model.to(getattr(torch, arguments.dtype))
        model.config.use_cache = True
        results = measure(loaded, questions, folder, arguments)
        three = with_examples(loaded, questions, folder, arguments)
    report = {
        "benchmark": "predict",
        "questions": arguments.questions or "sample",
        "count": len(questions),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": vars(arguments),
        "ways": results,
        "three_examples": three,
        "ratios": {way: results[way]["ratio"] for way in ("generate", "constrained", "likelihood")},
        "cpu_ratios": {way: results[way]["cpu_ratio"] for way in ("generate", "constrained", "likelihood")},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
            "gpu": torch.cuda.get_device_name() if arguments.device == "cuda" else None,
        },
    }
    print(f"ratios to the original's way: clock {report['ratios']}, CPU {report['cpu_ratios']}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
