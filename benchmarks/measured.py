"""What a real model learns from CMExam with this code: the runs behind docs/measured.md, and the page itself.

    python benchmarks/measured.py --model SmolLM2-135M-Instruct.Q4_1.gguf --raw data/raw/val.csv --out runs/measured

Every run is a run folder in --out that is found again: killed, the command goes on where it was; with other sizes it
starts other runs beside them. The questions are drawn from --raw with one seed: answered by one letter, explained, at
most --characters long with their options, no two of the same stem. Nothing of them is written outside --out.

`--write docs` writes measured.md and measured.zh.md from what is finished.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cmexam_tune import prompts
from cmexam_tune.config import Config, parse_config
from cmexam_tune.core import files, jsonl, normalise
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.predict import predict
from cmexam_tune.train import train
from cmexam_tune.training.run_directory.log import LOG, points, read_log

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("measured.md", "measured.zh.md")
"""Written into docs/ from `measured_page.md` and `measured_page.zh.md` beside this file."""
MISSING = "—"
"""In place of a figure that is not measured yet; the page says so."""
SEED = 20230605
"""Of the draw of the questions."""
BATCH = 8
"""Questions in each step."""
LORA = {"method": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
"""Without dropout, so that plain PEFT can be compared with it number by number."""
LORA_RATE = 1e-3


@dataclass(frozen=True)
class Arm:
    """One way of training: what differs from the others."""

    name: str
    tuning: Mapping[str, Any] = field(default_factory=lambda: LORA)
    rate: float = LORA_RATE
    style: str = "answer"
    packing: bool = False
    seeds: tuple[int, ...] = (1,)


ARMS = (
    Arm("lora", seeds=(1, 2, 3)),
    Arm("ptuning", {"method": "ptuning", "num_virtual_tokens": 16}, rate=3e-2),
    Arm("full", {"method": "full"}, rate=5e-5),
    Arm("lora_packed", packing=True),
    Arm("lora_explain", style="answer_explain"),
)


def draw(raw: Path, out: Path, sizes: Sequence[int], characters: int) -> tuple[Path, Path]:
    """Write the training and the test questions, no stem in both, and return their files."""
    from cmexam_tune.preprocess import preprocess

    train, test = (out / "data" / f"{name}_{size}.jsonl" for name, size in zip(("train", "test"), sizes, strict=True))
    if train.is_file() and test.is_file():
        return train, test
    preprocess("cmexam", [raw], out / "data", overwrite=True)
    distinct: dict[str, Question] = {}
    for question in jsonl.read(out / "data" / f"{raw.stem}.questions.jsonl", Question):
        length = len(question.stem) + sum(map(len, question.options.values()))
        if len(question.answer or "") == 1 and question.explanation and length <= characters:
            distinct.setdefault(normalise.plain(question.stem), question)
    questions = list(distinct.values())
    random.Random(SEED).shuffle(questions)
    if sum(sizes) > len(questions):
        sys.exit(f"{raw}: {len(questions)} questions are short enough, {sum(sizes)} are needed (--characters)")
    # The test questions first: they stay the same when more are trained on.
    jsonl.write(test, questions[: sizes[1]])
    jsonl.write(train, questions[sizes[1] : sum(sizes)])
    return train, test


def unpacked(model: Path, out: Path, dtype: str) -> Path:
    """Return the model as a folder of safetensors: every process here would unpack the GGUF file anew."""
    folder = out / f"model_{dtype}"
    if not folder.is_dir():
        from cmexam_tune.config import ModelConfig
        from cmexam_tune.models.families.llama import Llama

        loaded = Llama().load(ModelConfig("llama", str(model), dtype=dtype))  # type: ignore[arg-type]
        with files.new_folder(folder, "measured") as staged:
            loaded.model.save_pretrained(staged)
            loaded.tokenizer.save_pretrained(staged)
    return folder


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    out: Path
    model: Path
    train: Path
    test: Path
    dtype: str
    watched: int
    """Of the test questions so many give the loss before and after training."""

    @property
    def zero_shot(self) -> Path:
        """The answers of the model as it is."""
        return self.out / f"{self.dtype}_zeroshot" / f"{self.test.stem}.jsonl"

    def folder(self, arm: Arm, seed: int) -> Path:
        """Return the folder of one run."""
        return self.out / f"{self.dtype}_{self.train.stem}" / arm.name / f"seed{seed}"

    def config(self, arm: Arm, seed: int) -> Config:
        """Return the experiment of one run."""
        return parse_config({
            "data": {"train": [str(self.train)], "validation": [str(self.test)], "max_eval_samples": self.watched,
                     "num_workers": 1},
            "prompt": {"style": arm.style, "max_source_length": 512, "max_target_length": 256},
            "model": {"family": "llama", "model_name_or_path": str(self.model), "dtype": self.dtype},
            "tuning": arm.tuning,
            "training": {
                "global_batch_size": BATCH, "per_device_train_batch_size": BATCH, "packing": arm.packing,
                "per_device_eval_batch_size": 8, "num_train_epochs": 1, "learning_rate": arm.rate, "seed": seed,
                "lr_scheduler_type": "linear", "warmup_steps": 0.1, "logging_steps": 1, "save_steps": 0.1,
                "eval_strategy": "epoch", "eval_on_start": True, "bf16": self.dtype == "bfloat16", "report_to": "none",
            },
            "generation": {"mode": "likelihood", "batch_size": 8},
            "out": str(self.folder(arm, seed) / "run"),
        })  # fmt: skip


def measure(plan: Plan, arm: Arm, seed: int) -> None:
    """Train one run and let it answer the test questions; what is there is not repeated."""
    folder = plan.folder(arm, seed)
    with clocked(folder / "clock.json"):
        train(plan.config(arm, seed))
    answer(folder / "run", plan, folder / "predictions.jsonl")


def answer(source: Path | Config, plan: Plan, out: Path) -> None:
    """Answer the test questions by likelihood and score them."""
    predict(source, plan.test, out)
    report = out.with_name(f"{out.stem}.report")
    if not (report / "report.json").is_file():
        evaluate(out, plan.test, report)


CLOCK = """
import contextlib, json, resource, sys, time
from pathlib import Path
import transformers

class Clock(transformers.TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **_):
        self.ends.append(time.process_time())

@contextlib.contextmanager
def clocked(out):
    clock, start = Clock(), transformers.Trainer.__init__

    def init(self, *words, **names):
        start(self, *words, **names)
        self.add_callback(clock)

    transformers.Trainer.__init__ = init
    try:
        yield
    finally:
        transformers.Trainer.__init__ = start
    if len(clock.ends) > 2:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path(out).write_text(json.dumps({"cpu_seconds": clock.ends, "peak_bytes": peak}))
"""
"""Processor seconds at the end of each step, in whatever trains with transformers' Trainer: ours, PEFT's, others'."""


def clocked(out: Path) -> contextlib.AbstractContextManager[None]:
    """Write the clock of a training to `out`."""
    names: dict[str, Any] = {}
    exec(CLOCK, names)  # the very code that runs in the other tool's environment
    context: contextlib.AbstractContextManager[None] = names["clocked"](out)
    return context


def witness(plan: Plan, seed: int) -> None:
    """Train the LoRA of `measure` with transformers' Trainer and PEFT alone: the same rows in the same order."""
    out = plan.folder(ARMS[0], seed) / "witness.json"
    if out.is_file():
        return
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

    from cmexam_tune.models.families import Loaded
    from cmexam_tune.models.families.llama import Llama
    from cmexam_tune.training.data import sampler

    config = plan.config(ARMS[0], seed)
    family = Llama()
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    questions = list(jsonl.read(plan.train, Question))
    rows = family.encode(Loaded(None, tokenizer), questions, config.prompt, config.model).rows  # type: ignore[arg-type]
    lengths = [len(row["input_ids"]) for row in rows]
    steps = sampler.order(lengths, sampler.StepLayout(BATCH, BATCH, seed=seed), 0)
    ordered = [rows[i] for step in steps for i in sorted(step, key=lambda i: -lengths[i])]

    def collate(batch: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in batch)

        def padded(name: str, value: int) -> torch.Tensor:
            return torch.tensor([[*row[name], *[value] * (width - len(row[name]))] for row in batch])

        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in batch])
        ids = padded("input_ids", int(tokenizer.pad_token_id))
        return {"input_ids": ids, "attention_mask": mask, "labels": padded("labels", -100)}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(ordered)

    set_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(plan.model, dtype=getattr(torch, plan.dtype))
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **{k: v for k, v in LORA.items() if k != "method"}))
    values = {name: config.training.arguments[name] for name in SHARED}
    arguments = TrainingArguments(
        output_dir=str(out.with_suffix(".tmp")), per_device_train_batch_size=BATCH, use_cpu=True, save_strategy="no",
        remove_unused_columns=False, disable_tqdm=True, **values,
    )  # fmt: skip
    with clocked(out.with_name("witness.clock.json")):
        trainer = InOrder(model=model, args=arguments, train_dataset=ordered, data_collator=collate)
        trainer.train()
    files.write_json(out, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def llama_factory(plan: Plan, python: Path) -> None:
    """Train the same LoRA on the same questions with LLaMA-Factory, in its own environment, by its fastest setting."""
    out = plan.folder(ARMS[0], 1) / "llamafactory"
    if (out / "clock.json").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    rows = [prompts.render(question, "answer") for question in jsonl.read(plan.train, Question)]
    alpaca = [{"instruction": row.prompt, "input": "", "output": row.completion} for row in rows]
    files.write_json(out / "exam.json", alpaca)
    files.write_json(out / "dataset_info.json", {"exam": {"file_name": "exam.json"}})
    config = plan.config(ARMS[0], 1)
    values = {name: config.training.arguments[name] for name in SHARED}
    files.write_json(out / "train.yaml", {
        "stage": "sft", "do_train": True, "model_name_or_path": str(plan.model.absolute()), "dataset": "exam",
        "dataset_dir": str(out.absolute()), "template": "smollm2", "finetuning_type": "lora", "lora_rank": LORA["r"],
        "lora_alpha": LORA["lora_alpha"], "lora_dropout": 0.0, "lora_target": "all", "cutoff_len": 1024,
        "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "group_by_length", "disable_gradient_checkpointing": True, "flash_attn": "sdpa",
        "save_strategy": "no", "output_dir": str((out / "run").absolute()), "overwrite_output_dir": True,
        "preprocessing_num_workers": 1, "use_cpu": True, **values,
    })  # fmt: skip
    program = f"{CLOCK}\nwith clocked('clock.json'):\n    from llamafactory.train.tuner import run_exp\n    run_exp()\n"
    subprocess.run([python, "-c", program, "train.yaml"], cwd=out, check=True)


SHARED = (
    "num_train_epochs", "learning_rate", "seed", "lr_scheduler_type", "warmup_steps", "logging_steps", "bf16",
    "report_to",
)  # fmt: skip
"""Settings of training that the witness takes over as they are."""


def samples_per_cpu_second(clock: Path) -> float | None:
    """Return the questions trained on for each processor second, without the first steps, which warm up."""
    if not clock.is_file():
        return None
    ends = json.loads(clock.read_text())["cpu_seconds"][2:]
    return BATCH * (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else None


def curve(folder: Path) -> list[float]:
    """Return the training loss of each step."""
    return [loss for _, loss in points(read_log(folder / "run" / LOG), "loss")]


def row(name: str, folder: Path, report: Path) -> list[str]:
    """Return the line of a run in the table of results."""
    scores = json.loads((report / "report.json").read_text(encoding="utf-8"))["overall"]
    watched = [loss for _, loss in points(read_log(folder / "run" / LOG), "eval_loss")]
    speed = samples_per_cpu_second(folder / "clock.json")
    low, high = scores["accuracy_ci"]
    return [
        name,
        f"{watched[0]:.3f}" if watched else "",
        f"{watched[-1]:.3f}" if len(watched) > 1 else "",
        f"{scores['accuracy']:.1f} ({low:.1f}–{high:.1f})",
        f"{speed:.2f}" if speed else "",
    ]


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of a table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def pages(plan: Plan, options: argparse.Namespace) -> dict[str, str]:
    """Return the page in both languages, from what is finished."""
    from transformers import AutoTokenizer

    zero = plan.zero_shot.with_name(f"{plan.zero_shot.stem}.report")
    finished = [(arm, seed, plan.folder(arm, seed)) for arm in ARMS for seed in arm.seeds]
    finished = [item for item in finished if (item[2] / "predictions.report" / "report.json").is_file()]
    rows = [row("zero-shot", plan.out / "none", zero)] if zero.is_dir() else []
    rows += [row(f"{arm.name}, seed {seed}", folder, folder / "predictions.report") for arm, seed, folder in finished]
    curves = {f"{arm.name} {seed}": curve(folder) for arm, seed, folder in finished}
    lora = plan.folder(ARMS[0], 1)
    own, peft = curve(lora), json.loads(text) if (text := read(lora / "witness.json")) else []
    if peft:
        curves["plain PEFT 1"] = peft
    longest = max(map(len, curves.values()), default=0)
    marks = sorted({0, *range(1, longest, max(1, longest // 8)), longest - 1})
    steps = [[str(n + 1), *(f"{c[n]:.3f}" if n < len(c) else "" for c in curves.values())] for n in marks]
    baselines = json.loads(read(zero / "report.json") or "{}").get("baselines", {})
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    labels = len(tokenizer("答案: A", add_special_tokens=False)["input_ids"]) + 1
    options_each = [len(question.options) for question in jsonl.read(plan.test, Question)]
    # A run that was killed and went on has no clock of its first part: the seeds are alike in speed.
    clocks = [plan.folder(ARMS[0], seed) / "clock.json" for seed in ARMS[0].seeds]
    sides = {
        "cmexam_tune": next(filter(Path.is_file, clocks), clocks[0]),
        "transformers + PEFT": lora / "witness.clock.json",
        "LLaMA-Factory": lora / "llamafactory" / "clock.json",
    }
    speeds = {name: samples_per_cpu_second(file) for name, file in sides.items()}
    memory = {name: json.loads(read(file) or "{}").get("peak_bytes", 0) for name, file in sides.items()}
    facts = {
        "model": options.model.stem,
        "command": f"python benchmarks/measured.py --model {options.model.name} --train {options.train} --test "
        f"{options.test} --watched {options.watched} --characters {options.characters} --dtype {options.dtype}",
        "train": options.train, "test": options.test, "watched": options.watched, "characters": options.characters,
        "dtype": options.dtype, "batch": BATCH, "longest": longest,
        "versions": ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft")),
        "guess": f"{baselines['uniform_single']['expected']:.1f}" if baselines else "20",
        "majority": "{expected:.1f}% ({answer})".format(**baselines["majority"]) if baselines else MISSING,
        "labels": labels, "floor": f"{statistics.fmean(map(math.log, options_each)) / labels:.3f}",
        "first": f"{own[0]:.4f}, {peft[0]:.4f}" if own and peft else MISSING,
        "apart": f"{max(abs(a - b) for a, b in zip(own, peft, strict=False)):.4f}" if own and peft else MISSING,
        "curves": lines([["step", *curves], ["---"] * (1 + len(curves)), *steps]),
    }  # fmt: skip
    speed_rows = [
        [name, f"{speed:.2f}" if speed else MISSING, f"{memory[name] / 2**30:.1f}" if speed else ""]
        for name, speed in speeds.items()
    ]
    done = {folder for _, _, folder in finished}
    missing = [f"{arm.name}, seed {seed}" for arm in ARMS for seed in arm.seeds if plan.folder(arm, seed) not in done]
    rows += [[name, "", "", MISSING, ""] for name in missing]
    facts["results"], facts["speeds"] = lines(rows), lines(speed_rows)
    places = {name: Path(__file__).with_name(name.replace(".", "_page.", 1)) for name in PAGES}
    return {name: place.read_text(encoding="utf-8").format(**facts) for name, place in places.items()}


def read(path: Path) -> str | None:
    """Return what a file holds, or None where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the .gguf file, or a folder of a LLaMA-like model")
    parser.add_argument("--raw", type=Path, default=ROOT / "data" / "raw" / "val.csv", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/measured"), help="default: %(default)s")
    parser.add_argument("--train", type=int, default=1500, help="questions to train on; default: %(default)s")
    parser.add_argument("--test", type=int, default=500, help="other questions; default: %(default)s")
    parser.add_argument("--watched", type=int, default=64, help="test questions whose loss is taken; %(default)s")
    parser.add_argument("--characters", type=int, default=160, help="of a question and its options; %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the frozen weights")
    parser.add_argument("--only", default="", help="some of the runs: zeroshot, " + ", ".join(arm.name for arm in ARMS))
    parser.add_argument("--llama-factory", type=Path, metavar="PYTHON", help="Python of an environment that has it")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="write measured.md and measured.zh.md there")
    options = parser.parse_args()
    train_file, test_file = draw(options.raw, options.out, (options.train, options.test), options.characters)
    model = unpacked(options.model, options.out, options.dtype)
    plan = Plan(options.out, model, train_file, test_file, options.dtype, options.watched)
    wanted = set(filter(None, options.only.split(",")))
    if not wanted or "zeroshot" in wanted:
        answer(plan.config(ARMS[0], 1), plan, plan.zero_shot)
    for arm in ARMS:
        for seed in arm.seeds if not wanted or arm.name in wanted else ():
            measure(plan, arm, seed)
    if not wanted or "witness" in wanted:
        witness(plan, 1)
    if options.llama_factory:
        llama_factory(plan, options.llama_factory)
    if options.write:
        for name, text in pages(plan, options).items():
            (options.write / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
