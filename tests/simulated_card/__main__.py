"""`python -m simulated_card LIBRARY V100 COMMANDS.json REPORT.json`: run commands such as `["train", ...]` on a card.

LIBRARY is what `building.library` has compiled.
"""

import ctypes
import sys

# Torch asks once, while it is imported, what hardware there is.
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import functools
import gc
import importlib
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from simulated_card import card


def main() -> None:
    """Run each command as its program would, and write its exit status, syncs and kernels."""
    name, commands, report = sys.argv[2:]
    # Some of what they look at while they are imported is torch's own; they ask for a card later.
    for library in ("torch._dynamo", "transformers.trainer", "peft", "accelerate"):
        importlib.import_module(library)
    gc.freeze()  # a collection, which the trainer asks for, leaves the libraries out
    card.activate(card.MODELS[name])
    if scale := os.environ.get("FIRST_LOSS_SCALE"):
        scaler: Any = importlib.import_module("torch").amp.GradScaler
        scaler.__init__ = functools.partialmethod(scaler.__init__, init_scale=2.0 ** int(scale))
    from cmexam_tune.core import cli

    done = []
    for program, *words in json.loads(Path(commands).read_text(encoding="utf-8")):
        card.record.clear()
        sys.argv = [f"cmexam_tune.{program}", *words]
        started, status = time.monotonic(), 0
        try:
            cli.run(importlib.import_module(f"cmexam_tune.{program}").main)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
        except Exception:  # noqa: BLE001 - the next command runs all the same
            traceback.print_exc()
            status = 1
        done.append(
            {
                "command": [program, *words],
                "status": status,
                "seconds": round(time.monotonic() - started, 2),
                "syncs": dict(card.record.syncs.most_common()),
                "kernels": dict(card.record.kernels),
            }
        )
        Path(report).write_text(json.dumps(done, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
