"""Qwen-1 (1.8B, 7B, 14B, 72B): transformers' `Qwen2ForCausalLM` under other names."""

# transformers annotates its base classes only in part, and reads mutable class attributes.
# ruff: noqa: RUF012
# mypy: disable-error-code="no-untyped-call, misc, assignment"

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.core_model_loading import WeightConverter, WeightRenaming

from cmexam_tune.core.errors import UserError
from cmexam_tune.models import layouts
from cmexam_tune.models.released.network import Release

FIRST_RELEASE = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
}
"""Keys of the first release's config.json -> what later ones call them."""

LAYOUT = layouts.Layout(
    WeightRenaming("transformer.wte", "model.embed_tokens"),
    WeightRenaming("transformer.ln_f", "model.norm"),
    WeightRenaming("transformer.h", "model.layers"),
    WeightRenaming("ln_1", "input_layernorm"),
    WeightRenaming("ln_2", "post_attention_layernorm"),
    WeightRenaming("attn.c_proj", "self_attn.o_proj"),
    WeightRenaming("mlp.w1", "mlp.up_proj"),
    WeightRenaming("mlp.w2", "mlp.gate_proj"),
    WeightRenaming("mlp.c_proj", "mlp.down_proj"),
    WeightConverter(
        "attn.c_attn",
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        [layouts.SplitHeads("num_attention_heads", "num_attention_heads", "num_attention_heads")],
    ),
)


@strict
class QWenConfig(Qwen2Config):
    """The released config.json, in its earlier and its later spelling.

    In the file `intermediate_size` counts gate and up projection together; here, as in transformers, each alone.
    """

    model_type = "qwen"
    attribute_map = {"rms_norm_eps": "layer_norm_epsilon", "head_dim": "kv_channels"}

    num_key_value_heads: int | None = None
    kv_channels: int = 128
    layer_norm_epsilon: float = 1e-6
    rotary_emb_base: float | int = 10000
    seq_length: int = 8192
    use_dynamic_ntk: bool = True
    use_logn_attn: bool = True

    def __post_init__(self, **kwargs: object) -> None:
        """Read both spellings."""
        for first, later in FIRST_RELEASE.items():
            if first in kwargs:
                setattr(self, later, kwargs.pop(first))
        self.intermediate_size //= 2
        kwargs.setdefault("rope_theta", self.rotary_emb_base)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return what the file says."""
        return {**super().to_dict(), "intermediate_size": 2 * self.intermediate_size}


class QWenLMHeadModel(Release, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` with the released config.json; `LAYOUT` gives it the released weights."""

    config_class = QWenConfig
    _keys_to_ignore_on_load_unexpected = [r"inv_freq$", r"logn_tensor$", r"masked_bias$"]

    def __init__(self, config: QWenConfig) -> None:
        """Make an untrained model."""
        super().__init__(config)
        self.model.register_forward_pre_hook(check_length, with_kwargs=True)

    def in_transformers(self) -> Any:
        """Return the model as `Qwen2ForCausalLM`, with as many positions as the two compute alike."""
        plain = super().in_transformers()
        if changes_beyond_its_length(self.config):
            plain.config.max_position_embeddings = self.config.seq_length
        return plain


def changes_beyond_its_length(config: QWenConfig) -> bool:
    """Return whether the released code stretches the positions of prompts beyond `seq_length`."""
    return config.use_dynamic_ntk or config.use_logn_attn


def check_length(base: Qwen2Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the base model: refuse to answer beyond `seq_length` in another way than the released code.

    There it changes rotation and queries by the length of the prompt (dynamic NTK, log n), in training it does not.

    Raises:
        UserError: more tokens than `seq_length`.
    """
    config: Any = base.config
    if base.training or not changes_beyond_its_length(config):
        return
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    past = kwargs.get("past_key_values")
    length = tokens.shape[1] + (0 if past is None else int(past.get_seq_length()))
    if length > config.seq_length:
        raise UserError(
            f"{length} tokens of prompt and answer: beyond seq_length={config.seq_length} of its config.json Qwen-1 "
            "stretches its positions (use_dynamic_ntk, use_logn_attn), which is not implemented. Lower "
            "prompt.max_source_length, prompt.num_shots or generation.max_new_tokens; or go on as in training with "
            "model.config.use_dynamic_ntk=false model.config.use_logn_attn=false."
        )


layouts.register(QWenLMHeadModel, LAYOUT)
