"""Questions that occur more than once, in one file or in several, found without holding them in memory."""

import hashlib
import sqlite3
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from cmexam_tune.schema import Question


@dataclass(frozen=True)
class Group:
    """Questions with the same stem and options: files, ids and answers in the order of reading."""

    files: tuple[str, ...]
    ids: tuple[str, ...]
    answers: tuple[str | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what the preprocess report says of the group."""
        distinct = {answer for answer in self.answers if answer is not None}
        return {"ids": list(self.ids), "files": sorted(set(self.files)), "conflicting_answers": len(distinct) > 1}


class Duplicates:
    """A table of fingerprints in a temporary database file; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.execute("PRAGMA journal_mode = OFF")
        self._base.execute("CREATE TABLE seen (mark BLOB, file TEXT, id TEXT, answer TEXT)")
        self._base.execute("BEGIN")

    def __enter__(self) -> "Duplicates":
        """Return the table itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database."""
        self._base.close()

    def add(self, file: str, question: Question) -> None:
        """Remember one question of `file`."""
        self._base.execute(
            "INSERT INTO seen VALUES (?, ?, ?, ?)", (fingerprint(question), file, question.id, question.answer)
        )

    def groups(self) -> list[Group]:
        """Return every group of two or more, in the order of their first question."""
        rows: Iterator[tuple[bytes, str, str, str | None]] = self._base.execute(
            "SELECT mark, file, id, answer FROM seen WHERE mark IN "
            "(SELECT mark FROM seen GROUP BY mark HAVING COUNT(*) > 1) ORDER BY mark, rowid"
        )
        found = []
        for _, members in groupby(rows, key=lambda row: row[0]):
            _, files, ids, answers = zip(*members, strict=True)
            found.append(Group(files, ids, answers))
        return sorted(found, key=lambda group: group.ids)


def fingerprint(question: Question) -> bytes:
    """Return 16 bytes that are equal for equal stem and options, up to white space, width and case."""
    text = "\n".join([question.stem, *question.options.values()])
    plain = "\n".join("".join(part.split()) for part in unicodedata.normalize("NFKC", text).lower().split("\n"))
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()
