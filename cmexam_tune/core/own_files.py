"""Files that a program may replace because it wrote them: their checksums are noted beside them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import UserError


@dataclass(frozen=True)
class Checksums:
    """What lies beside the files."""

    program: str
    sha256: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """File name -> checksums of what the program wrote there: one, or two while it is being replaced."""


class OwnFiles:
    """Files of one folder that a program writes again and again, and of which it replaces only its own.

    A file that somebody else put there, or has changed since, is not its own.
    """

    def __init__(self, note: str | Path, program: str, overwrite: bool = False) -> None:
        """Read the note.

        Args:
            note: path of the note, in the folder of the files.
            program: who writes them.
            overwrite: whether files that are not its own are replaced.

        Raises:
            UserError: another program's file is at `note`.
        """
        self.path, self.program, self.overwrite = files.check_output(note, overwrite=True), program, overwrite
        self.checksums: Mapping[str, tuple[str, ...]] = {}
        if self.path.exists():
            try:
                old_note = jsonl.read_one(self.path, Checksums, "note")
            except UserError:  # broken: then nothing beside it is known to be ours
                old_note = Checksums("")
            if old_note.program == program:
                self.checksums = old_note.sha256
            elif not overwrite:
                raise self._refused(self.path)

    def check(self, *paths: Path) -> None:
        """Refuse what may not be replaced.

        Raises:
            UserError: a file is at one of the paths that the program has not written as it is.
        """
        for path in paths:
            files.check_output(path, overwrite=True)
            if path.exists() and not self.overwrite and files.sha256(path) not in self.checksums.get(path.name, ()):
                raise self._refused(path)

    def write(self, contents: Mapping[Path, bytes]) -> None:
        """Replace files, each in one step.

        Raises:
            UserError: as `check`, which is asked once more.
        """
        self.check(*contents)
        sums = {path.name: hashlib.sha256(content).hexdigest() for path, content in contents.items()}
        # Noted before and after: whenever the program is killed, old and new files are both known.
        self._note({name: (*self.checksums.get(name, ()), checksum) for name, checksum in sums.items()})
        for path, content in contents.items():
            with files.atomic_write(path, binary=True) as handle:
                handle.write(content)
        self._note({name: (checksum,) for name, checksum in sums.items()})

    def _note(self, sums: Mapping[str, tuple[str, ...]]) -> None:
        self.checksums = {**self.checksums, **sums}
        with files.atomic_write(self.path) as handle:
            json.dump({"program": self.program, "sha256": self.checksums}, handle, ensure_ascii=False, indent=1)
            handle.write("\n")

    def _refused(self, path: Path) -> UserError:
        return UserError(
            f"{path}: exists and was not written by {self.program}, or was changed since. Move it away, choose another "
            "--out, or add --overwrite to replace it."
        )
