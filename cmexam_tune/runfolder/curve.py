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
    """Return the training loss as lines of characters; empty for fewer than two points."""
    curve = points(log, "loss")
    if len(curve) < 2:
        return ""
    columns = _columns(curve)
    low, high = min(columns), max(columns)
    rows = [min(int((high - value) / (high - low or 1) * HEIGHT), HEIGHT - 1) for value in columns]
    lines = ["".join("*" if row == level else " " for row in rows).rstrip() for level in range(HEIGHT)]
    labels = [f"{high:.3g}", *[""] * (HEIGHT - 2), f"{low:.3g}"]
    body = [f"{label:>8} |{line}" for label, line in zip(labels, lines, strict=True)]
    last = f"step {curve[-1][0]}"
    return "\n".join(["training loss", *body, f"{'':>8} +{'-' * len(columns)}", f"{'':>10}{last:>{len(columns)}}"])


def _columns(curve: Points) -> list[float]:
    """Return the mean loss of each column."""
    count = min(WIDTH, len(curve))
    bounds = [round(i * len(curve) / count) for i in range(count + 1)]
    parts = [curve[start:end] for start, end in itertools.pairwise(bounds)]
    return [sum(value for _, value in part) / len(part) for part in parts]


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
        lines.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="{left + 10 + 130 * number}" y="20" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])
