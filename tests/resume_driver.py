"""Trains in forked processes that can be killed at any moment; imports are paid for once.

Called as `python resume_driver.py '{"config": PATH, "out": PATH, "processes": 1, "kills": 5, "seed": 0}'`; prints a
JSON object with how often training was killed, the steps at which it went on, and the seconds of the last start.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cmexam_tune import config, train
from cmexam_tune.training import checkpoints, loop

torch.set_num_threads(1)


def start(job: dict[str, Any]) -> list[int]:
    """Fork one process for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(job["processes"]):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        if job["processes"] > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["processes"]), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )  # fmt: skip
        status = 1
        try:
            with Path(job["out"] + f".{rank}.log").open("a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            train.train(config.load(job["config"], [f"out={job['out']}"]))
            status = 0
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


def main(job: dict[str, Any]) -> None:
    rng = random.Random(job.get("seed", 0))
    resumed: list[int] = []
    kills = 0
    while kills < job["kills"]:
        children = start(job)
        if not kill_after(children, rng.uniform(*job["window"])):
            break
        kills += 1
        newest = checkpoints.found(Path(job["out"]))
        resumed.append(checkpoints.step_of(newest[0]) if newest else 0)
    started = time.monotonic()
    codes = wait(start(job))
    seconds = time.monotonic() - started
    print(json.dumps({"kills": kills, "resumed": resumed, "codes": codes, "seconds": seconds}))


if __name__ == "__main__":
    assert loop is not None
    main(json.loads(sys.argv[1]))
