"""The loss of a run as a plot: in the terminal and as `loss.svg`."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT = 60, 10
"""Characters of the plot in a terminal."""
Points = Sequence[tuple[int, float]]


def points(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of what was logged under a name: `loss`, `eval_loss`."""
    return [(int(entry["step"]), float(entry[name])) for entry in log if name in entry and "step" in entry]


def text(log: Sequence[Mapping[str, Any]]) -> str:
    """Return training (`*`) and validation loss (`o`) as lines of characters; empty where nothing was logged."""
    trained, held_out = points(log, "loss"), points(log, "eval_loss")
    if not trained:
        return ""
    every = [*trained, *held_out]
    if len({step for step, _ in every}) == 1:
        return f"loss: {trained[-1][1]:.4g} at step {trained[-1][0]}"
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    marks = {place: ("*", value) for place, value in enumerate(_columns(trained, first, last)) if value is not None}
    below = {_column(step, first, last): ("o", value) for step, value in held_out}
    values = [value for _, value in (*marks.values(), *below.values())]
    low, high = min(values), max(values)
    canvas = [[" "] * WIDTH for _ in range(HEIGHT)]
    for place, (mark, value) in (*marks.items(), *below.items()):
        canvas[round((high - value) / (high - low or 1) * (HEIGHT - 1))][place] = mark
    labels = [f"{high:.3g}", *[""] * (HEIGHT - 2), f"{low:.3g}"]
    body = [f"{label:>8} |{''.join(line)}".rstrip() for label, line in zip(labels, canvas, strict=True)]
    title = "loss: * training" + (", o validation" if held_out else "")
    ends = f"step {first}", f"step {last}"
    axis = f"{ends[0]}{ends[1]:>{WIDTH - len(ends[0])}}"
    return "\n".join([title, *body, f"{'':>8} +{'-' * WIDTH}", f"{'':>10}{axis}"])


def _column(step: int, first: int, last: int) -> int:
    return round((step - first) / (last - first or 1) * (WIDTH - 1))


def _columns(curve: Points, first: int, last: int) -> list[float | None]:
    """Return the mean loss of each column; between two that have one, what lies on the line between them."""
    found: dict[int, list[float]] = {}
    for step, value in curve:
        found.setdefault(_column(step, first, last), []).append(value)
    means = sorted((place, sum(values) / len(values)) for place, values in found.items())
    columns: list[float | None] = [None] * WIDTH
    columns[means[0][0]] = means[0][1]
    for (start, before), (end, after) in itertools.pairwise(means):
        for place in range(start + 1, end + 1):
            columns[place] = before + (after - before) * (place - start) / (end - start)
    return columns


def svg(log: Sequence[Mapping[str, Any]]) -> str:
    """Return training and validation loss as an SVG picture."""
    curves = {
        "training loss": ("#1f6feb", points(log, "loss")),
        "validation loss": ("#d1570a", points(log, "eval_loss")),
    }
    every = [point for _, curve in curves.values() for point in curve]
    if not every:
        every = [(0, 0.0)]
    last = max(step for step, _ in every) or 1
    low, high = min(value for _, value in every), max(value for _, value in every)
    span = high - low or 1.0
    left, top, wide, tall = 60, 30, 560, 260
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 330" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="330" fill="white"/>',
        f'<path d="M{left} {top}V{top + tall}H{left + wide}" fill="none" stroke="#888"/>',
        *(
            f'<text x="{left - 6}" y="{top + tall * part + 4:.0f}" text-anchor="end">{high - span * part:.3g}</text>'
            for part in (0, 0.5, 1)
        ),
        f'<text x="{left + wide}" y="{top + tall + 20}" text-anchor="end">step {last}</text>',
    ]
    for number, (name, (colour, curve)) in enumerate((n, c) for n, c in curves.items() if c[1]):
        places = [f"{left + wide * s / last:.1f},{top + tall * (high - v) / span:.1f}" for s, v in curve]
        if len(places) <= WIDTH:
            spots = (place.split(",") for place in places)
            lines += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in spots]
        lines.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{left + 10 + 130 * number}" y="20" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])
