"""Every check that only a card can do, in one call: `bash benchmarks/gpu.sh`.

Each check is a process of its own with a time limit, so that one that fails does not stop the rest, and --json and
--markdown are written anew after each. Models have the published sizes and random weights, which are made on the card:
nothing is downloaded and nothing large is written. `--device cpu --tiny` tries the whole program without a card.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import train as sides

GIB = 1024**3
LLAMA_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
CHATGLM_6B = {
    "hidden_size": 4096, "inner_hidden_size": 16384, "num_layers": 28, "num_attention_heads": 32, "vocab_size": 130528,
}  # fmt: skip
RECIPES = {"llama": ("lora_llama.yaml", LLAMA_7B), "chatglm": ("ptuning_chatglm.yaml", CHATGLM_6B)}
QUESTIONS_OF_A_STEP = 16
ALL_TOKENS = ("generation.mode=generate", "generation.min_new_tokens=32", "generation.max_new_tokens=32")
PYTHON_WITH = {"vllm": "CMEXAM_TUNE_VLLM_PYTHON"}
"""Package -> environment variable that names a Python which has it."""
RATIOS = {
    "llama_dynamic": "llama_lora_{dtype}", "llama_padded_512": "llama_lora_{dtype}", "predict_vllm": "predict_generate",
}  # fmt: skip
"""What others do -> the same by us."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One process: `kind` is the function `check_<kind>`, `limit` its seconds."""

    name: str
    kind: str
    limit: int
    family: str = "llama"
    dtype: str = "half"
    """bf16, fp16, or half: bf16 where the card has it, else fp16."""
    side: str = "c"
    steps: int = 50
    overrides: tuple[str, ...] = ()
    needs: str | None = None
    """A package; without it the check is skipped."""
    card: bool = False
    """Whether a CPU does it only when --only names it: there it says nothing, or compiles for minutes."""


CHECKS = (
    Check("resume", "resume", 60, dtype="float32"),
    Check("llama_lora_bf16", "train", 120, dtype="bf16"),
    Check("llama_lora_fp16", "train", 120, dtype="fp16"),
    Check("llama_dynamic", "train", 90, side="b", steps=12),
    Check("llama_padded_512", "train", 120, side="a", steps=6),
    Check("chatglm_ptuning_bf16", "train", 120, "chatglm", dtype="bf16"),
    Check("chatglm_ptuning_fp16", "train", 120, "chatglm", dtype="fp16"),
    Check("predict_generate", "predict", 60, overrides=ALL_TOKENS),
    Check("predict_constrained", "predict", 60, overrides=("generation.mode=constrained",)),
    Check("predict_likelihood", "predict", 60, overrides=("generation.mode=likelihood",)),
    Check(
        "llama_flash_varlen", "train", 90, steps=20, needs="flash_attn", card=True,
        overrides=("model.attn_implementation=flash_attention_2", "training.packing=true"),
    ),
    Check(
        "llama_liger", "train", 90, steps=20, needs="liger_kernel", card=True,
        overrides=("training.use_liger_kernel=true",),
    ),
    Check(
        "predict_vllm", "predict", 240, needs="vllm", card=True,
        overrides=(*ALL_TOKENS, "model.engine=vllm", "model.engine_arguments={load_format: dummy}"),
    ),
    Check("llama_compile", "train", 150, steps=20, overrides=("training.torch_compile=true",), card=True),
)  # fmt: skip
"""In the order of their worth: when the time is used up the rest is named as not run."""


# What runs in a check's own process


def random_weights():
    """Make models on their device with random weights where a checkpoint's would be read."""
    import torch
    from transformers import PreTrainedModel

    from cmexam_tune.models import attention, checkpoint

    def make(source, auto, config, device="cpu", may_miss=None):
        model = source.model
        torch.manual_seed(0)
        build = auto._from_config if issubclass(auto, PreTrainedModel) else auto.from_config
        chosen = model.attn_implementation if device == "meta" else attention.suited(model.attn_implementation)
        with torch.device(device):
            return build(config, dtype=checkpoint.dtype(model), attn_implementation=chosen)

    checkpoint.Checkpoint.weights = make


def job_of(check, job):
    """The job of `train.py` for a check: a shipped recipe at the published size."""
    recipe, shape = RECIPES[check.family]
    cpu = job["device"] == "cpu"
    overrides = [
        f"data.train=[{job['questions']}]", "data.validation=[]", "data.test=[]", "data.num_workers=1",
        f"model.model_name_or_path={job['models']}/{check.family}", f"out={job['out']}",
        f"training.global_batch_size={QUESTIONS_OF_A_STEP}", "training.eval_strategy=no", "training.save_strategy=no",
        "training.disable_tqdm=true", "training.logging_steps=1", f"training.use_cpu={str(cpu).lower()}",
        *(() if job["tiny"] else (f"model.config.{key}={value}" for key, value in shape.items())),
        *check.overrides,
    ]  # fmt: skip
    kind = chosen_dtype(check, cpu)
    if kind in ("bf16", "fp16"):
        long = {"bf16": "bfloat16", "fp16": "float16"}[kind]
        overrides += [f"training.{kind}=true", f"model.dtype={long}"]
    steps = min(check.steps, job["steps"])
    return {
        **job, "recipe": recipe, "overrides": overrides, "side": check.side, "micro": 8, "checkpointing": True,
        "batch": QUESTIONS_OF_A_STEP, "limit": dict.fromkeys("abc", steps),
        "threads": max(1, (os.cpu_count() or 2) // 2),
    }  # fmt: skip


def chosen_dtype(check, cpu):
    from cmexam_tune.training import arguments

    if check.dtype == "half":
        return "bf16" if arguments.Card.here(cpu).bf16 else "fp16"
    return check.dtype


def reason_to_skip(check, job):
    """Why a check cannot be done here, or None."""
    from cmexam_tune.core.errors import ConfigError
    from cmexam_tune.training import arguments

    cpu = job["device"] == "cpu"
    elsewhere = os.environ.get(PYTHON_WITH.get(check.needs, ""))
    if check.needs and importlib.util.find_spec(check.needs) is None and elsewhere is None:
        return f"{check.needs} is not installed"
    if check.card and cpu and not job["named"]:
        return "only on a card, or when --only names it"
    if "training.torch_compile=true" in check.overrides and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return "torch.compile needs a C++ compiler, and there is none"
    if check.dtype in ("bf16", "fp16"):
        try:
            arguments.choose_precision({check.dtype: True}, arguments.Card.here(cpu))
        except ConfigError as error:
            return str(error)
    return None


def check_train(check, job):
    """Steps of training, their speed and memory, beside what --dry-run says of them."""
    from cmexam_tune.training import estimate
    from cmexam_tune.training.data.questions import question_files

    job = job_of(check, job)
    settings = sides.recipe(job)
    foreseen = estimate.dry_run(settings, question_files(settings)[0])
    start_of_memory()
    figures = sides.ours(job) if check.side == "c" else sides.plain(job)
    # What dry_run takes for the rate of a whole step is its share EFFICIENCY of the measured matrix products.
    seconds_a_token = foreseen.hours * 3600 / foreseen.tokens
    return {
        **figures,
        "dtype": chosen_dtype(check, job["device"] == "cpu"),
        "parameters": foreseen.parameters,
        "trainable": foreseen.trainable,
        "share_of_matrix_rate": estimate.EFFICIENCY * seconds_a_token * figures["tokens_per_second"],
        "dry_run_bytes": foreseen.memory["none"],
        "peak_memory_bytes": peak_memory(job),
        "ok": math.isfinite(figures["loss"]) and figures.get("steps") in (None, job["limit"]["c"]),
    }


def check_predict(check, job):
    """Questions a second in one way of answering, every text as long; a server has started before the time counts."""
    import random

    import torch

    from cmexam_tune.core import jsonl, schema
    from cmexam_tune.inference import loading
    from cmexam_tune.training.run_directory import run as runs

    job = job_of(check, job)
    settings = sides.recipe(job)
    family, _ = runs.parts(settings)
    start_of_memory()
    loaded = loading.load(loading.open_source(settings))
    questions = list(jsonl.read(job["questions"], schema.Question))
    questions = random.Random(0).sample(questions, min(job["asked"], len(questions)))
    batch = settings.generation.batch_size
    list(family.answer(loaded, questions[:batch], settings))
    sides.sync()
    started = time.perf_counter()
    with torch.inference_mode():
        found = list(family.answer(loaded, questions, settings))
    sides.sync()
    seconds = time.perf_counter() - started
    return {
        "samples_per_second": len(found) / seconds,
        "dtype": chosen_dtype(check, job["device"] == "cpu"),
        "batch_size": batch,
        # A server takes what it is allowed, whatever it needs.
        **({} if settings.model.is_served else {"peak_memory_bytes": peak_memory(job)}),
        "ok": {p.question_id for p in found if p.finish != "error"} == {q.id for q in questions},
    }


def check_resume(check, job):
    """A small run to its end, and another from its checkpoint: the adapters have the same bits."""
    import torch
    from safetensors.torch import load_file

    from cmexam_tune.train import train
    from cmexam_tune.training import checkpoints

    job = job_of(check, {**job, "tiny": True})
    half = job["limit"]["c"] // 2
    settings = [
        *job["overrides"], f"training.max_steps={2 * half}", "training.save_strategy=steps",
        f"training.save_steps={half}", "training.full_determinism=true",
    ]  # fmt: skip
    whole = train(job["recipe"], settings).path
    kept = whole.with_name("kept")
    whole.rename(kept)
    whole.mkdir()
    for name in ("config.yaml", "environment.json", "log.jsonl"):
        shutil.copy(kept / name, whole / name)
    shutil.copytree(kept / f"checkpoint-{half}", whole / f"checkpoint-{half}")
    train(job["recipe"], settings, resume=True)
    first, second = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (kept, whole))
    middle = load_file(kept / f"checkpoint-{half}" / checkpoints.WEIGHTS)
    # PEFT leaves the adapter's name out of what it saves. Had nothing moved since, equal bits would say nothing.
    moved = any(not torch.equal(value, first[name.replace(".default.", ".")]) for name, value in middle.items())
    return {
        "steps": 2 * half,
        "loss": json.loads((whole / "metrics.json").read_text(encoding="utf-8"))["train_loss"],
        "tensors": len(first),
        "largest_difference": max(float((first[name] - second[name]).abs().max()) for name in first),
        "ok": moved and first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first),
    }


def start_of_memory():
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(job):
    import resource

    import torch

    if job["device"] == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def perform(name, job):
    """One check, in this process; prints its figures as the last line."""
    check = next(check for check in CHECKS if check.name == name)
    reason = reason_to_skip(check, job)
    if reason:
        print(json.dumps({"outcome": "skipped", "reason": reason}))
        return
    if check.kind != "resume":
        random_weights()
    figures = globals()[f"check_{check.kind}"](check, job)
    print(json.dumps({"outcome": "ok" if figures.pop("ok") else "wrong", **figures}))


# What starts them and writes their figures down


def run(check, job, seconds):
    """One check in a process of its own, killed with all that it started when its time is over."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(
        filter(None, (str(sides.ROOT), os.environ.get("PYTHONPATH"))))}  # fmt: skip
    if job["device"] == "cpu":
        environment.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, str(Path(__file__).resolve()), "--check", check.name, "--job", json.dumps(job)]
    started = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"outcome": "failed", "reason": f"not done in {seconds:.1f} s", "seconds": seconds}
    spent = {"seconds": round(time.monotonic() - started, 1)}
    try:
        if process.returncode == 0:
            return {**json.loads(out.splitlines()[-1]), **spent}
    except (ValueError, IndexError):
        err += out
    last = (err.strip() or f"ended with {process.returncode}").splitlines()[-1]
    return {"outcome": "failed", "reason": last[-300:], "log": err[-4000:], **spent}


def ratios(checks):
    """Questions a second of ours in the same number format, as a multiple of each other way."""
    found = {}
    for name, same in RATIOS.items():
        other = checks.get(name, {})
        ours = checks.get(same.format(dtype=other.get("dtype")), {})
        if "samples_per_second" in other and "samples_per_second" in ours:
            found[name] = ours["samples_per_second"] / other["samples_per_second"]
    return found


COLUMNS = {
    "questions/s": ("samples_per_second", "{:.2f}", 1),
    "tokens/s": ("tokens_per_second", "{:,.0f}", 1),
    "of the matrix rate": ("share_of_matrix_rate", "{:.0%}", 1),
    "peak GiB": ("peak_memory_bytes", "{:.2f}", GIB),
    "--dry-run GiB": ("dry_run_bytes", "{:.2f}", GIB),
    "loss": ("loss", "{:.3f}", 1),
    "steps": ("steps", "{:d}", None),
    "overflows": ("overflows", "{:d}", None),
    "seconds": ("seconds", "{:.0f}", 1),
}


def markdown(report):
    """The report as a table, with a line for each ratio and each reason."""
    machine = report["machine"]
    lines = [f"{machine['device']}, {', '.join(f'{k} {v}' for k, v in report['versions'].items())}", ""]
    lines += [f"| check | outcome | {' | '.join(COLUMNS)} |", "|" + " --- |" * (len(COLUMNS) + 2)]
    for name, figures in report["checks"].items():
        cells = [
            form.format(figures[key] / unit if unit else figures[key]) if key in figures else ""
            for key, form, unit in COLUMNS.values()
        ]
        lines.append(f"| {name} | {figures['outcome']} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- ours to {name}: {value:.2f}x the questions a second" for name, value in report["ratios"].items()]
    reasons = {name: figures["reason"] for name, figures in report["checks"].items() if "reason" in figures}
    lines += [f"- {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def save(options, report):
    for path, text in ((options.json, json.dumps(report, indent=2) + "\n"), (options.markdown, markdown(report))):
        part = Path(f"{path}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)


def prepare(folder, options):
    """Tiny checkpoints, whose configs are changed to the published sizes, and enough questions for every step."""
    from cmexam_tune import tiny
    from cmexam_tune.core import jsonl, schema

    for family in RECIPES:
        tiny.build(family, folder / "models" / family)
    source = Path(options.questions) if options.questions else sides.sample_questions(folder)
    found = list(jsonl.read(source, schema.Question))
    count = QUESTIONS_OF_A_STEP * options.steps
    rounds = [dataclasses.replace(found[i % len(found)], id=f"q:{i}") for i in range(count)]
    jsonl.write(folder / "questions.jsonl", rounds)


def device_name(options):
    import torch

    if options.device == "cpu":
        return f"CPU ({os.cpu_count()} cores)"
    if not torch.cuda.is_available():
        sys.exit("gpu.py: there is no card here. --device cpu --tiny tries the program without one.")
    return torch.cuda.get_device_name()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", metavar="FILE", help="questions.jsonl; default: the shipped sample")
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="default: %(default)s")
    parser.add_argument("--markdown", metavar="FILE", default="gpu.md", help="default: %(default)s")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps, to try the program")
    parser.add_argument("--only", metavar="NAMES", help="of the checks, separated by commas; default: all")
    parser.add_argument("--seconds", type=int, default=570, help="for all checks together; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the checks and their time limits, and stop")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = 6 if options.tiny else max(check.steps for check in CHECKS)
    names = options.only.split(",") if options.only else [check.name for check in CHECKS]
    if unknown := sorted(set(names) - {check.name for check in CHECKS}):
        parser.error(f"no such check: {', '.join(unknown)}; known: {', '.join(check.name for check in CHECKS)}")
    options.checks = [check for check in CHECKS if check.name in names]
    return options


def main():
    options = arguments()
    if options.check:
        perform(options.check, json.loads(options.job))
        return 0
    if options.list:
        for check in options.checks:
            needs = f"needs {check.needs}" if check.needs else ""
            print(f"{check.name:<22}{check.limit:>5} s  {' '.join(filter(None, (*check.overrides, needs)))}".rstrip())
        return 0
    end = time.monotonic() + options.seconds
    report = {
        "benchmark": "gpu",
        "settings": {name: getattr(options, name) for name in ("questions", "device", "tiny", "seconds")},
        "machine": {"device": device_name(options), "platform": platform.platform(), "cores": os.cpu_count()},
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
        "ratios": {}, "checks": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options)
        job = {"questions": str(folder / "questions.jsonl"), "models": str(folder / "models"), "tiny": options.tiny,
               "device": options.device, "steps": options.steps, "asked": 32 if options.tiny else 256,
               "named": bool(options.only)}  # fmt: skip
        for check in options.checks:
            left = end - time.monotonic()
            figures = {"outcome": "not run", "reason": f"{options.seconds} s were used up"}
            if left > 5:
                limit = left if options.only else min(check.limit, left)
                figures = run(check, {**job, "out": str(folder / check.name / "run")}, limit)
            report["checks"][check.name] = figures
            report["ratios"] = ratios(report["checks"])
            save(options, report)
            print(f"{check.name:<22}{figures['outcome']:<9}{figures.get('reason', '')}", flush=True)
    print(f"\n{markdown(report)}", end="")
    return 1 if {"failed", "wrong"} & {figures["outcome"] for figures in report["checks"].values()} else 0


if __name__ == "__main__":
    sys.exit(main())
