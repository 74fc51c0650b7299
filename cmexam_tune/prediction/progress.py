"""How far a prediction is, how fast it goes, how long it will take: a bar in a terminal, else a line now and then."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from cmexam_tune.core import cli
from cmexam_tune.prediction.sharing import Processes

T = TypeVar("T")
EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


def progress(items: Iterable[T], done: int, total: int, processes: Processes) -> Iterator[T]:
    """Pass `items` on and show how many of `total` are there; of several processes the first speaks for all.

    Args:
        items: this process's share.
        done: how many were there before.
        total: how many there will be, of all processes.
        processes: who else works; their shares are alike.
    """
    if not processes.first:
        yield from items
    elif sys.stderr.isatty():
        yield from _bar(items, done, total, processes.count)
    else:
        yield from _lines(items, done, total, processes.count)


def _bar(items: Iterable[T], done: int, total: int, step: int) -> Iterator[T]:
    from tqdm import tqdm

    with tqdm(desc="predict", total=total, initial=done, unit=" questions") as bar:
        for item in items:
            yield item
            bar.update(min(step, total - bar.n))


def _lines(items: Iterable[T], done: int, total: int, step: int) -> Iterator[T]:
    started = spoke = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now, here = time.monotonic(), min(number * step, total - done)
        if now - spoke >= EVERY and done + here < total:
            spoke, speed = now, here / (now - started)
            left = duration((total - done - here) / speed)
            cli.note(f"predict: {done + here} of {total} questions, {speed:.3g} a second, {left} left")


def duration(seconds: float) -> str:
    """Return a time for people: `42 s`, `7 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
