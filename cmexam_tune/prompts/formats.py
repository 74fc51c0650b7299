"""Rendered prompts under the keys of other training tools."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from cmexam_tune.core.schema import Example

Format = Literal["prompt", "alpaca", "sharegpt", "messages"]
FORMATS: dict[str, Callable[[Example], object]] = {
    "prompt": dataclasses.asdict,
    "alpaca": lambda e: {"id": e.question_id, "instruction": e.prompt, "input": "", "output": e.completion},
    "sharegpt": lambda e: {
        "id": e.question_id,
        "conversations": [{"from": "human", "value": e.prompt}, {"from": "gpt", "value": e.completion}],
    },
    "messages": lambda e: {
        "id": e.question_id,
        "messages": [{"role": "user", "content": e.prompt}, {"role": "assistant", "content": e.completion}],
    },
}
