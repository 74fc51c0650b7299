"""Writes docs/configuration.md from the config's schema and recipes/README.md from entries.yaml and published.yaml.

Both in English and, as *.zh.md, in Chinese: the words around them stand here, those of the keys in settings.zh.yaml.
`make docs` runs it; with --check it only says whether the files are current and no Chinese is missing.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
from pathlib import Path

import yaml

from cmexam_tune import config
from cmexam_tune.config import describing, installed_versions, settings
from cmexam_tune.core import variants
from cmexam_tune.report.papers import entries, recipe_list

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "ptuning": ("P-tuning v2", "P-tuning v2"),
    "lora": ("LoRA", "LoRA"),
    "head": ("Classification heads", "分类头"),
    "full": ("Full fine-tuning", "全量微调"),
    "sft": ("Learning from verdicts: imitate what was right", "从判分中学习：模仿答对的输出"),
    "dpo": ("Learning from verdicts: prefer right over wrong", "从判分中学习：偏好答对而非答错的输出"),
    "grpo": ("Learning from verdicts: reinforce what the key rewards", "从判分中学习：强化得分高的输出"),
    "zeroshot": ("Off the shelf: nothing is trained", "不训练，直接作答"),
}
"""Folder -> title in English and in Chinese."""
# Dense fp16 tensor peak (datasheets) times a share that frozen-base training of this size reaches: assumptions.
CARDS = {"V100": 125e12 * 0.30, "A800": 312e12 * 0.40}
# Forward, backward through activations, and recomputation under gradient checkpointing; full tuning adds weights.
FLOPS_PER_PARAMETER = {"full": 8, "head": 6}


TYPES = {
    "string": "字符串",
    "integer": "整数",
    "number": "数值",
    "boolean": "布尔值",
    "mapping": "映射",
    "list": "列表",
    "anything": "任意",
}
PHRASES = {" or ": " 或 ", "at least": "不小于", "at most": "不大于", "above": "大于", "below": "小于"}


MISSING: list[str] = []
"""Help texts that have no Chinese yet."""


@functools.cache
def chinese() -> dict[str, str]:
    """Return English help text -> Chinese."""
    loaded: dict[str, str] = yaml.safe_load(Path(__file__).with_name("settings.zh.yaml").read_text(encoding="utf-8"))
    return loaded


def in_language(text: str, zh: bool) -> str:
    """Return a help text in a language; one that nobody has translated stays English, and is counted as missing."""
    flat = " ".join(text.split())
    if zh and flat not in chinese():
        MISSING.append(flat)
    return chinese().get(flat, flat) if zh else text


def values_in_chinese(values: str) -> str:
    """Return in Chinese which values a key takes; choices and numbers are what they are."""
    text = re.sub(r"list of (\w+)s\b", lambda match: f"{TYPES[match[1]]}列表", values)
    text = re.sub(rf"\b({'|'.join(TYPES)})\b", lambda match: TYPES[match[1]], text)
    text = re.sub("|".join(PHRASES), lambda match: PHRASES[match[0]], text)
    text = re.sub(r"([\d,]+) to ([\d,]+)", r"\1 至 \2", text)
    return re.sub(r"([^\x00-\xff]), ", r"\1，", text.replace(" and 不", " 且不").replace(" and 小", " 且小"))


def table(cls: type, zh: bool = False) -> str:
    """Return a Markdown table of a section."""
    lines = ["| 配置项 | 取值 | 默认 | |" if zh else "| key | values | default | |", "| --- | --- | --- | --- |"]
    for key in describing.keys(cls):
        default = ("必填" if zh else key.default) if key.default == "required" else f"`{key.default}`"
        lines.append(
            f"| `{key.name}` | {values_in_chinese(key.values) if zh else key.values} | {default} | {in_language(key.help, zh)} |"
        )
    return "\n".join(lines)


CONFIGURATION = (
    "# Configuration reference\n\n<!-- Written by docs/generate.py from cmexam_tune/config/settings.py; `make docs` after a change. -->\n\n"
    "中文：[configuration.zh.md](configuration.zh.md)\n\n"
    "One experiment is one YAML file with the sections `data`, `prompt`, `model`, `tuning`, `training`, `generation` "
    "and the key `out` (the run folder). `extends: other.yaml` starts from another file. On the command line, "
    "`section.key=value` changes one value. `--config NAME` is looked up as a path, then in any folder of the "
    "checkout's `recipes/`, then among the shipped recipes. Unknown keys, wrong types and missing keys are all "
    "reported at once.\n\n"
    "Where a recipe says nothing, the default below holds, which is PEFT's or transformers' for their names; "
    "`cmexam-tune train --config NAME --print-config` shows what results. A model behind an address needs no more "
    "than this, and `out` is `runs/` and the recipe's name:\n\n"
    "```yaml\nmodel:\n  family: endpoint\n  base_url: http://127.0.0.1:8000/v1\n  model_name_or_path: my-model\n```\n\n"
    "Editors complete and check recipes by their JSON Schema: `cmexam-tune train --schema > recipe.schema.json`, and "
    "`# yaml-language-server: $schema=recipe.schema.json` as the first line of a recipe (VS Code, Neovim, Emacs).\n",
    "# 配置项\n\n<!-- 由 docs/generate.py 根据 settings.py 和 settings.zh.yaml 生成；修改后运行 `make docs`。 -->\n\n"
    "English: [configuration.md](configuration.md)\n\n"
    "一个实验就是一个 YAML 文件，包含 `data`、`prompt`、`model`、`tuning`、`training`、`generation` 等部分和 `out`（运行文件夹）。"
    "`extends: other.yaml` 继承另一个文件。命令行的 `section.key=value` 修改一个值。`--config NAME` 先按路径查找，再在 `recipes/` "
    "的各文件夹里找，最后在随包安装的配方里找。未知的配置项、类型错误和缺少的配置项会一次全部报出。\n\n"
    "配方没有写的，取下面的默认值（PEFT 和 transformers 的名称取它们各自的默认值）；`cmexam-tune train --config NAME "
    "--print-config` 显示最终结果。API 模型的配方只需要这几行，`out` 默认为 `runs/` 加配方名：\n\n"
    "```yaml\nmodel:\n  family: endpoint\n  base_url: http://127.0.0.1:8000/v1\n  model_name_or_path: my-model\n```\n\n"
    "编辑器可以用 JSON Schema 补全和检查配方：`cmexam-tune train --schema > recipe.schema.json`，并在配方第一行写 "
    "`# yaml-language-server: $schema=recipe.schema.json`（VS Code、Neovim、Emacs）。\n",
)
"""The beginning of the page, in English and in Chinese."""
BESIDE = {
    "training": (
        f"Beside these, every field of `transformers.TrainingArguments` under its own name, except `output_dir` "
        f"({len(installed_versions.training())} of them): `learning_rate`, `num_train_epochs`, `max_steps`, "
        "`per_device_train_batch_size`, `warmup_steps` (below 1: a share of all steps), `lr_scheduler_type`, "
        "`gradient_checkpointing`, `deepspeed`, `eval_strategy`, `save_steps`, `report_to`, `seed`, ... "
        "`deepspeed` also takes the names `zero2`, `zero3` and `zero3_offload`.\n",
        f"此外可用 `transformers.TrainingArguments` 的全部字段（`output_dir` 除外，共 {len(installed_versions.training())} "
        "个），名称不变：`learning_rate`、`num_train_epochs`、`max_steps`、`per_device_train_batch_size`、"
        "`warmup_steps`（小于 1 表示占总步数的比例）、`lr_scheduler_type`、`gradient_checkpointing`、`deepspeed`、"
        "`eval_strategy`、`save_steps`、`report_to`、`seed` 等。`deepspeed` 还可以写 `zero2`、`zero3`、`zero3_offload`。\n",
    ),
    "generation": (
        "Beside these, every option of `transformers.GenerationConfig` under its own name: `max_new_tokens`, "
        "`do_sample`, `temperature`, `top_p`, `num_beams`, `repetition_penalty`, ...\n",
        "此外可用 `transformers.GenerationConfig` 的全部选项，名称不变：`max_new_tokens`、`do_sample`、`temperature`、"
        "`top_p`、`num_beams`、`repetition_penalty` 等。\n",
    ),
}
"""Section -> what it holds beside its table."""
OTHER_NAMES = (
    "## Names of other tools\n\nAccepted with a note, so that settings can be carried over:\n\n"
    "| there | here |\n| --- | --- |\n",
    "## 其他工具的名称\n\n可以直接使用，程序会给出提示：\n\n| 其他工具 | 本项目 |\n| --- | --- |\n",
)


def configuration(zh: bool = False) -> str:
    """Return docs/configuration.md."""
    parts = [CONFIGURATION[zh]]
    for name, cls in settings.SECTIONS.items():
        if name == "tuning":
            parts.append(tuning(zh))
            continue
        parts.append(f"## {name}\n\n{in_language(inspect.getdoc(cls) or '', zh)}\n\n{table(cls, zh)}\n")
        if name in BESIDE:
            parts.append(BESIDE[name][zh])
    names = "\n".join(f"| `{section}.{old}` | `{new}` |" for (section, old), new in sorted(config.ALIASES.items()))
    return "\n".join([*parts, f"{OTHER_NAMES[zh]}{names}\n"])


def tuning(zh: bool = False) -> str:
    """Return the section `tuning`, one table for each method."""
    parts = [
        "## tuning\n\n`method` 是 `cmexam_tune/models/adapters/` 里的文件名，其他配置项由该方法决定。\n"
        if zh
        else "## tuning\n\n`method` names a file in `cmexam_tune/models/adapters/`; the other keys are that method's.\n"
    ]
    for method in variants.names("tuning"):
        first = (inspect.getdoc(variants.load("tuning", method)) or "").split("\n\n")[0].replace("\n", " ")
        cls = variants.the_class("tuning", method).Settings
        body = table(cls, zh) if dataclasses.fields(cls) else "没有配置项。" if zh else "No keys."
        parts.append(f"### method: {method}\n\n{in_language(first, zh)}\n\n{body}\n")
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


RECIPES = (
    "# Recipes\n\n<!-- Written by docs/generate.py from cmexam_tune/report/papers/entries.yaml and published.yaml; `make docs`. -->\n\n"
    "中文：[README.zh.md](README.zh.md)\n\n"
    "A recipe is one experiment: `cmexam-tune train --config lora_llama.yaml`, from any folder. A recipe that starts "
    "from another (`extends:`) states only what differs. Where the paper and the released scripts disagree there are "
    "two, without and with `_script`. `cmexam-tune recipes WORD` finds one by model, exam, method, prompt, row or "
    "hardware. `cmexam-tune reproduce RECIPE --out DIR` runs a whole row, for several seeds, and puts it beside the "
    "published numbers.\n\n"
    "The shell recipes run everything from the raw CSVs to the report, and pass extra arguments to training: "
    "`bash recipes/chatglm_ptuning.sh training.max_steps=10`; `run.sh RECIPE` does it for any CMExam recipe.\n",
    "# 配方\n\n<!-- 由 docs/generate.py 根据 entries.yaml 和 published.yaml 生成；修改后运行 `make docs`。 -->\n\n"
    "English: [README.md](README.md)\n\n"
    "一个配方就是一个实验：`cmexam-tune train --config lora_llama.yaml`，在任何文件夹都可以用。继承（`extends:`）其他配方的，只写不同之处。"
    "论文与官方脚本不一致的有两个配方，后者带 `_script`。`cmexam-tune recipes 关键词` 按模型、考试、方法、提示、论文中的行或硬件查找。"
    "`cmexam-tune reproduce 配方 --out 文件夹` 复现论文的一行，可用多个随机种子，并与论文结果并列。\n\n"
    "shell 配方从原始 CSV 一直做到报告，多余的参数传给训练：`bash recipes/chatglm_ptuning.sh training.max_steps=10`；"
    "`run.sh 配方` 适用于任何 CMExam 配方。\n",
)
"""The beginning of the page, in English and in Chinese."""
ESTIMATES = (
    "\nPublished numbers are percentages from the papers. Rows of one published table use different denominators and formulas; "
    "`cmexam-tune evaluate --profile all` shows yours under each.\n\n"
    "Hours are estimates for one card, not measurements: operations = parameters x tokens x "
    "6 (forward, backward through the activations, recomputation; 8 where all weights are tuned), divided by 30% of "
    "the V100's 125 and 40% of the A800's 312 teraflops; tokens = questions x epochs x the tokens of an average "
    "question in that model's vocabulary, without padding. `cmexam-tune train --config ... --dry-run` estimates "
    "your own settings, and a run's progress bar the rest of it.\n",
    "\n论文结果均为百分数。同一张表的各行用了不同的分母和公式，`cmexam-tune evaluate --profile all` 用每一种给你的结果评分。\n\n"
    "小时数是单卡的估算，不是实测：运算量 = 参数量 × token 数 × 6（前向、激活的反向、重算；全量微调为 8），除以 V100 125 TFLOPS 的 30%、"
    "A800 312 TFLOPS 的 40%；token 数 = 题数 × epoch × 该模型词表下每题的平均 token 数，不含填充。"
    "`cmexam-tune train --config ... --dry-run` 估算你自己的设置，训练时的进度条估算剩余时间。\n",
)
"""Its end: what the numbers are."""
HEADS = (
    ("recipe", "base model", "exam", "prompt", "row", "published", "hardware"),
    ("配方", "基座模型", "考试", "提示", "论文中的行", "论文结果", "硬件"),
)


def recipes(zh: bool = False) -> str:
    """Return recipes/README.md: a table of the recipes of each folder."""
    parts, listed = [""], recipe_list.lines()
    for folder, title in FOLDERS.items():
        hours_on = [] if folder == "zeroshot" else [f"{'小时' if zh else 'hours'} {card}" for card in CARDS]
        columns = [*HEADS[zh], *hours_on]
        lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
        for line in listed[folder]:
            cells = [f"[{line.recipe}]({folder}/{line.recipe}.yaml)", line.model, line.exam, line.prompt, line.row]
            cells += [line.published, line.hardware]
            cells += [hours(entries.by_recipe()[line.recipe], card) for card in CARDS]
            lines.append(f"| {' | '.join(cells[: len(columns)])} |")
        parts.append(f"## {title[zh]}\n\n" + "\n".join(lines) + "\n")
    return RECIPES[zh] + "\n".join(parts) + ESTIMATES[zh]


FILES = {
    ROOT / "docs" / "configuration.md": configuration,
    ROOT / "docs" / "configuration.zh.md": functools.partial(configuration, zh=True),
    ROOT / "recipes" / "README.md": recipes,
    ROOT / "recipes" / "README.zh.md": functools.partial(recipes, zh=True),
}


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
    for text in dict.fromkeys(MISSING):
        sys.stderr.write(f"docs/settings.zh.yaml: the Chinese is missing of: {text}\n")
    return int((check and bool(stale)) or bool(MISSING))


if __name__ == "__main__":
    sys.exit(main())
