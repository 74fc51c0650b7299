"""How far a piece of work is, how fast it goes and how long it will take, in the same words everywhere.

On a terminal a bar, in a notebook a widget, else (a log, a pipe) a line now and then; with several processes (torchrun)
only the first one reports.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol, TypeVar

from cmexam_tune.core import cli

T = TypeVar("T")
EVERY, REFRESH = 30.0, 0.2
"""Seconds between two lines where there is no terminal; between two pictures where there is one."""


class _Bar(Protocol):
    """What is used of tqdm's bars, which have no types."""

    n: float

    def clear(self) -> object: ...
    def refresh(self) -> object: ...
    def close(self) -> object: ...
    def set_description_str(self, text: str) -> object: ...


class Progress:
    """Work on `total` things (None: nobody knows how many), used as a context.

    Args:
        what: the name of the work, for example `train`.
        unit: what is counted, in the plural.
        total: how many there will be.
        done: how many were there before.
        shown: False: nothing is shown at all.
        patience: seconds in which nothing is shown; short work needs no bar.
    """

    def __init__(
        self, what: str, unit: str, total: int | None = None, *, done: int = 0, shown: bool = True, patience: float = 0
    ) -> None:
        self.what, self.unit, self.total, self.done = what, unit, total, done
        self._before, self._started = done, time.monotonic()
        self._shown = shown and os.environ.get("RANK", "0") == "0"
        self._bar: _Bar | None = None
        live = (cli.in_notebook() and find_spec("ipywidgets") is not None) or sys.stderr.isatty()
        self._live, self._every = live, REFRESH if live else EVERY
        self._next = self._started + (patience if live else EVERY)
        if not patience and live:
            self._show()

    def move(self, count: int = 1, facts: str = "") -> None:
        """Count what was done, and show it from time to time.

        Args:
            count: how many more.
            facts: what else is worth seeing, for example the loss.
        """
        self.done += count
        now = time.monotonic()
        if now >= self._next and not (self.done == self.total and not self._live):
            self._next = now + self._every
            self._show(facts)

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Pass items on, one step each."""
        with self:
            for item in items:
                yield item
                self.move()

    def say(self, text: str) -> None:
        """Print a line without spoiling the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.clear()
        cli.note(text)
        if self._bar is not None:
            self._bar.refresh()

    def text(self, facts: str = "") -> str:
        """Return how far it is: `train: 120 of 168 steps, 18 a second, 3 s left; loss 1.48`."""
        of = "" if self.total is None else f" of {self.total:,}"
        text = f"{self.what}: {self.done:,}{of} {self.unit}"
        here, seconds = self.done - self._before, time.monotonic() - self._started
        if here and seconds:
            text += f", {pace(here / seconds)}"
            if self.total is not None:
                text += f", {duration((self.total - self.done) * seconds / here)} left"
        return text + (f"; {facts}" if facts else "")

    def _show(self, facts: str = "") -> None:
        if not self._shown:
            return
        if not self._live:
            cli.note(self.text(facts))
            return
        text = cli.printable(self.text(facts))
        if self._bar is None:
            self._bar = _bar(text, self.total, self.done)
        else:
            self._bar.n = self.done
            self._bar.set_description_str(text)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _bar(text: str, total: int | None, done: int) -> _Bar:
    """Return a bar of tqdm, which draws it; the words beside it are ours, the same as in a log."""
    # Not `tqdm.auto`, which loads IPython wherever it is installed.
    tqdm = import_module("tqdm.notebook" if cli.in_notebook() else "tqdm").tqdm
    bar: _Bar = tqdm(
        desc=text, total=total, initial=done, bar_format="{desc} |{bar}|" if total else "{desc}", leave=False
    )
    return bar


def pace(speed: float) -> str:
    """Return how fast it goes: `18 a second`, or for slow work `42 s each`."""
    if speed < 1:
        return f"{duration(1 / speed)} each"
    return f"{speed:,.0f} a second" if speed >= 10 else f"{speed:.2g} a second"


def duration(seconds: float) -> str:
    """Return a time for people: `42 s`, `7 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
