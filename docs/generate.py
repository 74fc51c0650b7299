"""Writes docs/configuration.md from the config's schema and recipes/README.md from entries.yaml and published.yaml.

`make docs` runs it; with --check it only says whether the files are current.
"""

import argparse
import dataclasses
import inspect
import sys
from pathlib import Path

from cmexam_tune import config
from cmexam_tune.config import describing, installed_versions, settings
from cmexam_tune.core import variants
from cmexam_tune.report.papers import entries, recipe_list

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "ptuning": "P-tuning v2",
    "lora": "LoRA",
    "head": "Classification heads",
    "full": "Full fine-tuning",
    "zeroshot": "Off the shelf: nothing is trained",
}
# Dense fp16 tensor peak (datasheets) times a share that frozen-base training of this size reaches: assumptions.
CARDS = {"V100": 125e12 * 0.30, "A800": 312e12 * 0.40}
# Forward, backward through activations, and recomputation under gradient checkpointing; full tuning adds weights.
FLOPS_PER_PARAMETER = {"full": 8, "head": 6}


def table(cls: type) -> str:
    """Return a Markdown table of a section."""
    lines = ["| key | values | default | |", "| --- | --- | --- | --- |"]
    for key in describing.keys(cls):
        default = key.default if key.default == "required" else f"`{key.default}`"
        lines.append(f"| `{key.name}` | {key.values} | {default} | {key.help} |")
    return "\n".join(lines)


def configuration() -> str:
    """Return docs/configuration.md."""
    parts = [
        "# Configuration reference\n\n<!-- Written by docs/generate.py from cmexam_tune/config/settings.py; `make docs` after a change. -->\n",
        "One experiment is one YAML file with the sections `data`, `prompt`, `model`, `tuning`, `training`, `generation` "
        "and the key `out` (the run folder). `extends: other.yaml` starts from another file. On the command line, "
        "`section.key=value` changes one value. `--config NAME` is looked up as a path, then in any folder of the "
        "checkout's `recipes/`, then among the shipped recipes. Unknown keys, wrong types and missing keys are all "
        "reported at once.\n",
        "Where a recipe says nothing, the default below holds, which is PEFT's or transformers' for their names; "
        "`cmexam-tune train --config NAME --print-config` shows what results. A model behind an address needs no more "
        "than this, and `out` is `runs/` and the recipe's name:\n\n"
        "```yaml\nmodel:\n  family: endpoint\n  base_url: http://127.0.0.1:8000/v1\n  model_name_or_path: my-model\n```\n",
        "Editors complete and check recipes by their JSON Schema: `cmexam-tune train --schema > recipe.schema.json`, and "
        "`# yaml-language-server: $schema=recipe.schema.json` as the first line of a recipe (VS Code, Neovim, Emacs).\n",
    ]
    for name, cls in settings.SECTIONS.items():
        if name == "tuning":
            parts.append(tuning())
            continue
        parts.append(f"## {name}\n\n{inspect.getdoc(cls)}\n\n{table(cls)}\n")
        if name == "training":
            parts.append(
                f"Beside these, every field of `transformers.TrainingArguments` under its own name, except `output_dir` "
                f"({len(installed_versions.training())} of them): `learning_rate`, `num_train_epochs`, `max_steps`, "
                "`per_device_train_batch_size`, `warmup_steps` (below 1: a share of all steps), `lr_scheduler_type`, "
                "`gradient_checkpointing`, `deepspeed`, `eval_strategy`, `save_steps`, `report_to`, `seed`, ... "
                "`deepspeed` also takes the names `zero2`, `zero3` and `zero3_offload`.\n"
            )
        if name == "generation":
            parts.append(
                "Beside these, every option of `transformers.GenerationConfig` under its own name: `max_new_tokens`, "
                "`do_sample`, `temperature`, `top_p`, `num_beams`, `repetition_penalty`, ...\n"
            )
    names = "\n".join(f"| `{section}.{old}` | `{new}` |" for (section, old), new in sorted(config.ALIASES.items()))
    parts.append(
        "## Names of other tools\n\nAccepted with a note, so that settings can be carried over:\n\n"
        f"| there | here |\n| --- | --- |\n{names}\n"
    )
    return "\n".join(parts)


def tuning() -> str:
    """Return the section `tuning`, one table for each method."""
    parts = [
        "## tuning\n\n`method` names a file in `cmexam_tune/models/adapters/`; the other keys are that method's.\n"
    ]
    for method in variants.names("tuning"):
        first = (inspect.getdoc(variants.load("tuning", method)) or "").split("\n\n")[0].replace("\n", " ")
        cls = variants.the_class("tuning", method).Settings
        body = table(cls) if dataclasses.fields(cls) else "No keys."
        parts.append(f"### method: {method}\n\n{first}\n\n{body}\n")
    return "\n".join(parts)


def hours(entry: entries.Entry, card: str) -> str:
    """Return the estimated hours of training on one card."""
    if not entry.trained or not entry.tokens:
        return "-"
    loaded = config.load_config(entry.recipe)
    epochs = entry.epochs or float(loaded.training.arguments.get("num_train_epochs", 3))
    factor = FLOPS_PER_PARAMETER.get(loaded.tuning.method, 6)
    seconds = factor * entry.billions * 1e9 * entry.tokens * entry.questions * epochs / CARDS[card]
    return f"{seconds / 3600:.1f}"


def recipes() -> str:
    """Return recipes/README.md."""
    head = (
        "# Recipes\n\n<!-- Written by docs/generate.py from cmexam_tune/report/papers/entries.yaml and published.yaml; `make docs`. -->\n\n"
        "A recipe is one experiment: `cmexam-tune train --config lora_llama.yaml`, from any folder. A recipe that starts "
        "from another (`extends:`) states only what differs. Where the paper and the released scripts disagree there are "
        "two, without and with `_script`. `cmexam-tune reproduce RECIPE --out DIR` runs a whole row, for several seeds, "
        "and puts it beside the published numbers.\n\n"
        "The shell recipes run everything from the raw CSVs to the report, and pass extra arguments to training: "
        "`bash recipes/chatglm_ptuning.sh training.max_steps=10`; `run.sh RECIPE` does it for any CMExam recipe.\n"
    )
    tail = (
        "\nPublished numbers are percentages from the papers. Rows of one published table use different denominators and formulas; "
        "`cmexam-tune evaluate --profile all` shows yours under each.\n\n"
        "Hours are estimates for one card, not measurements: operations = parameters x tokens x "
        "6 (forward, backward through the activations, recomputation; 8 where all weights are tuned), divided by 30% of "
        "the V100's 125 and 40% of the A800's 312 teraflops; tokens = questions x epochs x the tokens of an average "
        "question in that model's vocabulary, without padding. `cmexam-tune train --config ... --dry-run` estimates "
        "your own settings, and a run's progress bar the rest of it.\n"
    )
    parts, listed = [head], recipe_list.lines()
    for folder, title in FOLDERS.items():
        columns = ["recipe", "base model", "exam", "prompt", "row", "published", "hardware"]
        columns += [] if folder == "zeroshot" else [f"hours {card}" for card in CARDS]
        lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
        for line in listed[folder]:
            cells = [f"[{line.recipe}]({folder}/{line.recipe}.yaml)", line.model, line.exam, line.prompt, line.row]
            cells += [line.published, line.hardware]
            cells += [hours(entries.known()[line.recipe], card) for card in CARDS]
            lines.append(f"| {' | '.join(cells[: len(columns)])} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts) + tail


FILES = {ROOT / "docs" / "configuration.md": configuration, ROOT / "recipes" / "README.md": recipes}


def main() -> int:
    """Write the files, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check = parser.parse_args().check
    stale = [path for path, make in FILES.items() if not path.is_file() or path.read_text(encoding="utf-8") != make()]
    for path in stale:
        if check:
            sys.stderr.write(f"{path}: not current, run `make docs`\n")
        else:
            path.write_text(FILES[path](), encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
