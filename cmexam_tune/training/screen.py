"""What a training shows: its own lines. `--verbose` (CMEXAM_TUNE_VERBOSE=1) shows those of the libraries too."""

import logging
import os
import warnings
from typing import Any

from transformers.utils import logging as transformers_logging

LOUD = ("DeepSpeed", "deepspeed", "torch.distributed", "accelerate")


def quiet() -> None:
    """Silence renames, tips and progress bars of libraries, which a user of a recipe could not mend; errors stay."""
    if os.environ.get("CMEXAM_TUNE_VERBOSE") == "1":
        return
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch|accelerate)\.")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|accelerate|deepspeed)\.")
    os.environ.setdefault("DS_LOG_LEVEL", "ERROR")
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    hide_bars: Any = transformers_logging.disable_progress_bar
    hide_bars()
