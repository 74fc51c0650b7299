"""ChatGLM2-6B and ChatGLM3-6B (one network), and GLM-4's remote-code checkpoints, as ordinary transformers models.

Written from measured facts about the released code, not from it; module names are the checkpoint's keys.
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
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import capture_outputs

from cmexam_tune.models.families.chatglm.configuration import ChatGLM2Config


def rotary_tables(
    positions: torch.Tensor, dim: int, dtype: torch.dtype, ratio: float = 1, interpolation: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine `[*positions.shape, dim / 2]`, computed in float32 as ChatGLM3 does, then cast.

    Args:
        positions: integers.
        dim: rotary width, half of the head's.
        dtype: of the model.
        ratio: the config's `rope_ratio`.
        interpolation: whether it divides positions (ChatGLM2-6B-32K) or multiplies the base.
    """
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / ((10000 if interpolation else 10000 * ratio) ** (steps / dim))
    places = positions[..., None].float() / ratio if interpolation else positions[..., None].float()
    angles = places * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn interleaved pairs (2j, 2j + 1) of the first half of every head; the second half passes.

    `states` is `[b, heads, s, head_dim]`, tables are `[b, 1, s, head_dim / 4]`.
    """
    width = 2 * cos.shape[-1]
    even, odd = states[..., 0:width:2], states[..., 1:width:2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([turned, states[..., width:]], dim=-1)


def count(attention_mask: torch.Tensor | None, seen: int, states: torch.Tensor) -> torch.Tensor:
    """Return positions `[b or 1, s]` from the first real token on; they are not relative where a prefix is read."""
    length = states.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.shape[1] == seen + length:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(seen, seen + length, device=states.device)[None]


class ChatGLM2RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        """Make a norm of `width` numbers."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normed states in their own dtype."""
        exact = hidden_states.float()
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed).to(hidden_states.dtype)


class ChatGLM2Attention(nn.Module):
    """Grouped self-attention whose qkv rows are all q heads, then all k groups, then all v groups."""

    def __init__(self, config: ChatGLM2Config, layer_idx: int) -> None:
        """Make the attention of block `layer_idx`."""
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.kv_channels
        self.sizes = [
            config.num_attention_heads * config.kv_channels,
            config.multi_query_group_num * config.kv_channels,
            config.multi_query_group_num * config.kv_channels,
        ]
        self.num_key_value_groups = config.num_attention_heads // config.multi_query_group_num
        self.is_causal = True
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.add_qkv_bias)
        self.dense = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; `tables` are cosine and sine `[b, 1, s, head_dim / 4]`."""
        batch, length, _ = hidden_states.shape
        query, key, value = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in self.query_key_value(hidden_states).split(self.sizes, dim=-1)
        )
        query, key = rotate(query, *tables), rotate(key, *tables)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sdpa_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, **kwargs
        )
        return self.dense(output.reshape(batch, length, -1)), weights


class ChatGLM2MLP(nn.Module):
    """SwiGLU: SiLU of the first half of the up-projection times the second half, then down."""

    def __init__(self, config: ChatGLM2Config) -> None:
        """Make the two layers."""
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[b, s, hidden]`."""
        gate, up = self.dense_h_to_4h(hidden_states).chunk(2, dim=-1)
        return self.dense_4h_to_h(functional.silu(gate) * up)


class ChatGLM2Block(GradientCheckpointingLayer):
    """Pre-norm block with plain residuals."""

    def __init__(self, config: ChatGLM2Config, layer_idx: int) -> None:
        """Make block `layer_idx`."""
        super().__init__()
        self.input_layernorm = ChatGLM2RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = ChatGLM2Attention(config, layer_idx)
        self.post_attention_layernorm = ChatGLM2RMSNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = ChatGLM2MLP(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return `[b, s, hidden]`."""
        attended, _ = self.self_attention(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class ChatGLM2Encoder(nn.Module):
    """Holder of the blocks and the final norm, for the sake of their keys."""

    def __init__(self, config: ChatGLM2Config) -> None:
        """Make the blocks."""
        super().__init__()
        self.layers = nn.ModuleList(ChatGLM2Block(config, i) for i in range(config.num_layers))
        self.final_layernorm = ChatGLM2RMSNorm(config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return `[b, s, hidden]` after the norm."""
        for block in self.layers:
            hidden_states = block(hidden_states, **kwargs)
        return self.final_layernorm(hidden_states)


class ChatGLM2PreTrainedModel(PreTrainedModel):
    """What transformers needs to know."""

    config_class = ChatGLM2Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ChatGLM2Block"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": ChatGLM2Block, "attentions": ChatGLM2Attention}
    _keys_to_ignore_on_load_unexpected = [r"inv_freq$", r"^transformer\.prefix_encoder\."]


class ChatGLM2Model(ChatGLM2PreTrainedModel):
    """Embedding, blocks and (because its key is here) the head."""

    def __init__(self, config: ChatGLM2Config) -> None:
        """Make an untrained model."""
        super().__init__(config)
        # A dict, because the key is embedding.word_embeddings.
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(config.padded_vocab_size, config.hidden_size)})
        self.encoder = ChatGLM2Encoder(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.embedding["word_embeddings"]

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding."""
        self.embedding["word_embeddings"] = value

    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states `[b, s, hidden]` before the head; arguments as `ChatGLM2ForCausalLM.forward`."""
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        hidden_states = self.embedding["word_embeddings"](input_ids) if inputs_embeds is None else inputs_embeds
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = count(attention_mask, seen, hidden_states)
        visible = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values if seen else None,
            position_ids=position_ids,
        )
        ratio, interpolation = self.config.rope_ratio, self.config.rope_interpolation
        cos, sin = rotary_tables(position_ids, self.config.kv_channels // 2, hidden_states.dtype, ratio, interpolation)
        hidden_states = self.encoder(
            hidden_states, tables=(cos[:, None], sin[:, None]), attention_mask=visible,
            past_key_values=past_key_values, **kwargs,
        )  # fmt: skip
        return BaseModelOutputWithPast(hidden_states, past_key_values)


class ChatGLM2ForCausalLM(ChatGLM2PreTrainedModel, GenerationMixin):
    """ChatGLM2, ChatGLM3 or GLM-4 with its head."""

    _tied_weights_keys = {"transformer.output_layer.weight": "transformer.embedding.word_embeddings.weight"}

    def __init__(self, config: ChatGLM2Config) -> None:
        """Make an untrained model."""
        super().__init__(config)
        self.transformer = ChatGLM2Model(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.transformer.output_layer

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head."""
        self.transformer.output_layer = value

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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and the mean loss where there are labels; everything as in transformers' own decoders.

        `attention_mask` is `[b, keys]`, 1 on tokens. Without it, `position_ids` `[b, s]` that start again at 0 keep
        packed questions apart.
        """
        outputs = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.transformer.output_layer(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.padded_vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)
