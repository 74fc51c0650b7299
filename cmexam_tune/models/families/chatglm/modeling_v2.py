"""ChatGLM2-6B, ChatGLM3-6B and GLM-4's remote-code checkpoints: transformers' `GlmForCausalLM` under other names."""

# transformers annotates its base classes only in part, and reads mutable class attributes.
# ruff: noqa: RUF012
# mypy: disable-error-code="no-untyped-call, misc, assignment, arg-type"

from typing import Any

import torch
from torch import nn
from transformers import GlmForCausalLM
from transformers.core_model_loading import WeightConverter, WeightRenaming

from cmexam_tune.models import layouts
from cmexam_tune.models.families.chatglm.configuration import ChatGLM2Config

LAYOUT = layouts.Layout(
    WeightRenaming("transformer.embedding.word_embeddings", "model.embed_tokens"),
    WeightRenaming("transformer.prefix_encoder", "model.prefix_encoder"),
    WeightRenaming("transformer.encoder.final_layernorm", "model.norm"),
    WeightRenaming("transformer.encoder.layers", "model.layers"),
    WeightRenaming("transformer.output_layer", "lm_head"),
    WeightRenaming("self_attention.dense", "self_attn.o_proj"),
    WeightRenaming("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
    WeightRenaming("mlp.dense_4h_to_h", "mlp.down_proj"),
    WeightConverter(
        "self_attention.query_key_value",
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        [layouts.SplitHeads("num_attention_heads", "multi_query_group_num", "multi_query_group_num")],
    ),
)


class ChatGLM2ForCausalLM(GlmForCausalLM):
    """`GlmForCausalLM` with the released config.json; `LAYOUT` gives it the released weights."""

    config_class = ChatGLM2Config
    _keys_to_ignore_on_load_unexpected = [r"inv_freq$", r"^model\.prefix_encoder\."]

    def __init__(self, config: ChatGLM2Config) -> None:
        """Make an untrained model."""
        super().__init__(config)
        self.model.register_forward_pre_hook(count_positions, with_kwargs=True)


layouts.register(ChatGLM2ForCausalLM, LAYOUT)


def count_positions(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model: count `position_ids` `[b, s]` from the first real token of each row.

    Where the caller gives only a mask `[b, s]`, transformers counts padding on the left as well. Rotation is relative,
    so that changes nothing between tokens; but the keys of a P-tuning prefix are not rotated.
    """
    mask = kwargs.get("attention_mask")
    whole_rows = kwargs.get("past_key_values") is None or not kwargs["past_key_values"].get_seq_length()
    if kwargs.get("position_ids") is None and isinstance(mask, torch.Tensor) and mask.ndim == 2 and whole_rows:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return args, kwargs
