"""The questions of one or several files, read anew at every pass: no process holds all of CMB-train in memory."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question


@dataclass(frozen=True)
class QuestionFiles:
    """The first `limit` questions of the files that `data.<key>` names."""

    paths: tuple[str, ...]
    limit: int | None = None
    key: str = "train"

    @classmethod
    def of(cls, paths: Sequence[str | Path], limit: int | None, key: str) -> "QuestionFiles":
        """Check what can be checked without reading.

        Raises:
            UserError: a file that is missing or empty, no training file at all, or a limit below 1.
        """
        if not paths and key == "train":
            raise ConfigError("data.train: name at least one questions file, as `cmexam-tune preprocess` writes them.")
        if limit is not None and limit < 1:
            raise ConfigError(
                f"data.max_{'train' if key == 'train' else 'eval'}_samples={limit}: at least 1 is needed."
            )
        for path in paths:
            jsonl.check(path, f"data.{key} file")
        return cls(tuple(map(str, paths)), limit, key)

    def __iter__(self) -> Iterator[Question]:
        """Read the files; every line of them is checked, also beyond the limit.

        Raises:
            DataError: a line that is no question; names file and line.
            ConfigError: two questions with one id.
        """
        seen: set[str] = set()
        for path in self.paths:
            for question in jsonl.read(path, Question):
                if question.id in seen:
                    raise ConfigError(
                        f"data.{self.key}: question {question.id!r} of {path} stands in an earlier file too."
                    )
                seen.add(question.id)
                if self.limit is None or len(seen) <= self.limit:
                    yield question

    def __bool__(self) -> bool:
        return bool(self.paths)

    def checksum(self) -> str:
        """Return a checksum of the files' content, their order and the limit."""
        parts = [*(files.sha256(path) for path in self.paths), str(self.limit)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()
