"""Runs commands in forked processes that can be killed at any moment; imports are paid for once.

Reads a job a line, `{"command": [WORD, ...], "log": PATH, "processes": 1, "kills": 5, "seed": 0, "window": [1, 9]}`,
and answers each with a line: how often it was killed, its last exit codes and the seconds of the last start.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import train_helpers

from cmexam_tune import predict, train
from cmexam_tune.families import chatglm, llama
from cmexam_tune.training import loop

torch.set_num_threads(1)
LIMIT_S = 1200
"""A job that takes longer hangs: the driver is ended by its alarm, and whoever waits for its answer finds none."""


def start(job: dict[str, Any]) -> list[int]:
    """Fork one process for each rank."""
    port = str(train_helpers.free_port())
    children = []
    for rank in range(job["processes"]):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        if job["processes"] > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["processes"]), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )  # fmt: skip
        status = 1
        try:
            with Path(job["log"] + f".{rank}").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            program, *words = job["command"]
            status = {"train": train, "predict": predict}[program].main(words) or 0
        except KeyboardInterrupt:
            status = 130
        finally:
            os._exit(status)
    return children


def wait(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def kill_after(children: list[int], seconds: float) -> bool:
    """Kill the processes after a while; return False if they had all ended by then."""
    time.sleep(seconds)
    done = [os.waitpid(pid, os.WNOHANG)[0] for pid in children]
    if all(done):
        return False
    for pid, ended in zip(children, done, strict=True):
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return True


def run(job: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(job.get("seed", 0))
    kills = 0
    while kills < job["kills"]:
        children = start(job)
        if not kill_after(children, rng.uniform(*job["window"])):
            break
        kills += 1
    started = time.monotonic()
    codes = wait(start(job))
    return {"kills": kills, "codes": codes, "seconds": time.monotonic() - started}


def main() -> None:
    for line in sys.stdin:
        signal.alarm(LIMIT_S)
        print(json.dumps(run(json.loads(line))), flush=True)
        signal.alarm(0)


if __name__ == "__main__":
    assert loop and llama and chatglm, "imported before the fork"
    main()
