"""Runs a command for as long as the program that started it lives: `python watch.py COMMAND ...`.

The pipe at the standard input ends with that program, however it ends (kill -9 included); then the command and all
that it has started are ended. Nothing of this package is imported: it has to start at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

PATIENCE = 10.0
"""Seconds between asking the command to end and ending it."""


def main() -> int:
    """Run the command; return its exit status."""
    # A group of its own, whose number is the id of the process that leads it.
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def end(signal_number: int = 0, frame: FrameType | None = None) -> None:
        _signal(process.pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    threading.Thread(target=_until_the_pipe_ends, args=(process,), daemon=True).start()
    status = process.wait()
    # A server that was killed leaves its workers behind.
    _signal(process.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _until_the_pipe_ends(process: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    _signal(process.pid, signal.SIGTERM)
    time.sleep(PATIENCE)
    _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
