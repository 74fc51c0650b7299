"""What a remote model was sent and sent back, kept beside the predictions."""

import time
from collections.abc import Iterator
from typing import Any, TypeVar

from cmexam_tune.core import cli
from cmexam_tune.inference.records import ResumableFile

T = TypeVar("T")
SERVED = "served"
"""Key of `ResumableFile.result`: a list with what each start of the program used."""
MODE = "mode"
"""Key of `ResumableFile.result`: how answers were read, where it is not what `generation.mode` means."""
EVERY = 30.0
"""Seconds after which the counts are saved again, so that a kill costs few of them."""


def counted(file: ResumableFile, writer: Any, answers: Iterator[T]) -> Iterator[T]:
    """Yield the answers; if `writer` counts its usage, keep the counts in the file's note and tell them at the end."""
    counts = getattr(writer, "usage", None)
    if counts is None:
        yield from answers
        return
    before, start = list(file.result.get(SERVED, [])), time.monotonic()
    saved = start
    try:
        for answer in answers:
            yield answer
            if counts.mode:
                file.result[MODE] = counts.mode
            file.result[SERVED] = [*before, {**counts.plain(), "seconds": round(time.monotonic() - start, 1)}]
            if time.monotonic() - saved > EVERY:
                saved = time.monotonic()
                file.save_result()
    finally:
        if counts.requests and file.begun:
            file.save_result()
            cli.note(described(counts.plain()))


def described(counts: dict[str, Any]) -> str:
    """Return usage in one line."""
    read, written = counts["prompt_tokens"], counts["completion_tokens"]
    text = f"{counts['requests']:,} requests, {read:,} tokens read, {written:,} written"
    if counts["models"]:
        text += f", answered by {', '.join(counts['models'])}"
    if counts["errors"]:
        text += f"; failed most often with: {next(iter(counts['errors']))}"
    return text
