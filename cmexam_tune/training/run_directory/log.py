"""The curves of a training run, read from its log."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

from cmexam_tune.core import documents
from cmexam_tune.core.errors import DataError

LOG = "log.jsonl"
CURVES = ("loss", "eval_loss", "learning_rate", "eval_exam_accuracy")


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the numbers of each line of a log, which may still grow or be damaged: what is no JSON is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(DataError, ValueError):
            value = documents.parse_json(line.decode(), str(path), finite=False)
            items = value.items() if isinstance(value, dict) else ()
            found.append({name: item for name, item in items if type(item) in (int, float) and math.isfinite(item)})
    return [entry for entry in found if "step" in entry]


def curves(run: Path) -> Mapping[str, list[tuple[int, float]]]:
    """Return {name: [(step, value), ...]} of what a run has logged; empty where there is no log that can be read."""
    log = read_log(run / LOG)
    found = {name: [(int(entry["step"]), entry[name]) for entry in log if name in entry] for name in CURVES}
    return {name: points for name, points in found.items() if len(points) > 1}
