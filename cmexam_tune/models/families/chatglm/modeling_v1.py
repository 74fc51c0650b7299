"""ChatGLM-6B as an ordinary transformers model: prefix-LM attention, two-channel rotary, scaled post-norm residual.

Written from measured facts about the released code, not from it; module names are the checkpoint's keys.
Why the details are what they are: docs/chatglm.md.
"""

# transformers annotates its base classes only in part, and reads mutable class attributes.
# ruff: noqa: RUF012
# mypy: disable-error-code="no-untyped-call, untyped-decorator, override, misc, arg-type, no-any-return, assignment"

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import capture_outputs

from cmexam_tune.core.errors import UserError
from cmexam_tune.models import attention
from cmexam_tune.models.families.chatglm.configuration import ChatGLMConfig

RESIDUAL_SCALE = (2 * 28) ** 0.5
"""alpha of the residual. The released code takes 28 layers whatever num_layers says."""


def rotary_tables(positions: torch.Tensor, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine `[*positions.shape, dim]`, each frequency twice (half-split pairs).

    The frequencies are those that the weights were trained with: rounded to float16. In half precision the angle is
    rounded to float16 too; bfloat16, in which positions above 256 would collide, uses those same angles.
    """
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = (1.0 / (10000 ** (steps / dim))).half()
    exact = torch.float32 if dtype in (torch.float32, torch.float64) else torch.float16
    # float32 from here on: autocast to bfloat16 refuses to join float16 tensors.
    angles = (positions[..., None].to(exact) * frequencies.to(exact)).float()
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (j, j + dim/2) of `states` `[b, heads, s, dim]`; tables are `[b, 1, s, dim]`."""
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin


def real_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Return bool `[b, s]`, True on tokens, for a mask `[b, s]` or the original's `[b, 1, s, s]` (True = hidden)."""
    return ~mask[:, 0, -1].bool() if mask.ndim == 4 else mask.bool()


class PrefixLMRows:
    """Positions and mask of whole rows from their token ids, as the released code has them; rows may be packed.

    Channel 0 counts the context (all before sop) and then stays at the mask token's place; channel 1 is 0 in the
    context and counts from 1 at sop. The context is visible to all of its question, the rest is causal.
    """

    def __init__(
        self, config: ChatGLMConfig, ids: torch.Tensor, real: torch.Tensor, packed: torch.Tensor | None = None
    ) -> None:
        """Find the contexts.

        Args:
            config: names the special tokens.
            ids: `[b, s]`.
            real: bool `[b, s]`, False on padding.
            packed: positions `[b or 1, s]` that start again at 0 with every question; None: a row is one question.

        Raises:
            UserError: a row (packed: an answer) without sop or mask token.
        """
        length = ids.shape[1]
        self.index = torch.arange(length, device=ids.device)
        self.real, self.packed, self.two_channels = real, packed is not None, config.position_encoding_2d
        if packed is None:
            self.segment = torch.zeros_like(ids)
            self.relative = (self.index - real.int().argmax(1, keepdim=True)).clamp(min=0)
        else:
            self.relative = packed.expand_as(ids)
            # Positions start again at 0 with every question, so counting the zeros numbers the questions.
            self.segment = ((self.relative == 0).cumsum(1) - 1).clamp(min=0)

        def first(token: int | None) -> torch.Tensor:
            """Return for each token `[b, s]` where in its question `token` comes first; `length`: nowhere."""
            places = torch.where((ids == token) & real, self.relative, length)
            # A minimum over each question, then given back to all of its tokens.
            earliest = torch.full_like(ids, length).scatter_reduce(1, self.segment, places, "amin")
            return earliest.gather(1, self.segment)

        self.context_length, gmask = first(config.bos_token_id), first(config.gmask_token_id)
        # The released model looks for [gMASK] before [MASK]; its tokenizer does it the other way round.
        self.anchor = torch.where(gmask < length, gmask, first(config.mask_token_id))
        self.context = self.relative < self.context_length
        # What is packed ends in filler without sop, which counts as context.
        if packed is None and bool((self.context_length == length).any()):
            raise UserError(
                f"ChatGLM-6B: a row holds no <sop> (bos_token_id {config.bos_token_id} of config.json), so its context "
                "has no end. Are config.json and ice_text.model of one release?"
            )
        if bool((~self.context & (self.anchor == length)).any()):
            marks = (
                f"[gMASK] (gmask_token_id {config.gmask_token_id} of config.json) nor [MASK] ({config.mask_token_id})"
            )
            raise UserError(
                f"ChatGLM-6B: a row holds neither {marks}. Are config.json and ice_text.model of one release?"
            )

    def positions(self) -> torch.Tensor:
        """Return `[b, 2, s]`."""
        if not self.two_channels:
            return torch.stack([self.relative, torch.zeros_like(self.relative)], dim=1)
        first = torch.where(self.context, self.relative, self.anchor)
        second = torch.where(self.context, 0, self.relative - self.context_length + 1)
        return torch.stack([first, second], dim=1)

    def visible(self) -> torch.Tensor:
        """Return bool `[b, 1, s, s]`, True where a query (row) sees a key (column)."""
        visible = (self.index[:, None] >= self.index) | self.context[:, None, :]
        if self.packed:
            visible = visible & (self.segment[:, :, None] == self.segment[:, None, :])
        # Padding sees everything, as in the original: a row that sees nothing would be NaN in some kernels.
        visible = (visible & self.real[:, None, :]) | ~self.real[:, :, None]
        return visible[:, None]


def positions_and_mask(
    config: ChatGLMConfig,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    *,
    seen: int,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return positions `[b, 2, s]` and the mask (True = visible, `[b, 1, s, seen + s]`; None: all is visible).

    Args:
        config: names the special tokens.
        input_ids: `[b, s]`, what is fed.
        attention_mask: see `ChatGLMForCausalLM.forward`.
        position_ids: as there.
        seen: tokens in the cache.
        length: s.

    Raises:
        UserError: as `PrefixLMRows`.
        ValueError: positions can be neither taken nor computed.
    """
    positions = position_ids if position_ids is not None and position_ids.ndim == 3 else None
    visible = ~attention_mask.bool() if attention_mask is not None and attention_mask.ndim == 4 else None
    if seen:
        # What is fed does not hold the mask token, from whose place positions follow.
        if positions is None:
            raise ValueError("ChatGLM-6B: a continuation of a cache needs position_ids [b, 2, s]; generate makes them.")
        if visible is None and (attention_mask is not None or length > 1):
            visible = torch.ones(length, seen + length, dtype=torch.bool, device=positions.device).tril(seen)
            visible = visible[None, None]
            if attention_mask is not None:
                visible = visible & attention_mask.bool()[:, None, None, :]
        return positions, visible
    if positions is not None and visible is not None:
        return positions, visible
    if input_ids is None:
        raise ValueError("ChatGLM-6B: inputs_embeds need position_ids [b, 2, s] and attention_mask [b, 1, s, s].")
    packed = position_ids if positions is None and attention_mask is None else None
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else real_tokens(attention_mask)
    rows = PrefixLMRows(config, input_ids, real, packed)
    return rows.positions() if positions is None else positions, rows.visible() if visible is None else visible


class ChatGLMAttention(nn.Module):
    """Self-attention whose qkv rows are grouped by head: q, k, v of head 0, then of head 1, ..."""

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        """Make the attention of block `layer_idx`."""
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        # The mask says all: without one (a single token after a cache) every key is visible.
        self.is_causal = False
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attended states `[b, s, hidden]`, and weights where the attention function gives any.

        Args:
            hidden_states: `[b, s, hidden]`.
            tables: cosine and sine, `[b, 1, s, head_dim]` each.
            attention_mask: bool `[b, 1, s, keys]`, True where visible; None: everything is.
            past_key_values: cache, to which the rotated keys and the values are added.
            kwargs: for the attention function; with a P-tuning prefix its `prefix`.
        """
        batch, length, width = hidden_states.shape
        mixed = self.query_key_value(hidden_states).view(batch, length, self.heads, 3 * self.head_dim).transpose(1, 2)
        query, key, value = mixed.chunk(3, dim=-1)
        query, key = self.turn(query, tables), self.turn(key, tables)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        # The released code divides scores by layer + 1 and multiplies them back in float32: nothing remains of it here.
        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sdpa_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs
        )
        return self.dense(output.reshape(batch, length, width)), weights

    def turn(self, states: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate the first half of the head by channel 0 of the positions and the second half by channel 1."""
        cos, sin = tables
        if not self.config.position_encoding_2d:
            return rotate(states, cos, sin)
        parts = (part.chunk(2, dim=-1) for part in (states, cos, sin))
        return torch.cat([rotate(*half) for half in zip(*parts, strict=True)], dim=-1)


class ChatGLMMLP(nn.Module):
    """Linear, GELU in its tanh form, linear."""

    def __init__(self, config: ChatGLMConfig) -> None:
        """Make the two layers."""
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.inner_hidden_size)
        self.dense_4h_to_h = nn.Linear(config.inner_hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[b, s, hidden]`."""
        inner = functional.gelu(self.dense_h_to_4h(hidden_states), approximate="tanh")
        return self.dense_4h_to_h(inner)


class ChatGLMBlock(GradientCheckpointingLayer):
    """The residual carries the normalised tensor, scaled: no ordinary pre-norm block.

    a = LN1(x), h = alpha a + Attention(a), b = LN2(h), output = alpha b + MLP(b), with alpha = `RESIDUAL_SCALE`.
    """

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        """Make block `layer_idx`."""
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = ChatGLMAttention(config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = ChatGLMMLP(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Return `[b, s, hidden]`."""
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.attention(normed, **kwargs)
        normed = self.post_attention_layernorm(RESIDUAL_SCALE * normed + attended)
        return RESIDUAL_SCALE * normed + self.mlp(normed)


class ChatGLMPreTrainedModel(PreTrainedModel):
    """What transformers needs to know."""

    config_class = ChatGLMConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ChatGLMBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": ChatGLMBlock, "attentions": ChatGLMAttention}
    # The tables are computed; a P-tuning checkpoint of the older trainer holds the whole model and a prefix.
    _keys_to_ignore_on_load_unexpected = [r"inv_freq$", r"^transformer\.prefix_encoder\."]


class ChatGLMModel(ChatGLMPreTrainedModel):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ChatGLMConfig) -> None:
        """Make an untrained model."""
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ChatGLMBlock(config, i) for i in range(config.num_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.word_embeddings = value

    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Return hidden states `[b, s, hidden]`; the arguments are those of `ChatGLMForCausalLM.forward`."""
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden_states = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        positions, visible = positions_and_mask(
            self.config, input_ids, attention_mask, position_ids, seen=seen, length=hidden_states.shape[1]
        )
        if visible is not None:
            visible = attention.additive(visible, hidden_states.dtype)
        tables = self.tables(positions, hidden_states.dtype)
        for block in self.layers:
            hidden_states = block(
                hidden_states, tables=tables, attention_mask=visible, past_key_values=past_key_values, **kwargs
            )
        return BaseModelOutputWithPast(self.final_layernorm(hidden_states), past_key_values)

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine `[b, 1, s, head_dim]` for `positions` `[b, 2, s]` (or `[b, s]` where not 2D)."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        if not self.config.position_encoding_2d:
            plain = positions[:, 0] if positions.ndim == 3 else positions
            cos, sin = rotary_tables(plain, head_dim, dtype)
            return cos[:, None], sin[:, None]
        cos, sin = rotary_tables(positions, head_dim // 2, dtype)
        return torch.cat(cos.unbind(1), dim=-1)[:, None], torch.cat(sin.unbind(1), dim=-1)[:, None]


class ChatGLMForCausalLM(ChatGLMPreTrainedModel, GenerationMixin):
    """ChatGLM-6B with its head, tied to the embedding."""

    _tied_weights_keys = {"lm_head.weight": "transformer.word_embeddings.weight"}

    def __init__(self, config: ChatGLMConfig) -> None:
        """Make an untrained model."""
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = value

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """Tie the head to the embedding even where the checkpoint has another head, as the released code did."""
        if missing_keys is not None and self.config.tie_word_embeddings:
            # transformers does not tie weights that are both in the checkpoint and differ; it ties a missing one.
            missing_keys.add("lm_head.weight")
        super().tie_weights(missing_keys=missing_keys, recompute_mapping=recompute_mapping)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the mean loss where there are labels.

        Args:
            input_ids: `[b, s]`; each row (packed: each question) holds `[gMASK]` or `[MASK]`, and `<sop>` once.
            attention_mask: `[b, s]`, 0 on padding at either end; or the original's `[b, 1, s, s]`, True = hidden.
                None: every token counts, padding too, as the original does with bare ids.
            position_ids: `[b, 2, s]` as the original's; or `[b, s]` that start again at 0 with every packed question.
            past_key_values: cache.
            inputs_embeds: instead of ids; needs the original's mask and positions.
            labels: `[b, s]`, -100 where there is no loss; shifted here.
            use_cache: default: the config's.
            logits_to_keep: only so many last positions, or these positions; 0: all.
            kwargs: for the attention and the loss.

        Raises:
            UserError: a row without `<sop>` or mask token.
            ValueError: a continuation without positions.
        """
        outputs = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        # `-0` is 0, so 0 keeps all positions.
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)

    reads_both_ways = True
    """The keys of a context depend on all of it, so prompts cannot share those of their beginning."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as every transformers model; the original's `[b, 1, s, s]` mask is accepted too."""
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            kwargs["attention_mask"] = real_tokens(mask).long()
        # They are computed for every step, see prepare_inputs_for_generation.
        kwargs.pop("position_ids", None)
        return super().generate(*args, **kwargs)

    def _prepare_attention_mask_for_generation(self, inputs_tensor: torch.Tensor, *args: object) -> torch.Tensor:
        # As in the original, padding is only what a mask says: bare ids are all tokens.
        return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, object]:
        """Add the positions of the tokens that are fed, `[b, 2, s]`.

        Behind the prompt they only count on. So its last ones are kept with the cache; beams, which change places, have
        those of their prompt in common.
        """
        mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
        kwargs.pop("position_ids", None)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        width, fed = input_ids.shape[1], inputs["input_ids"].shape[1]
        end_of_prompt = getattr(cache, "end_of_prompt", None)
        if cache is not None and end_of_prompt is not None and cache.get_seq_length():
            place, last = end_of_prompt
            steps = torch.arange(width - fed + 1 - place, width + 1 - place, device=last.device)
            still = torch.zeros_like(steps)
            channels = [still, steps] if self.config.position_encoding_2d else [steps, still]
            inputs["position_ids"] = last + torch.stack(channels)
            return inputs
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else real_tokens(mask)
        positions = PrefixLMRows(self.config, input_ids, real).positions()
        if cache is not None:
            cache.end_of_prompt = width, positions[..., -1:]
        inputs["position_ids"] = positions[..., -fed:]
        return inputs
