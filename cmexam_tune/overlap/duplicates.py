"""Questions that occur more than once, in one file or in several, found without holding them in memory."""

import hashlib
import sqlite3
import unicodedata
from itertools import groupby
from pathlib import Path
from typing import Any

from cmexam_tune.core.schema import Question


class Duplicates:
    """A table of fingerprints in a temporary database file."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.executescript("PRAGMA journal_mode = OFF; CREATE TABLE seen (mark, file, id, answer); BEGIN")

    def close(self) -> None:
        """Close the database file."""
        self._base.close()

    def add(self, file: str, question: Question) -> None:
        """Remember one question of `file`."""
        row = (fingerprint(question), file, question.id, question.answer)
        self._base.execute("INSERT INTO seen VALUES (?, ?, ?, ?)", row)

    def groups(self) -> list[dict[str, Any]]:
        """Return every group of two or more as the report lists it, in the order of their first ids."""
        rows = self._base.execute(
            "SELECT mark, file, id, answer FROM seen WHERE mark IN "
            "(SELECT mark FROM seen GROUP BY mark HAVING COUNT(*) > 1) ORDER BY mark, rowid"
        )
        found = []
        for _, members in groupby(rows, key=lambda row: row[0]):
            _, files, ids, answers = zip(*members, strict=True)
            conflict = len({answer for answer in answers if answer is not None}) > 1
            found.append({"ids": list(ids), "files": sorted(set(files)), "conflicting_answers": conflict})
        return sorted(found, key=lambda group: group["ids"])


def fingerprint(question: Question) -> bytes:
    """Return 16 bytes that are equal for equal stem and options, up to white space, width and case."""
    text = "\n".join([question.stem, *question.options.values()])
    plain = "\n".join("".join(part.split()) for part in unicodedata.normalize("NFKC", text).lower().split("\n"))
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()
