"""Released checkpoints whose own Python code today's transformers cannot run: Baichuan, Qwen-1, InternLM.

Each is a network of transformers under other names, and is told by its config.json. Importing this package makes the
model types known to `AutoConfig` and `AutoModelForCausalLM`; start reading with `baichuan.py`.

What they compute was found by running the released code; docs/released.md says where each fact comes from.
"""

from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils.hub import cached_file

from cmexam_tune.models.released.baichuan import BaichuanConfig, BaichuanForCausalLM
from cmexam_tune.models.released.internlm import (
    InternLM2Config,
    InternLM2ForCausalLM,
    InternLMConfig,
    InternLMForCausalLM,
)
from cmexam_tune.models.released.network import Release
from cmexam_tune.models.released.qwen1 import QWenConfig, QWenLMHeadModel
from cmexam_tune.models.released.vocabularies import RoleTokenizer, read

__all__ = ["KINDS", "NETWORKS", "Release", "RoleTokenizer", "read_tokenizer", "whole_formats"]

NETWORKS: dict[type[PreTrainedConfig], Any] = {
    BaichuanConfig: BaichuanForCausalLM,
    InternLMConfig: InternLMForCausalLM,
    InternLM2Config: InternLM2ForCausalLM,
    QWenConfig: QWenLMHeadModel,
}
KINDS = frozenset(str(config.model_type) for config in NETWORKS)
"""Their `model_type` in config.json."""

for _config, _network in NETWORKS.items():
    AutoConfig.register(str(_config.model_type), _config, exist_ok=True)
    AutoModelForCausalLM.register(_config, _network, exist_ok=True)


def whole_formats(config: PreTrainedConfig) -> tuple[Literal["hf", "released"], ...]:
    """Return the layouts that a model can be saved in: that of transformers' own classes, that of its release."""
    network = NETWORKS.get(type(config))
    if network is None:
        return ("hf",)
    return ("released",) if network.only_released(config) else ("hf", "released")


def read_tokenizer(place: str, revision: str | None) -> RoleTokenizer | None:
    """Return the tokenizer of a folder or hub name in its released files; None: it is another one.

    Raises:
        ValueError: the files are damaged.
        OSError: the hub cannot be reached.
    """
    silent: Any = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}

    def find(name: str) -> Path | None:
        path = cached_file(place, name, revision=revision, **silent)
        return None if path is None else Path(path)

    return read(find)
