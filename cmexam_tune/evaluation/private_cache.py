"""A cache folder of the user's own, for libraries whose caches are run when they are read (jieba)."""

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path


def private_folder() -> Path:
    """Return a folder that nobody else can write to, for caches that are run when they are read.

    `$XDG_CACHE_HOME/cmexam_tune` or `~/.cache/cmexam_tune`; a temporary one where that cannot be made or is open.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cmexam_tune"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    made = Path(tempfile.mkdtemp(prefix="cmexam_tune."))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
