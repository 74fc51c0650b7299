"""The log of a training run: read line by line, as curves, and its loss drawn in the terminal and as `loss.svg`.

`points` is the one place that turns a log into curves; reports draw the same ones.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from cmexam_tune.core import documents
from cmexam_tune.core.errors import DataError
from cmexam_tune.report.curves import NAMES

LOG = "log.jsonl"
WIDTH, HEIGHT = 60, 10
"""Characters of the plot in a terminal."""

Entry = Mapping[str, float]
"""One line of a log: `step`, and what was measured then."""
Curve = list[tuple[int, float]]
"""(step, value), in the order in which they were logged."""


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the numbers of each line of a log, which may still grow or be damaged: what is no JSON is left out."""
    entries = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(DataError, ValueError):
            value = documents.parse_json(line.decode(), str(path), finite=False)
            items = value.items() if isinstance(value, dict) else ()
            entries.append({name: item for name, item in items if type(item) in (int, float) and math.isfinite(item)})
    return [entry for entry in entries if "step" in entry]


def points(log: Sequence[Entry], name: str) -> Curve:
    """Return what was logged under a name: `loss`, `eval_loss`."""
    return [(int(entry["step"]), float(entry[name])) for entry in log if name in entry]


def curves(run: Path) -> Mapping[str, Curve]:
    """Return name -> curve of what a run has logged at least twice; empty where there is no log that can be read."""
    log = read_log(run / LOG)
    return {name: curve for name in NAMES if len(curve := points(log, name)) > 1}


def terminal_plot(log: Sequence[Entry]) -> str:
    """Return training (`*`) and validation loss (`o`) as lines of characters; empty where nothing was logged."""
    training, validation = points(log, "loss"), points(log, "eval_loss")
    if not training:
        return ""
    steps = [step for step, _ in (*training, *validation)]
    first, last = min(steps), max(steps)
    if first == last:
        return f"loss: {training[-1][1]:.4g} at step {first}"

    def column(step: int) -> int:
        return round((step - first) / (last - first) * (WIDTH - 1))

    marks = [("*", place, value) for place, value in _means([(column(step), value) for step, value in training])]
    marks += [("o", place, value) for place, value in {column(step): value for step, value in validation}.items()]
    low, high = min(value for _, _, value in marks), max(value for _, _, value in marks)
    canvas = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, place, value in marks:
        canvas[round((high - value) / (high - low or 1) * (HEIGHT - 1))][place] = mark
    labels = [f"{high:.3g}", *[""] * (HEIGHT - 2), f"{low:.3g}"]
    title = "loss: * training" + (", o validation" if validation else "")
    body = [f"{label:>8} |{''.join(line)}".rstrip() for label, line in zip(labels, canvas, strict=True)]
    start = f"step {first}"
    axis = f"{start}{f'step {last}':>{WIDTH - len(start)}}"
    return "\n".join([title, *body, f"{'':>8} +{'-' * WIDTH}", f"{'':>10}{axis}"])


def _means(marks: Curve) -> Curve:
    """Return (column, mean of its values), and between two columns that have one what lies on the line between them."""
    values: dict[int, list[float]] = {}
    for column, value in marks:
        values.setdefault(column, []).append(value)
    means = sorted((column, sum(held) / len(held)) for column, held in values.items())
    line = means[:1]
    for (start, before), (end, after) in itertools.pairwise(means):
        line += [(x, before + (after - before) * (x - start) / (end - start)) for x in range(start + 1, end + 1)]
    return line


def svg_plot(log: Sequence[Entry]) -> str:
    """Return training and validation loss as an SVG picture."""
    named = {
        "training loss": ("#1f6feb", points(log, "loss")),
        "validation loss": ("#d1570a", points(log, "eval_loss")),
    }
    drawn = {name: (colour, curve) for name, (colour, curve) in named.items() if curve}
    steps, values = (
        zip(*(point for _, curve in drawn.values() for point in curve), strict=True) if drawn else ([0], [0])
    )
    last, low, high = max(steps) or 1, min(values), max(values)
    span = high - low or 1.0
    left, top, width, height = 60, 30, 560, 260
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 330" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="330" fill="white"/>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#888"/>',
        f'<text x="{left + width}" y="{top + height + 20}" text-anchor="end">step {last}</text>',
    ]
    for part in (0, 0.5, 1):
        y = f"{top + height * part + 4:.0f}"
        lines.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{high - span * part:.3g}</text>')
    for number, (name, (colour, curve)) in enumerate(drawn.items()):
        places = [(left + width * step / last, top + height * (high - value) / span) for step, value in curve]
        if len(places) <= WIDTH:  # a single point must be seen too
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{left + 10 + 130 * number}" y="20" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])
