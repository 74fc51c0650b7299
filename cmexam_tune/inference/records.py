"""A file of records that grows line by line, survives being killed, and continues only the experiment it began with."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cmexam_tune.core import documents, files, jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.evaluation.answer_parsing import still_thinking
from cmexam_tune.inference import provenance
from cmexam_tune.inference.sharing import Processes

FAILED = "error"
"""`finish` of a record that says only why there is no answer: its key is still missing."""


@dataclass(frozen=True)
class Record:
    """The fields that every line has in common."""

    question_id: str
    text: str
    finish: str | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Result:
    """Numbers of `ResumableFile.result` that a later run adds to or tells."""

    records: int = 0
    answered: int = 0
    seconds: float = 0.0
    cut: int = 0
    cut_thinking: int = 0
    failed: int = 0
    served: tuple[object, ...] = ()


@dataclass(frozen=True)
class PredictionsNote:
    """The part of the note beside a file that a later run reads."""

    versions: Mapping[str, object]
    config: Mapping[str, object] = field(default_factory=dict)
    result: Result = field(default_factory=Result)


def meta_path(out: str | Path) -> Path:
    """Return the file beside `out` that says what its records came from."""
    return Path(f"{out}.meta.json")


class ResumableFile:
    """Records at `path`, one JSON object a line with its key in `question_id`; use it as a context manager.

    Entering looks at what is there and changes nothing, so that a wrong path or setting costs no old file; `start`
    makes the file ready for `append`. One prediction at a time may have it open. Several processes of one prediction
    append to parts of their own, which the first one joins; all of them enter, begin and finish together.
    """

    def __init__(
        self,
        path: str | Path,
        meta: Mapping[str, object],
        overwrite: bool = False,
        processes: Processes | None = None,
        *,
        remedy: str = "Add --overwrite to replace it, or choose another --out.",
    ) -> None:
        """Take where the records go, what they come from, whether old ones are replaced, and who else writes.

        `remedy` ends the message about records of another experiment; not every program has --overwrite for them.
        """
        self.path, self.meta, self.remedy = Path(path), meta, remedy
        self.processes = processes or Processes()
        self.done_ids: frozenset[str] = frozenset()
        """Keys that need no answer any more."""
        self.result: dict[str, Any] = {}
        """Counts of the run (`Result`) and what the engine adds to them; on entering, those of the runs before."""
        self.joined = False
        """Whether nothing is left to be put in order, if nothing is missing."""
        self.overwrite, self._fresh = overwrite, True
        self._handle: IO[bytes] | None = None
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> "ResumableFile":
        """Look at what is there.

        Raises:
            UserError: another process has the file open, or it holds records of something else, or is no such file.
        """
        self.done_ids, self.result, self.joined = self.processes.from_first(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file and release its lock."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        self._lock.close()

    def _open(self) -> tuple[frozenset[str], dict[str, Any], bool]:
        for path in (self.path, meta_path(self.path)):
            files.check_output(path, overwrite=True)
        # Python calls no `__exit__` after an `__enter__` that raises: the lock is kept only once all went well.
        with contextlib.ExitStack() as stack:
            stack.enter_context(files.lock(self.path))
            lines, result = self._read_existing()
            self._lock = stack.pop_all()
        return frozenset(lines), result, not self._fresh and not self._parts()

    def _read_existing(self) -> tuple[Mapping[str, bytes], dict[str, Any]]:
        """Return the records that count, and `result` of the runs before."""
        note = _read_note(meta_path(self.path))
        # Killed in its first run, a prediction by several processes leaves an empty file; its records are in parts.
        if not self.path.exists() or not (self.path.stat().st_size or self._parts()):
            return {}, {}
        if note is None:
            # It may be anybody's file, also for --overwrite.
            raise UserError(
                f"{self.path}: exists and was not written by predict (no {meta_path(self.path).name}). Choose another "
                "--out, or move the file away."
            )
        if self.overwrite:
            return {}, {}
        lines = self.lines()
        # The old note went through JSON, where tuples become lists, so the new one does too.
        if changed := provenance.differences(note, json.loads(json.dumps(self.meta))):
            raise UserError(
                f"{self.path}: holds predictions of another experiment; other {', '.join(changed)}. {self.remedy}"
            )
        self._fresh = False
        return lines, dict(note.get("result") or {})

    def _part(self, rank: int) -> Path:
        return Path(f"{self.path}.part{rank}")

    def _parts(self) -> list[Path]:
        pattern = re.compile(re.escape(self._part(0).name[:-1]) + r"\d+")
        return sorted(path for path in self.path.parent.iterdir() if pattern.fullmatch(path.name))

    def lines(self, failed: bool = False) -> dict[str, bytes]:
        """Return key -> line of every record, answers that failed only if asked for; a half-written line is none."""
        lines: dict[str, bytes] = {}
        for path in (self.path, *self._parts()):
            with path.open("rb") as handle:
                for number, line in enumerate(handle, 1):
                    if not line.endswith(b"\n"):
                        break  # what a killed process left half-written is answered again
                    record = parse_record(line, f"{path}:{number}")
                    if failed or record.finish != FAILED:
                        # A run killed while it joined the parts leaves records twice; the file comes before its parts.
                        lines.setdefault(record.question_id, line)
        return lines

    @property
    def started(self) -> bool:
        """Whether records can be appended."""
        return self._handle is not None

    def texts(self) -> dict[str, str]:
        """Return key -> text of the records that need no answer any more."""
        lines = {} if self._fresh else self.lines()
        return {key: parse_record(line, str(self.path)).text for key, line in lines.items()}

    def start(self) -> None:
        """Make the file ready: empty, or with the records that count and nothing else."""
        # Nothing is replaced before every process has loaded its model and made its first record.
        self.processes.wait()
        if self.processes.first:
            if self._fresh:
                self._remove_parts()
            # The records go first: killed between the two, nothing vouches for what another experiment answered.
            self._write({} if self._fresh else self.lines())
            self._write_note()
        # Parts of an earlier run have to be gone before new ones are opened under the same names.
        self.processes.wait()
        self._fresh = False
        path = self.path if self.processes.count == 1 else self._part(self.processes.rank)
        self._handle = path.open("ab")

    def append(self, record: object) -> None:
        """Write one record at once: a killed process leaves at most one that is incomplete."""
        assert self._handle is not None
        self._handle.write((jsonl.dumps(record) + "\n").encode())
        self._handle.flush()

    def copy(self, other: "ResumableFile") -> None:
        """Write the records of another open file that this one lacks, failed ones included."""
        assert self._handle is not None
        self._handle.writelines(line for key, line in other.lines(failed=True).items() if key not in self.done_ids)

    def finish(self, order: Sequence[str], answered: int = 0, seconds: float = 0.0) -> None:
        """Sort the records by `order`, so that an interrupted prediction ends with the same file as one that was not.

        Keys missing from `order`, left by an earlier run with a higher limit, follow in their old order. `answered`
        records and `seconds` are added to those of earlier runs in `result`, which is saved in the note.
        """
        assert self._handle is not None
        self._handle.close()
        self._handle = None
        # No part may still be written to while the first process joins them.
        self.processes.wait()
        if self.processes.first:
            lines = self.lines(failed=True)
            lines = {key: lines.pop(key) for key in order if key in lines} | lines
            self._write(lines)
            self.result |= count_ends([parse_record(line, str(self.path)) for line in lines.values()])
            # What failed before was asked again: all failures in the file are of this run.
            for name, value in (("answered", answered - self.result["failed"]), ("seconds", seconds)):
                self.result[name] = self.result.get(name, 0) + value
            self._write_note()
        # Votes are counted from the joined file by every process, so it has to be there.
        self.processes.wait()

    def discard(self) -> None:
        """Remove the finished file and its note."""
        if self.processes.first:
            for path in (self.path, meta_path(self.path)):
                path.unlink(missing_ok=True)

    def _write(self, lines: Mapping[str, bytes]) -> None:
        """Write all records into one file; parts are removed only when it is there."""
        with files.atomic_write(self.path, binary=True) as handle:
            handle.writelines(lines.values())
        self._remove_parts()

    def _remove_parts(self) -> None:
        for part in self._parts():
            part.unlink()

    def save_result(self) -> None:
        """Save the current `result` in the note; only between `start` and `finish`."""
        if self.processes.first:
            self._write_note()

    def _write_note(self) -> None:
        with files.atomic_write(meta_path(self.path)) as handle:
            json.dump({**self.meta, "result": self.result}, handle, ensure_ascii=False, indent=1, default=str)
            handle.write("\n")


def count_ends(records: Sequence[Record]) -> dict[str, int]:
    """Return how many records there are, hold an answer, were cut off (and while thinking), and failed."""
    ends = [record.finish for record in records]
    cut = [record for record in records if record.finish == "length"]
    thinking = sum(still_thinking(record.text) for record in cut)
    return {
        "records": len(ends),
        "readable": sum(record.answer is not None for record in records),
        "cut": len(cut),
        "cut_thinking": thinking,
        "failed": ends.count(FAILED),
    }


def parse_record(line: bytes, where: str) -> Record:
    """Return a line as a record.

    Raises:
        UserError: it is none.
    """
    try:
        value = documents.parse_json(line.decode(), where)
        return jsonl.from_object(Record, value if isinstance(value, dict) else {}, where)
    except (UserError, UnicodeDecodeError):
        raise UserError(f"{where}: is no prediction. Choose another --out, or add --overwrite.") from None


def _read_note(path: Path) -> dict[str, Any] | None:
    """Return the note that `start` wrote, or None if there is none.

    Raises:
        UserError: the file was written by something else.
    """
    if not path.exists():
        return None
    try:
        note: dict[str, object] = documents.read_json(path, "note of predict")
        jsonl.from_object(PredictionsNote, note, str(path))
    except UserError as error:
        raise UserError(f"{error} It was not written by predict. Choose another --out, or move it away.") from None
    return note
