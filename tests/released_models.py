"""Small models with random weights in the layouts of Baichuan, Qwen-1 and InternLM."""

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cmexam_tune.models import released

SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
SECOND = {"tokenizer_class": "BaichuanTokenizer"}
KINDS: dict[str, dict[str, Any]] = {
    "baichuan": {"model_type": "baichuan", "max_position_embeddings": 64},
    "baichuan_alibi": {"model_type": "baichuan", "model_max_length": 64},
    "baichuan2": {"model_type": "baichuan", "max_position_embeddings": 64, **SECOND},
    "baichuan2_alibi": {"model_type": "baichuan", "model_max_length": 64, **SECOND},
    "qwen": {"model_type": "qwen", "kv_channels": 8, "seq_length": 64},
    "internlm": {"model_type": "internlm"},
    "internlm2": {"model_type": "internlm2", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
}
FUSED = {"baichuan": "W_pack", "baichuan2_alibi": "W_pack", "qwen": "c_attn", "internlm2": "wqkv"}
assert {values["model_type"] for values in KINDS.values()} == released.KINDS


POSITIONS = ("max_position_embeddings", "model_max_length", "seq_length")


def make(kind: str, positions: int = 64, **sizes: int) -> Any:
    """A small model with random weights, as transformers' auto classes make it from the released keys."""
    room = {key: positions for key in POSITIONS if key in KINDS[kind]}
    values = {**SMALL, **KINDS[kind], **room, **sizes}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return model
