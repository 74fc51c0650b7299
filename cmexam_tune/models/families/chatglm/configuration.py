"""The released config.json of ChatGLM-6B (v1) and of ChatGLM2/3-6B and GLM-4's remote-code checkpoints (v2)."""

# transformers annotates its base classes only in part, and reads mutable class attributes.
# ruff: noqa: RUF012
# mypy: disable-error-code="no-untyped-call"

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from cmexam_tune.core import documents
from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.models.checkpoint import LOADING


@strict
class ChatGLMConfig(PreTrainedConfig):
    """ChatGLM-6B. Field names are those of its config.json; transformers' own names are mapped onto them."""

    model_type = "chatglm"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "inner_hidden_size",
        "max_position_embeddings": "max_sequence_length",
    }

    vocab_size: int = 130528
    hidden_size: int = 4096
    num_layers: int = 28
    num_attention_heads: int = 32
    inner_hidden_size: int = 16384
    max_sequence_length: int = 2048
    layernorm_epsilon: float = 1e-5
    position_encoding_2d: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 130004
    """`<sop>`: everything before it is read in both directions."""
    eos_token_id: int | list[int] | None = 130005
    pad_token_id: int | None = 3
    mask_token_id: int | None = None
    gmask_token_id: int | None = None
    quantization_bit: int = 0
    tie_word_embeddings: bool = True
    """Not in config.json: the head was tied by the default of that time, see docs/chatglm.md."""

    def __post_init__(self, **kwargs: object) -> None:
        """Derive the mask tokens that the first release's config.json does not name."""
        # In both vocabularies [MASK] and [gMASK] are 4 and 3 before <sop>: 150000, 150001, 150004 and 130000, ...
        if self.gmask_token_id is None and self.bos_token_id is not None:
            self.gmask_token_id = self.bos_token_id - 3
        if self.mask_token_id is None and self.bos_token_id is not None:
            self.mask_token_id = self.bos_token_id - 4
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse sizes that do not fit together; transformers calls this for configs that are `strict`."""
        # A head is turned by two positions, in pairs of numbers.
        _divides("4 * num_attention_heads", 4 * self.num_attention_heads, "hidden_size", self.hidden_size)
        for name in ("bos_token_id", "gmask_token_id", "mask_token_id"):
            if not 0 <= (getattr(self, name) or 0) < self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is not below vocab_size {self.vocab_size}")


@strict
class ChatGLM2Config(PreTrainedConfig):
    """ChatGLM2-6B, ChatGLM3-6B, GLM-4 (remote-code layout). `attribute_map` and the last members are for `GlmModel`."""

    model_type = "chatglm"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "vocab_size": "padded_vocab_size",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon",
        "attention_bias": "add_qkv_bias",
    }
    hidden_act = "silu"
    attention_dropout = 0.0
    partial_rotary_factor = 0.5

    padded_vocab_size: int = 65024
    hidden_size: int = 4096
    num_layers: int = 28
    num_attention_heads: int = 32
    kv_channels: int = 128
    ffn_hidden_size: int = 13696
    multi_query_attention: bool = True
    multi_query_group_num: int = 2
    seq_length: int = 8192
    layernorm_epsilon: float = 1e-5
    add_qkv_bias: bool = True
    add_bias_linear: bool = False
    apply_residual_connection_post_layernorm: bool = False
    rmsnorm: bool = True
    post_layer_norm: bool = True
    rope_ratio: float | int = 1
    """Long-context releases: factor on the base of the rotary frequencies (ChatGLM3, GLM-4)."""
    rope_interpolation: bool = False
    """ChatGLM2-6B-32K divides positions by `rope_ratio` instead."""
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0
    quantization_bit: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        """Give models without grouped keys as many groups as heads."""
        if not self.multi_query_attention:
            self.multi_query_group_num = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse sizes that do not fit together; transformers calls this for configs that are `strict`."""
        heads, groups = self.num_attention_heads, self.multi_query_group_num
        _divides("multi_query_group_num", groups, "num_attention_heads", heads)

    @property
    def rope_parameters(self) -> dict[str, object]:
        """What transformers' rotary embedding reads: the long-context releases stretch the base or the positions."""
        ratio, rotary = float(self.rope_ratio), {"partial_rotary_factor": self.partial_rotary_factor}
        if self.rope_interpolation:
            return {"rope_type": "linear", "rope_theta": 10000.0, "factor": ratio, **rotary}
        return {"rope_type": "default", "rope_theta": 10000.0 * ratio, **rotary}

    @rope_parameters.setter
    def rope_parameters(self, value: dict[str, object]) -> None:
        # transformers writes back what it has read. A stored copy would go into config.json, which has its own keys
        # for this, and would not follow a later change of rope_ratio (`model.config` of a recipe).
        pass

    @property
    def prefix_embedding_dim(self) -> int:
        """Width of the authors' embedding under the P-tuning projection: the full width of the prefix."""
        return 2 * self.num_layers * self.multi_query_group_num * self.kv_channels


def _divides(part: str, count: int, whole: str, size: int) -> None:
    if count < 1 or size % count:
        raise ValueError(f"{whole} {size} is no multiple of {part} {count}")


UNSUPPORTED = {
    "add_bias_linear": True,
    "apply_residual_connection_post_layernorm": True,
    "rmsnorm": False,
    "post_layer_norm": False,
}
"""Switches of v2's config.json that no released checkpoint uses."""


def from_values(values: Mapping[str, object], name: str) -> ChatGLMConfig | ChatGLM2Config:
    """Return the config of a checkpoint, v1 or v2 by the fields that it has.

    Raises:
        UserError: neither, or switched to something that no released checkpoint has.
    """
    fields = {key: value for key, value in values.items() if key not in ("model_type", "_name_or_path")}
    fields = {key: value for key, value in fields.items() if value is not None}
    fields.pop("quantization_embeddings", None)
    if "kv_channels" in fields or "padded_vocab_size" in fields:
        for key, value in UNSUPPORTED.items():
            if fields.get(key) is value:
                raise UserError(f"{name}: config.json has {key}: {json.dumps(value)}, which is not supported.")
        fields.pop("vocab_size", None)
        original = f"{values.get('_name_or_path', '')} {name}".lower()
        # ChatGLM2-32K and ChatGLM3 mean different things by `rope_ratio`; only the name tells which.
        fields.setdefault("rope_interpolation", "chatglm2" in original and fields.get("rope_ratio", 1) != 1)
        return _made(ChatGLM2Config, fields, name)
    if "inner_hidden_size" in fields or "position_encoding_2d" in fields:
        return _made(ChatGLMConfig, fields, name)
    raise UserError(f"{name}: config.json is neither of ChatGLM-6B (inner_hidden_size) nor of ChatGLM2 (kv_channels).")


def _made(
    kind: type[ChatGLMConfig] | type[ChatGLM2Config], values: Mapping[str, Any], name: str
) -> ChatGLMConfig | ChatGLM2Config:
    try:
        return kind(**values)
    except LOADING as error:
        raise UserError(f"{name}: config.json cannot be used ({' '.join(str(error).split())[:200]}).") from None


def find_file(folder: str | Path, file: str, revision: str | None = None) -> Path | None:
    """Return a file of a checkpoint folder, or of a model on the hub or in its local cache; None: it has none.

    Raises:
        UserError: no such folder, and nothing of that name can be fetched.
    """
    path = Path(folder).expanduser()
    if path.is_dir():
        return path / file if (path / file).is_file() else None
    try:
        cached = cached_file(str(folder), file, revision=revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: neither a folder nor a model of the hub ({first_line(error)}).") from None
    return None if cached is None else Path(cached)


def read_values(folder: str | Path, file: str = "config.json", revision: str | None = None) -> dict[str, Any]:
    """Return an unmodified JSON file of the checkpoint; empty if there is none.

    Raises:
        UserError: it is not JSON.
    """
    path = find_file(folder, file, revision)
    if path is None:
        return {}
    values: dict[str, object] = documents.read_json(path, "file of a checkpoint", finite=False)
    return values
