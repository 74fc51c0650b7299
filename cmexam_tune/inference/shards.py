"""A questions file answered in shards: each by a job of its own, on any machine, and joined at the end.

A question belongs to the shard that a checksum of its id says, so that no job needs to know of another, and every job
may be started again. Each shard is a predictions file of its own beside the whole one.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmexam_tune.core import cli
from cmexam_tune.core.errors import UserError
from cmexam_tune.inference.answering import DECODING, MODE, SERVED
from cmexam_tune.inference.records import ResumableFile

MOST = 10_000


@dataclass(frozen=True)
class Shard:
    """One of `count` shares of a file; `number` counts from 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "Shard":
        """Return what `--shard` says; None is the whole file.

        Raises:
            UserError: it is no `I/N`.
        """
        if text is None:
            return cls()
        numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        shard = cls(*map(int, numbers.groups())) if numbers else None
        if shard is None or not 1 <= shard.number <= shard.count <= MOST:
            raise UserError(
                f"--shard {text}: give number and count, for example 1/4, 2/4, 3/4 and 4/4; at most {MOST:,}."
            )
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, key: str) -> bool:
        """Return whether a question or case belongs to this shard; it depends on its id alone."""
        checksum = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
        return checksum % self.count == self.number - 1

    def path(self, out: str | Path) -> Path:
        """Return the predictions file of this shard."""
        return Path(out) if self.count == 1 else Path(f"{out}.shard{self.number}of{self.count}")


def join_shards(file: ResumableFile, owners: Mapping[str, str]) -> None:
    """Fill an open file with the records of its shards, and remove these when it is whole.

    Args:
        file: what one process would have written; a joining that was killed goes on.
        owners: all keys of the finished file, in its order -> the question or case that each belongs to.

    Raises:
        UserError: shards are missing, open elsewhere, unfinished, or of another experiment.
    """
    if file.joined and file.done_ids.issuperset(owners):
        return
    shards = _beside(file.path)
    with ExitStack() as stack:
        remedy = "Leave the setting out, or remove that file."
        # All stay locked until they are joined, so that a job that still writes is noticed.
        opened = [
            stack.enter_context(ResumableFile(shard.path(file.path), file.meta, remedy=remedy)) for shard in shards
        ]
        asked = {*file.done_ids}.union(*(part.lines(failed=True) for part in opened))
        if missing := [key for key in owners if key not in asked]:
            lacking = [f"--shard {shard}" for shard in shards if any(shard.holds(owners[key]) for key in missing)]
            raise UserError(
                f"{file.path}: {len(missing)} of {len(owners)} have no answer yet. Start {', '.join(lacking)} again "
                "with the same settings, and then --join."
            )
        file.start()
        for part in opened:
            file.copy(part)
        _add_results(file, [part.result for part in opened])
        answered, seconds = (sum(part.result.get(name, 0) for part in opened) for name in ("answered", "seconds"))
        file.finish(list(owners), answered, seconds)
    for part in opened:
        part.discard()


def _add_results(file: ResumableFile, results: Sequence[Mapping[str, Any]]) -> None:
    """Copy decoding and use of a server from the shards' results into the note of the whole file."""
    kinds = [result["decoding"] for result in results if "decoding" in result]
    if any(kind != kinds[0] for kind in kinds):
        cli.note(f"warning: the shards of {file.path} were not answered alike; see {DECODING} in the notes:")
        for kind in {json.dumps(kind, sort_keys=True) for kind in kinds}:
            cli.note(f"  {kind}")
    for result in results:
        file.result |= {key: value for key, value in result.items() if key in (DECODING, MODE)}
    if served := [start for result in results for start in result.get(SERVED, ())]:
        file.result[SERVED] = served


def _beside(out: Path) -> list[Shard]:
    """Return the shards whose files lie beside `out`, all that there are to be.

    Raises:
        UserError: there are none, some are missing, or they are of different counts.
    """
    name = re.compile(re.escape(out.name) + r"\.shard(\d+)of(\d+)")
    matches = [match for path in out.parent.glob("*") if (match := name.fullmatch(path.name))]
    counts = sorted({int(match[2]) for match in matches})
    if not counts:
        raise UserError(
            f"{out}: there is no {out.name}.shard1of... beside it. predict --shard 1/4 (and so on) writes it."
        )
    if len(counts) > 1:
        shown = " and ".join(map(str, counts))
        raise UserError(f"{out}: shards of {shown} lie beside it. Remove those that do not belong to it.")
    shards = [Shard(number, counts[0]) for number in range(1, counts[0] + 1)]
    if missing := [shard for shard in shards if not shard.path(out).exists()]:
        raise UserError(f"{missing[0].path(out)}: is missing. Start predict --shard {missing[0]}, and then --join.")
    return shards
