"""Baichuan-7B, Baichuan-13B, Baichuan2-7B and Baichuan2-13B: LLaMA with one matrix for queries, keys and values.

The 13B models have no rotation: every head lowers its scores by a multiple of the distance (ALiBi, Press et al. 2021,
arXiv:2108.12409). The second generation normalises the rows of its output matrix (NormHead).
"""

# transformers annotates its base classes only in part, and reads mutable class attributes.
# ruff: noqa: RUF012
# mypy: disable-error-code="no-untyped-call, misc, assignment"

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.core_model_loading import WeightConverter
from transformers.masking_utils import create_causal_mask

from cmexam_tune.models import attention, layouts
from cmexam_tune.models.released.network import Release

HAS_ALIBI = {4096: False, 5120: True}
"""By the `hidden_size` of the released models."""
FIRST_VOCABULARY, SECOND_VOCABULARY = 64_000, 125_696

LAYOUT = layouts.Layout(
    WeightConverter(
        "self_attn.W_pack",
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        [layouts.SplitHeads("num_attention_heads", "num_attention_heads", "num_attention_heads")],
    ),
)


@strict
class BaichuanConfig(LlamaConfig):
    """The released config.json. It names neither ALiBi nor NormHead: they follow from the sizes."""

    model_type = "baichuan"

    max_position_embeddings: int | None = None
    alibi: bool | None = None
    norm_head: bool | None = None

    def __post_init__(self, **kwargs: object) -> None:
        """Tell the four models apart; small models, as in tests, by what only some releases write down."""
        if self.alibi is None:
            self.alibi = HAS_ALIBI.get(self.hidden_size, self.max_position_embeddings is None)
        if self.norm_head is None:
            # Words may have been added to either vocabulary.
            second_and_small = self.vocab_size < FIRST_VOCABULARY and "tokenizer_class" in kwargs
            self.norm_head = self.vocab_size >= SECOND_VOCABULARY or second_and_small
        if self.max_position_embeddings is None:
            self.max_position_embeddings = kwargs.get("model_max_length", 4096)
        super().__post_init__(**kwargs)


class BaichuanForCausalLM(Release, LlamaForCausalLM):
    """`LlamaForCausalLM` with the released config.json; `LAYOUT` gives it the released weights."""

    config_class = BaichuanConfig
    _keys_to_ignore_on_load_unexpected = [r"inv_freq$"]

    def __init__(self, config: BaichuanConfig) -> None:
        """Make an untrained model."""
        if config.alibi and (config._attn_implementation or "sdpa") not in attention.TAKING_MASKS:
            raise ValueError(f"{config._attn_implementation} has no ALiBi; attn_implementation=sdpa and eager have")
        super().__init__(config)
        if config.alibi:
            self.model.rotary_emb = NoRotation()
            self.model.register_forward_pre_hook(add_alibi, with_kwargs=True)
        if config.norm_head:
            self.lm_head = NormHead(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Take another output matrix; of one that replaces a NormHead, as where words are added, only the weight."""
        if isinstance(self.lm_head, NormHead) and not isinstance(new_embeddings, NormHead):
            rows: Any = new_embeddings.weight
            new_embeddings = NormHead(rows.shape[1], rows.shape[0], bias=False, device="meta")
            new_embeddings.weight = rows
        super().set_output_embeddings(new_embeddings)

    @staticmethod
    def only_released(config: Any) -> bool:
        """Return whether the model has ALiBi, as no LLaMA of transformers has."""
        return bool(config.alibi)

    def in_transformers(self) -> Any:
        """Return the model as `LlamaForCausalLM`, whose output matrix has rows of length 1 where there is a NormHead.

        Raises:
            ValueError: the model has ALiBi.
        """
        plain = super().in_transformers()
        if isinstance(self.lm_head, NormHead):
            plain.lm_head.weight = nn.Parameter(functional.normalize(self.lm_head.weight.detach()))
        return plain


class NormHead(nn.Linear):
    """An output matrix whose rows have length 1 wherever it is used; the parameter keeps the lengths of its own.

    The released code writes the normalised rows over the parameter when it first evaluates, so that a checkpoint may
    hold either; here evaluating changes nothing.
    """

    refuses_lora = "uses its rows at length 1 (NormHead), W + BA does not. Train it whole: tuning.modules_to_save"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., vocabulary]` of hidden states `[..., hidden]`."""
        return functional.linear(input, functional.normalize(self.weight))


class NoRotation(nn.Module):
    """Stands where LLaMA computes its rotation, and turns nothing."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines that LLaMA can broadcast over `[batch, heads, tokens, head_dim]`."""
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


def slopes(heads: int) -> torch.Tensor:
    """Return by how much each head lowers a score for each token of distance, float32 `[heads]`.

    For 2^n heads the geometric series 2^(-8/2^n), ...; other numbers continue with every second slope of the series for
    twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    steps = torch.arange(1, power + 1, dtype=torch.float64) * 8 / power
    between = (2 * torch.arange(heads - power, dtype=torch.float64) + 1) * 4 / power
    return torch.pow(2.0, -torch.cat([steps, between])).float()


def add_alibi(
    base: LlamaModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the base model: replace the mask `[batch, keys]` by scores `[batch, heads, queries, keys]`.

    The released code adds slope times column, which in exact arithmetic differs from a distance by a constant of the
    row, which softmax removes. In bfloat16 the far end loses the distances: 8 bits cannot count to 1,000. And it counts
    padding, which may stand between the beginning that prompts share and the rest of them; here it does not count.
    """
    tokens = args[0] if args else kwargs.get("input_ids")
    embeddings = kwargs.get("inputs_embeds")
    embeddings = base.embed_tokens(tokens) if embeddings is None else embeddings
    past = kwargs.get("past_key_values")
    queries, seen = embeddings.shape[1], 0 if past is None else int(past.get_seq_length())
    mask = kwargs.get("attention_mask")
    visible: Any = create_causal_mask(
        base.config,
        embeddings,
        mask,
        past,
        kwargs.get("position_ids"),
        allow_is_causal_skip=False,
    )
    if mask is not None and mask.ndim == 2:
        place = (mask != 0).cumsum(-1)
    else:
        place = torch.arange(seen + queries, device=embeddings.device)[None]
    distance = (place[:, None] - place[:, seen:, None]).clamp(max=0)[:, None]
    bias = slopes(base.config.num_attention_heads).to(embeddings.device)[:, None, None] * distance
    hidden = torch.finfo(embeddings.dtype).min
    if visible.dtype == torch.bool:
        scores = bias.to(embeddings.dtype).masked_fill(~visible, hidden)
    else:
        scores = (bias + visible).clamp(min=hidden).to(embeddings.dtype)
    kwargs["attention_mask"] = scores
    return args, kwargs


layouts.register(BaichuanForCausalLM, LAYOUT)
