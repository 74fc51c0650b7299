"""InternLM-7B and -20B, which are LLaMA with LLaMA's names, and InternLM2, which is LLaMA under other names."""

# transformers annotates its base classes only in part, and reads mutable class attributes.
# ruff: noqa: RUF012
# mypy: disable-error-code="no-untyped-call, misc, assignment, override"

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from cmexam_tune.models import layouts
from cmexam_tune.models.released.network import Release


@strict
class InternLMConfig(LlamaConfig):
    """The released config.json; `bias` is that of queries, keys, values and the output of attention."""

    model_type = "internlm"
    attribute_map = {"attention_bias": "bias"}

    bias: bool = True


class InternLMForCausalLM(Release, LlamaForCausalLM):
    """`LlamaForCausalLM` with the released config.json."""

    config_class = InternLMConfig
    _keys_to_ignore_on_load_unexpected = [r"inv_freq$"]


@strict
class InternLM2Config(LlamaConfig):
    """The released config.json."""

    model_type = "internlm2"
    attribute_map = {"attention_bias": "bias"}

    bias: bool = False


class InternLM2ForCausalLM(Release, LlamaForCausalLM):
    """`LlamaForCausalLM` with the released config.json; `LAYOUT` gives it the released weights."""

    config_class = InternLM2Config


def _groups(config: Any) -> tuple[int, int]:
    """Return the number of groups that share a key, and of queries in each."""
    return config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads


class SplitGroups(ConversionOps):
    """The rows of `wqkv`, in which every group has its queries, then its key, then its value."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: object
    ) -> dict[str, torch.Tensor]:
        """Return queries, keys and values; transformers hands over `config` by keyword."""
        (fused,) = input_dict.values()
        fused = fused[0] if isinstance(fused, list) else fused
        groups, queries = _groups(kwargs["config"])
        heads = fused.reshape(groups, queries + 2, -1, *fused.shape[1:])
        parts = (heads[:, :queries], heads[:, queries], heads[:, queries + 1])
        return {
            target: part.reshape(-1, *fused.shape[1:]).contiguous()
            for target, part in zip(target_patterns, parts, strict=True)
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Return what joins them again."""
        return JoinGroups()


class JoinGroups(ConversionOps):
    """Queries, keys and values as the rows of `wqkv`."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: object
    ) -> dict[str, torch.Tensor]:
        """Return the fused rows; transformers hands over `config` by keyword."""
        groups, queries = _groups(kwargs["config"])
        parts = [part[0] if isinstance(part, list) else part for part in map(input_dict.__getitem__, source_patterns)]
        columns = parts[0].shape[1:]
        heads = [part.reshape(groups, count, -1, *columns) for part, count in zip(parts, (queries, 1, 1), strict=True)]
        return {target_patterns[0]: torch.cat(heads, dim=1).reshape(-1, *columns)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Return what splits them again."""
        return SplitGroups()


LAYOUT = layouts.Layout(
    WeightRenaming("model.tok_embeddings", "model.embed_tokens"),
    WeightRenaming("attention.wo", "self_attn.o_proj"),
    WeightRenaming("attention_norm", "input_layernorm"),
    WeightRenaming("ffn_norm", "post_attention_layernorm"),
    WeightRenaming("feed_forward.w1", "mlp.gate_proj"),
    WeightRenaming("feed_forward.w3", "mlp.up_proj"),
    WeightRenaming("feed_forward.w2", "mlp.down_proj"),
    WeightRenaming("output", "lm_head"),
    WeightConverter("attention.wqkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [SplitGroups()]),
)
layouts.register(InternLM2ForCausalLM, LAYOUT)
