"""What there is to choose from: each recipe with its model, exam, method, prompt, hardware and row of a paper."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cmexam_tune.config import find_recipe, read_yaml
from cmexam_tune.report.papers import entries
from cmexam_tune.report.table import short

FOLDERS = ("ptuning", "lora", "head", "full", "sft", "dpo", "grpo", "zeroshot")
"""Of recipes, in the order of the papers; those that learn from verdicts are named by their objective."""
NOT_TUNED = "-"
ROOM = 70
"""GB of a card of 80 GB for weights, of 2 bytes each; here a model answers on one card."""


@dataclass(frozen=True)
class RecipeLine:
    """One recipe in words."""

    recipe: str
    model: str
    """Base model: its name on the hub, at an address, or where its folder is expected."""
    exam: str
    method: str
    prompt: str
    """Style and, where it is not the model's own, the wrapper."""
    hardware: str
    row: str
    """Of a paper; a dash where the recipe reproduces none."""
    published: str

    def matches(self, word: str) -> bool:
        """Return whether a word stands in any of the columns, in either case."""
        return any(word.lower() in str(getattr(self, field.name)).lower() for field in fields(self))


def lines() -> dict[str, list[RecipeLine]]:
    """Return folder -> its recipes, in the order of entries.yaml."""
    by_folder: dict[str, list[RecipeLine]] = {folder: [] for folder in FOLDERS}
    for entry in entries.by_recipe().values():
        path = find_recipe(entry.recipe)
        by_folder[path.parent.name].append(_line(entry, read_yaml(path)))
    return by_folder


def _line(entry: entries.Entry, recipe: Mapping[str, Any]) -> RecipeLine:
    model, prompt = recipe["model"], recipe.get("prompt", {})
    style, template = str(prompt.get("style", "answer")), prompt.get("template", "auto")
    return RecipeLine(
        entry.recipe,
        model["model_name_or_path"],
        entry.exam,
        recipe["tuning"]["method"] if entry.trained else NOT_TUNED,
        "own words" if prompt.get("ask") else style if template == "auto" else f"{style}, {template}",
        hardware(entry, remote=model["family"] == "endpoint"),
        entry.paper[1] if entry.paper else "-",
        published(entry),
    )


def published(entry: entries.Entry) -> str:
    """Return the published numbers in one cell."""
    numbers = entry.published
    return ", ".join(f"{short(key)} {numbers[key]:g}" for key in entries.METRICS if key in numbers) or "-"


def hardware(entry: entries.Entry, *, remote: bool) -> str:
    """Return which card a recipe fits."""
    if remote:
        return "none (API)"
    if entry.billions > 12 and entry.recipe.startswith("full_"):
        return "8 x 80 GB (ZeRO-3)"
    if 2 * entry.billions > ROOM:
        return f"{math.ceil(2 * entry.billions / ROOM)} x 80 GB, behind a server (vLLM)"
    if entry.billions > 12:
        return "1 x A800"
    return "1 x V100 32 GB" if entry.billions > 1 else "1 x V100 16 GB"


def about(recipe: str) -> Sequence[str]:
    """Return the comment at the head of a recipe's file, line by line."""
    comment = []
    for line in find_recipe(recipe).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return comment
