"""The entries of the papers' tables: which recipe reproduces which of them. `entries.yaml` is beside this file."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cmexam_tune.core import documents
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.variants import suggest
from cmexam_tune.report.papers import published_tables
from cmexam_tune.report.papers.published_tables import PublishedLine

ZERO_SHOT = "zeroshot_"
METRICS = (
    "accuracy", "accuracy_macro", "weighted_f1", "bleu1", "bleu4", "rouge1", "rouge2", "rougeL",
)  # fmt: skip
"""What the papers print of a model, as keys of report.json."""
OF_ANSWERS = ("accuracy", "accuracy_macro", "weighted_f1")
"""Those that come from the run that predicts answers; the others come from the one that explains."""


SETTINGS: Mapping[str, tuple[str, ...]] = {
    "answer": (),
    "answer-3shot": ("prompt.shots=3", "prompt.max_source_length=4096"),
    "cot": ("prompt.style=cmb_cot",),
    "cot-3shot": ("prompt.style=cmb_cot", "prompt.shots=3", "prompt.max_source_length=4096"),
}
"""CMB's settings -> how each is asked: answer only or chain of thought, without or with three examples."""
NOTHING_TO_RUN = {
    "Random": "a draw, not a model: `evaluate --baseline random` computes it for any questions",
    "Human volunteers": "people, not a model",
}
"""Printed lines that have no recipe -> what they are."""


@dataclass(frozen=True)
class Entry:
    """One recipe and what it reproduces."""

    recipe: str
    """Name of the recipe without `.yaml`."""
    paper: tuple[str, str] | None = None
    """(exam, name in its table)."""
    explain: tuple[str, ...] | None = None
    """Overrides of a second run that writes explanations; None: one run serves both, or there are none."""
    exam: str = "cmexam"
    source: str | None = None
    """Where weights that are on no hub come from."""
    billions: float = 0.0
    """Parameters of the model, for the time estimate."""
    tokens: int = 0
    """Tokens of a training question for this model's tokenizer, for the time estimate."""
    questions: int = 54_497
    """Training questions of the exam, for the time estimate."""
    epochs: float | None = None
    """Epochs where the recipe states steps, for the time estimate."""

    @property
    def title(self) -> str:
        """The published name where there is one."""
        return self.paper[1] if self.paper else self.recipe

    @property
    def trained(self) -> bool:
        """Whether anything is trained; off-the-shelf rows only predict."""
        return not Path(self.recipe).name.startswith(ZERO_SHOT)

    @property
    def published(self) -> Mapping[str, float]:
        """The published numbers as percentages; empty where there are none."""
        line = self.printed()
        return line.values if line else {}

    def printed(self, setting: str = "answer") -> PublishedLine | None:
        """Return what the paper prints of this entry in a setting of CMB; None where it prints nothing."""
        if self.paper is None:
            return None
        style, _, shots = setting.partition("-")
        return published_tables.line(*self.paper, "cot" if style == "cot" else "answer_only", 3 if shots else 0)

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of CMB that the paper prints for this entry; where it prints none, answers without examples."""
        if self.exam != "cmb" or self.paper is None or (first := self.printed()) is None or first.setting is None:
            return ("answer",)
        return tuple(setting for setting in SETTINGS if self.printed(setting))


@functools.cache
def by_recipe() -> Mapping[str, Entry]:
    """Return every entry by the name of its recipe."""
    entries = {}
    listed = documents.read_yaml(Path(__file__).with_name("entries.yaml"))
    for recipe, values in listed.items():
        others = {key: value for key, value in values.items() if key not in ("row", "explain")}
        paper = tuple(values["row"]) if "row" in values else None
        explain = tuple(values["explain"]) if "explain" in values else None
        entries[recipe] = Entry(recipe, paper, explain, **others)
    return entries


def find(name: str) -> Entry:
    """Return the entry with that recipe or published name, or one without published numbers for any other YAML file.

    Raises:
        UserError: neither a row nor a file; the message suggests the nearest name.
    """
    entries = by_recipe()
    if name.removesuffix(".yaml") in entries:
        return entries[name.removesuffix(".yaml")]
    for entry in entries.values():
        if entry.paper and name in (entry.paper[1], "/".join(entry.paper)):
            return entry
    if name in NOTHING_TO_RUN:
        raise UserError(f"{name}: there is nothing to run, this line is {NOTHING_TO_RUN[name]}.")
    if Path(name).is_file():
        return Entry(name)
    titles = [entry.paper[1] for entry in entries.values() if entry.paper]
    raise UserError(f"{name}: no such row{suggest(name, [*entries, *titles])}\nRows: {', '.join(entries)}")


def order(names: Sequence[str]) -> list[str]:
    """Return recipe names in the order of entries.yaml, unknown ones last."""
    places = list(by_recipe())
    return sorted(names, key=lambda name: (places.index(name) if name in places else len(places), name))


def _split(word: str) -> tuple[str | None, str]:
    """Return the row that an override names, if it names one, and the override without it.

    A colon behind `=` belongs to the value: `model.base_url=http://...` names no row.
    """
    key, equals, value = word.partition("=")
    row, colon, setting = key.rpartition(":")
    return (row, f"{setting}{equals}{value}") if colon else (None, word)


def check_overrides(overrides: Sequence[str], chosen: Sequence[Entry]) -> None:
    """Refuse overrides for rows that do not exist.

    Raises:
        UserError: `ROW:section.key=value` with an unknown row.
    """
    names = [name for entry in (*chosen, *by_recipe().values()) for name in _called(entry)]
    for row in [row for row, _ in map(_split, overrides) if row is not None]:
        if row not in names:
            chosen_names = ", ".join(name for entry in chosen for name in _called(entry))
            raise UserError(f"{row}: is no row{suggest(row, names)}; this command runs {chosen_names}.")


def _called(entry: Entry) -> list[str]:
    return list(dict.fromkeys((entry.recipe, Path(entry.recipe).stem, entry.title)))


def own_overrides(overrides: Sequence[str], entry: Entry) -> list[str]:
    """Return the overrides for all rows and those that start with `ROW:` of this one."""
    return [word for row, word in map(_split, overrides) if row is None or row in _called(entry)]
