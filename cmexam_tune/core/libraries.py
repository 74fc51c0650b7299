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
    """Silence renames and tips of libraries, which a user of a recipe could not mend; errors stay.

    To be called before they are imported, since some speak at their import. For their progress bars see
    `checkpoint.hide_bars`.
    """
    if verbose():
        return
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch|accelerate)\.")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|accelerate|deepspeed)\.")
    os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
