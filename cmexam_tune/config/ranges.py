"""Which numbers a setting can be: a value outside ends before anything is loaded or written."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cmexam_tune.core.strict import Problems


class Range(NamedTuple):
    """Numbers from `low` to `high`."""

    low: float
    high: float
    above: bool = False
    """Whether `low` itself is not possible."""
    below: bool = False
    """Whether `high` itself is not possible."""
    also: float | None = None
    """One more number, which means something else."""

    def holds(self, value: float) -> bool:
        """Whether a setting can be `value`."""
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        return (low and high) or value == self.also

    def __str__(self) -> str:
        """Return the range in words."""
        low = f"above {self.low:,}" if self.above else f"at least {self.low:,}"
        also = "" if self.also is None else f", or {self.also:,}"
        return f"{low} and {'below' if self.below else 'at most'} {self.high:,}{also}"


_COUNT, _SHARE, _LENGTH = Range(1, 10**9), Range(0, 1, below=True), Range(1, 10**6)
_SEED, _ANY = Range(0, 2**32 - 1), Range(-(10**9), 10**9)  # the last for what has none of its own
RANGES: Mapping[str, Mapping[str, Range]] = {
    "data": {"max_train_samples": _COUNT, "max_eval_samples": _COUNT, "num_workers": Range(1, 1024)},
    "prompt": {"max_source_length": _LENGTH, "max_target_length": _LENGTH, "shots": Range(0, 100)},
    "tuning": {"r": Range(1, 65_536), "num_virtual_tokens": Range(1, 65_536), "encoder_hidden_size": _LENGTH},
    "training": {
        "global_batch_size": _LENGTH, "max_tokens_per_batch": _COUNT, "early_stopping_patience": _COUNT,
        "learning_rate": Range(0, 100, above=True), "weight_decay": Range(0, 100), "max_grad_norm": Range(0, 10**6),
        "adam_beta1": _SHARE, "adam_beta2": _SHARE, "adam_epsilon": Range(0, 1, above=True),
        "num_train_epochs": Range(0, 10**6, above=True), "max_steps": Range(1, 10**9, also=-1),
        "warmup_steps": Range(0, 10**9), "logging_steps": Range(0, 10**9, above=True),
        "eval_steps": Range(0, 10**9, above=True), "save_steps": Range(0, 10**9, above=True),
        "save_total_limit": _COUNT, "per_device_train_batch_size": _LENGTH, "per_device_eval_batch_size": _LENGTH,
        "gradient_accumulation_steps": _LENGTH, "dataloader_num_workers": Range(0, 1024),
        "label_smoothing_factor": _SHARE, "neftune_noise_alpha": Range(0, 1000), "seed": _SEED, "data_seed": _SEED,
    },
    "generation": {
        "batch_size": Range(1, 65_536), "seed": _SEED, "concurrency": Range(1, 10_000),
        "requests_per_minute": Range(0.001, 10**6), "timeout": Range(0, 10**6, above=True),
        "max_retries": Range(0, 1000), "max_new_tokens": Range(1, 131_072), "max_length": Range(1, 10**6),
        "min_new_tokens": Range(0, 131_072), "num_beams": Range(1, 256), "temperature": Range(0, 100, above=True),
        "top_p": Range(0, 1, above=True), "top_k": Range(0, 10**6), "typical_p": Range(0, 1, above=True),
        "min_p": Range(0, 1), "repetition_penalty": Range(0, 100, above=True), "length_penalty": Range(-100, 100),
        "no_repeat_ngram_size": Range(0, 10**4), "num_return_sequences": Range(1, 1), "votes": Range(1, 1000),
        "encoder_no_repeat_ngram_size": Range(0, 10**4), "thinking_tokens": Range(0, 131_072),
    },
}  # fmt: skip


def check(section: str, values: Mapping[str, Any], problems: Problems) -> None:
    """Add a problem for every number of a section that is outside its range."""
    for name, value in values.items():
        possible = RANGES[section].get(name, _ANY)
        if isinstance(value, int | float) and not isinstance(value, bool) and not possible.holds(value):
            problems.add(f"{section}.{name}", f"{value:g} is not possible, only {possible}")
    if section == "generation" and not values.get("do_sample"):
        for name in ("temperature", "top_p", "top_k"):
            if values.get(name) is not None and values.get("mode", "generate") == "generate":
                problems.add(f"generation.{name}", "has no effect without sampling; add generation.do_sample=true")
