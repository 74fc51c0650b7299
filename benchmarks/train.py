"""How fast training is: (a) every sample padded to 512, (b) dynamic padding, (c) ours, on the same model and questions.

    python benchmarks/train.py --questions val.questions.jsonl --json train.json

(a) and (b) are plain transformers Trainer + PEFT with the batches of the original scripts: (a) `ptuning/main.py` pads
every sample to max_source_length + max_target_length, (b) `LoRA/finetune.py` pads each batch to its longest sample,
rounded up to 8. (c) is `cmexam_tune.train`. All three: LoRA r=8 on q_proj and v_proj, the same seed, micro-batch 8 x
accumulation 2, the same optimizer and threads. Each runs in a process of its own, so that peak memory is its own.
The tokenizer is a byte-level BPE of --vocab tokens learned from the questions file, so that a question has about as
many tokens as with the tokenizers of Chinese models.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIDES = {"a": "padded to 512", "b": "dynamic padding", "c": "ours"}
LENGTHS = {"max_source_length": 256, "max_target_length": 256}
WARM_UP = 2


def recipe(job):
    """The experiment of side c; the others take their numbers from it."""
    from cmexam_tune import config

    if "recipe" in job:
        return config.load_config(job["recipe"], job["overrides"])
    return config.parse_config({
        "data": {"train": [job["questions"]], "max_train_samples": job["count"], "num_workers": 1},
        "prompt": {"style": job["style"], **LENGTHS},
        "model": {"family": "llama", "model_name_or_path": job["model"], "config": {"tie_word_embeddings": True}},
        "tuning": {"method": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05,
                   "target_modules": ["q_proj", "v_proj"]},
        "training": {
            "per_device_train_batch_size": job["micro"], "global_batch_size": job["batch"], "packing": job["packing"],
            "max_tokens_per_batch": job["max_tokens"], "num_train_epochs": 1, "learning_rate": 3e-4,
            "logging_steps": 8, "save_strategy": "no", "use_cpu": job["device"] == "cpu", "disable_tqdm": True,
            "seed": 1, "gradient_checkpointing": job["checkpointing"],
        },
        "out": job["out"],
    })  # fmt: skip


def ready(job):
    """The training task, a model with LoRA, and the encoded rows: what every side starts from."""
    import torch

    from cmexam_tune.models.families import Loaded
    from cmexam_tune.training import arguments
    from cmexam_tune.training.data.questions import question_files
    from cmexam_tune.training.objectives import Objective
    from cmexam_tune.training.run_directory import run
    from cmexam_tune.training.task import Task

    settings = recipe(job)
    torch.set_num_threads(job["threads"])
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    args = arguments.build(settings, Objective.named(settings.training.objective), Path(job["out"]))
    torch.manual_seed(1)
    family, method = run.parts(settings)
    train, validation = question_files(settings)
    questions = list(train)
    loaded = family.load(settings.model, questions, str(args.device))
    if args.gradient_checkpointing:
        loaded.model.enable_input_require_grads()
    rows = family.encode(loaded, questions, settings.prompt, settings.model).rows
    model = method.attach(loaded.model, family, settings.tuning.settings)
    task = Task(settings, family, method, Loaded(model, loaded.tokenizer), args, train, validation, Path(job["out"]))
    return task, rows


class Clock:
    """Seconds of each optimizer step after the warm-up, and what was in it."""

    def __init__(self):
        self.steps = []
        self.started = self.cpu = 0.0

    def begin(self):
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def end(self, samples, tokens, slots, labels):
        seconds, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
        self.steps.append((seconds, cpu, samples, tokens, slots, labels))

    def figures(self):
        steps = self.steps[WARM_UP:]
        seconds, cpu, samples, tokens, slots, labels = (sum(column) for column in zip(*steps, strict=True))
        return {
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / slots,
            "label_share": labels / slots,
            "cpu_seconds_per_sample": cpu / samples,
            "samples": samples,
            "median_step_seconds": statistics.median(step[0] for step in steps),
        }


def plain(job):
    """Sides a and b: transformers' Trainer and PEFT, nothing else."""
    import torch
    from transformers import Trainer, TrainingArguments

    task, rows = ready(job)
    args, loaded = task.arguments, task.loaded
    pad = int(loaded.tokenizer.pad_token_id or 0)
    clock = Clock()

    def collate(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        width = sum(LENGTHS.values()) if job["side"] == "a" else -(-longest // 8) * 8
        fill = {"input_ids": pad, "labels": -100, "attention_mask": 0}
        columns = {name: [] for name in fill}
        for row in batch:
            values = {**row, "attention_mask": [1] * len(row["input_ids"])}
            for name, value in fill.items():
                columns[name].append(values[name] + [value] * (width - len(values[name])))
        return {name: torch.tensor(values) for name, values in columns.items()}

    class Timed(Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            if clock.started:
                sync()
                clock.end(*self.held)
            clock.begin()
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            masks = [batch["attention_mask"] for batch in batches]
            labels = sum(int((batch["labels"] != -100).sum()) for batch in batches)
            tokens = sum(int(mask.sum()) for mask in masks)
            self.held = (sum(len(mask) for mask in masks), tokens, sum(mask.numel() for mask in masks), labels)
            return batches, items

    limit = job["limit"][job["side"]]
    arguments = TrainingArguments(
        output_dir=job["out"], per_device_train_batch_size=job["micro"],
        gradient_accumulation_steps=job["batch"] // job["micro"], max_steps=min(limit, len(rows) // job["batch"]),
        learning_rate=3e-4, logging_steps=8, save_strategy="no", report_to="none", use_cpu=job["device"] == "cpu",
        disable_tqdm=True, remove_unused_columns=False, seed=1, bf16=args.bf16, fp16=args.fp16,
        gradient_checkpointing=job["checkpointing"],
    )  # fmt: skip
    trainer = Timed(model=loaded.model, args=arguments, train_dataset=rows, data_collator=collate)
    result = trainer.train()
    sync()
    clock.end(*trainer.held)
    return {**clock.figures(), "loss": result.training_loss}


def ours(job):
    """Side c: the trainer of `cmexam_tune.train`, without writing the adapter."""
    import functools
    import math

    import datasets

    from cmexam_tune.models.features import Truncation
    from cmexam_tune.training import arguments as layouts
    from cmexam_tune.training import monitor
    from cmexam_tune.training import trainer as trainers
    from cmexam_tune.training.data import batches as datas
    from cmexam_tune.training.data import encoding

    task, rows = ready(job)
    settings, args = task.config, task.arguments
    clock, overflows = Clock(), []

    class Counted(monitor.TrainingMonitor):
        def on_grad_norm(self, norm, skipped=False):
            overflows.append(not math.isfinite(norm or 0.0))
            super().on_grad_norm(norm, skipped)

    class Timed(trainers.ExamTrainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            if clock.started:
                sync()
                clock.end(*self.held)
            clock.begin()
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            batch = batches[0]
            slots = sum(micro["input_ids"].numel() for micro in batch.micro)
            self.held = (sum(map(len, batch.ids)), batch.tokens, slots, batch.step_targets)
            return batches, items

    table = datasets.Dataset.from_list([dict(row) for row in rows])
    lengths, labels = [[*map(count, rows)] for count in (encoding.length, encoding.label_count)]
    collate = functools.partial(task.family.collate, task.loaded)
    samples = datas.EncodedQuestions(table, lengths, labels, [0] * len(rows), Truncation(), collate)
    data = datas.TrainingData(samples, layouts.layout(settings.training, settings.prompt, 1))
    args.max_steps = min(job["limit"]["c"], len(rows) // job["batch"])
    trainer = Timed(task, data, None)
    trainer.monitor = Counted(fp16=args.fp16)
    result = trainer.train()
    sync()
    clock.end(*trainer.held)
    return {**clock.figures(), "loss": result.training_loss, "steps": len(overflows), "overflows": sum(overflows)}


def sync():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(job):
    """Run one side in this process and print its figures."""
    import torch

    figures = ours(job) if job["side"] == "c" else plain(job)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available() and job["device"] != "cpu":
        memory = torch.cuda.max_memory_allocated()
    print(json.dumps({**figures, "peak_memory_bytes": memory}))


def side(job):
    """Run one side in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    if job["device"] == "cpu":
        environment.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, str(Path(__file__).resolve()), "--job", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"side {job['side']} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options, job):
    """All sides for one style, and the ratios between them."""
    sides = {name: side({**job, "side": name, "out": f"{job['out']}_{name}"}) for name in SIDES}
    ratios = {
        f"{ours}/{other}": sides[ours]["samples_per_second"] / sides[other]["samples_per_second"]
        for ours, other in (("c", "a"), ("c", "b"), ("b", "a"))
    }
    ratios["memory c/b"] = sides["c"]["peak_memory_bytes"] / sides["b"]["peak_memory_bytes"]
    print(f"\nstyle {job['style']}")
    print(f"{'':<22}{'samples/s':>10}{'tokens/s':>10}{'padding':>9}{'labels':>8}{'memory':>10}{'loss':>8}")
    for name, f in sides.items():
        print(
            f"({name}) {SIDES[name]:<18}{f['samples_per_second']:>10.2f}{f['tokens_per_second']:>10.0f}"
            f"{f['padding_share']:>9.1%}{f['label_share']:>8.1%}"
            f"{f['peak_memory_bytes'] / 2**20:>7.0f} MB{f['loss']:>8.3f}"
        )
    print("  ".join(f"{name} {value:.2f}x" for name, value in ratios.items()), flush=True)
    return {"sides": sides, "ratios": ratios}


def sample_questions(folder):
    """The shipped sample as a questions file."""
    from cmexam_tune.core import jsonl
    from cmexam_tune.exams import cmexam

    files = sorted((ROOT / "cmexam_tune" / "sample" / "cmexam").glob("*.csv"))
    path = Path(folder) / "sample.jsonl"
    found = {question.id: question for file in files for question in cmexam.read([file])}
    jsonl.write(path, [question for question in found.values() if question.answer and question.explanation])
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", metavar="FILE", help="questions.jsonl; default: the shipped sample")
    parser.add_argument("--json", metavar="FILE", help="write what was printed here too")
    parser.add_argument("--count", type=int, default=1024, help="questions; default: %(default)s")
    parser.add_argument("--styles", default="answer,answer_explain", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model; default: %(default)s")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--vocab", type=int, default=32000, help="default: %(default)s")
    parser.add_argument("--micro", type=int, default=8, help="micro-batch; default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="questions of a step; default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--packing", action="store_true", help="side c packs several questions into a row")
    parser.add_argument("--max-tokens", type=int, help="side c: most token slots of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on all sides")
    parser.add_argument("--steps-a", type=int, default=8, help="steps of side a, which are all alike; %(default)s")
    parser.add_argument("--steps-b", type=int, default=10**9, help="steps of side b; default: all")
    parser.add_argument("--steps-c", type=int, default=10**9, help="steps of side c; default: all")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        measure(json.loads(options.job))
        return
    import vocabulary

    from cmexam_tune import tiny
    from cmexam_tune.core import jsonl, schema

    with tempfile.TemporaryDirectory() as folder:
        model = tiny.build(
            "llama", Path(folder) / "model", hidden=options.hidden, layers=options.layers, vocab=options.vocab
        )
        questions = Path(options.questions) if options.questions else sample_questions(folder)
        vocabulary.learn(model, jsonl.read(questions, schema.Question), options.vocab)
        job = {
            "questions": str(questions.resolve()), "model": str(model), "count": options.count, "micro": options.micro,
            "batch": options.batch, "packing": options.packing, "max_tokens": options.max_tokens,
            "device": options.device, "threads": options.threads, "checkpointing": options.checkpointing,
            "limit": {"a": options.steps_a, "b": options.steps_b, "c": options.steps_c},
        }  # fmt: skip
        styles = options.styles.split(",")
        found = {s: compare(options, {**job, "style": s, "out": str(Path(folder) / s)}) for s in styles}
    if options.json:
        report = {
            "benchmark": "train", "settings": {k: v for k, v in vars(options).items() if k not in ("job", "json")},
            "styles": found,
            "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
        }  # fmt: skip
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
