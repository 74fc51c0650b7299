"""Questions as token rows whose options and answers are never cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

IGNORE_INDEX = -100
"""Label of a token that carries no loss (torch's and transformers' value)."""


@dataclass(frozen=True)
class Truncation:
    """What the length limits did to a set of questions."""

    rows: int = 0
    stems_cut: int = 0
    """Prompts that lost the middle of their stem."""
    explanations_cut: int = 0
    """Completions that lost the end of their explanation, and with it their EOS."""
    too_long: tuple[str, ...] = ()
    """Ids of questions whose options or answer alone exceed the limits: skipped."""
    unrenderable: tuple[str, ...] = ()
    """Ids of questions that the style cannot render (no explanation, no answer): skipped."""
    longest_source: int = 0
    longest_target: int = 0


@dataclass(frozen=True)
class Encoded:
    """Training rows: mappings with `question_id`, `input_ids`, `labels` and what else the family's collate reads."""

    rows: list[Mapping[str, Any]]
    truncation: Truncation = field(default_factory=Truncation)
