"""The curves of a training run, read from its log."""

import json
from collections.abc import Mapping
from pathlib import Path

LOG = "log.jsonl"
CURVES = ("loss", "eval_loss", "learning_rate", "eval_exam_accuracy")


def curves(run: Path) -> Mapping[str, list[tuple[int, float]]]:
    """Return {name: [(step, value), ...]} of what a run has logged; empty where there is no log that can be read."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    try:
        lines = (run / LOG).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a run that goes on
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            continue
        for name in CURVES:
            if isinstance(value := entry.get(name), int | float):
                found[name].append((entry["step"], float(value)))
    return {name: points for name, points in found.items() if len(points) > 1}
