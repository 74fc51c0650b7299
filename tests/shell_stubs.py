"""Shell blocks run by bash as they stand, with the project's programs called inside the test's process.

Each program is a stub on the PATH that hands its words through a socket to the test and gets the exit status back. So
variables, loops, pipes and paths are bash's own, and only the start of a process (seconds) is saved.
"""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

STUB = r"""#!/usr/bin/env bash
printf '%s\0' "$PWD" "${NEEDS-}" "${OPENAI_API_KEY-}" "$#" "$(basename "$0")" "$@" >&"$BRIDGE"
read -r status <&"$BRIDGE"
exit "$status"
"""
PROGRAMS = (
    "cmexam-tune", "python", "python3", "torchrun", "deepspeed", "make", "pip", "hf", "vllm", "ollama", "lm_eval",
    "docker", "sbatch", "ray", "kubectl", "apt",
)  # fmt: skip


class Call(NamedTuple):
    """A command that bash came to."""

    folder: Path
    needs: set[str]
    key: str
    words: list[str]
    """Program first."""


def install(folder: Path) -> None:
    """Write the stubs into `folder`/.venv/bin."""
    place = folder / ".venv" / "bin"
    place.mkdir(parents=True)
    (place / "activate").touch()
    for name in PROGRAMS:
        (place / name).write_text(STUB)
        (place / name).chmod(0o755)


def _fields(stream: IO[bytes], count: int) -> list[str]:
    """Read so many fields, each ended by a zero byte."""
    found = []
    for _ in range(count):
        field = bytearray()
        while (byte := stream.read(1)) not in (b"\0", b""):
            field += byte
        found.append(field.decode())
    return found


def run(script: str, folder: Path, answer: Callable[[Call], int]) -> subprocess.CompletedProcess[str]:
    """Run a script in `folder`, each command of PROGRAMS answered by `answer`."""
    ours, theirs = socket.socketpair()
    environment = {
        **os.environ, "BRIDGE": str(theirs.fileno()), "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"
    }  # fmt: skip
    command = ["bash", "-euo", "pipefail", "-c", script]
    with ours, theirs, (folder / "screen.txt").open("w+") as screen, subprocess.Popen(
        command, cwd=folder, env=environment, pass_fds=[theirs.fileno()], text=True,
        stdin=subprocess.DEVNULL, stdout=screen, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        theirs.close()
        stream = ours.makefile("rb")
        try:
            while (head := _fields(stream, 4))[3]:
                needs = set(filter(None, head[1].split(",")))
                call = Call(Path(head[0]), needs, head[2], _fields(stream, int(head[3]) + 1))
                ours.sendall(f"{answer(call)}\n".encode())
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        screen.seek(0)
        return subprocess.CompletedProcess(command, status, screen.read())
