"""What a user writes into the section `prompt`: own words, from a file too, and the order of options."""

import re
import string
from pathlib import Path

from cmexam_tune.core import documents
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.variants import suggest

ASK = ("question", "options", "option_str", "exam", "question_type")
"""Fields of the text that asks."""
WRITE = ("letters", "text", "explanation")
"""Fields of the text that is to be written."""
TWICE = "A brace that is only a brace is written twice: {{ or }}"


def read_file(path: Path) -> dict[str, str]:
    """Return the texts of a prompt file: `ask`, `write` or both.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    texts = documents.read_yaml(path, "prompt file")
    if not isinstance(texts, dict) or not texts or {*texts} - {"ask", "write"}:
        found = ", ".join(map(str, texts)) if isinstance(texts, dict) else type(texts).__name__
        raise ConfigError(f"{path}: a prompt file holds the texts `ask` and `write`, found {found or 'nothing'}.")
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise ConfigError(f"{path}: {wrong[0]}: a text is needed, found {type(texts[wrong[0]]).__name__}.")
    return texts


def check_text(text: str, key: str, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    """Refuse a text with a field that does not exist, or with none of the fields it needs.

    Raises:
        ValueError: the message starts with `key`.
    """
    try:
        fields = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{key}: {error}. {TWICE}") from None
    for name, form, conversion in fields:
        if name not in known or form or conversion:
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
            raise ValueError(
                f"{key}: {{{shown}}} is unknown{suggest(str(name), known)}; known: {braced(known)}. {TWICE}"
            )
    if not {name for name, _, _ in fields} & {*needed}:
        raise ValueError(f"{key}: has no {braced(needed)}, so it would say the same for every question")


def braced(names: tuple[str, ...]) -> str:
    """Return the names as fields, for a message."""
    return " or ".join(f"{{{name}}}" for name in names)


def check_order(order: str) -> None:
    """Refuse what is no order of options.

    Raises:
        ValueError: neither `rotate:K` nor `shuffle:SEED`.
    """
    if not re.fullmatch(r"(rotate|shuffle):\d{1,9}", order):
        raise ValueError(
            f"option_order: {order!r} is no order of options. Use rotate:1 (each option one letter further back) or "
            "shuffle:7 (another order for every question, by that seed)"
        )
