"""Silences the log lines of libraries, so that a program shows only its own.

CMEXAM_TUNE_VERBOSE=1 (`train --verbose`) shows those of the libraries too.
"""

import logging
import os
import warnings

LOUD = ("DeepSpeed", "deepspeed", "torch.distributed", "accelerate", "bitsandbytes")


def verbose() -> bool:
    """Return whether the user asked for the libraries' own lines."""
    return os.environ.get("CMEXAM_TUNE_VERBOSE") == "1"


def quiet() -> None:
    """Silence deprecations and tips of libraries, which a user of a recipe can do nothing about; errors are shown.

    To be called before the libraries are imported, since some warn while they are. For their progress bars see
    `checkpoint.hide_bars`.
    """
    if verbose():
        return
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch|accelerate)\.")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|accelerate|deepspeed)\.")
    os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
