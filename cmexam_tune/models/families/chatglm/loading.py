"""Opening ChatGLM checkpoints: the public `load_model` and `load_tokenizer`."""

# transformers annotates its base classes only in part.
# mypy: disable-error-code="no-untyped-call, misc, has-type, no-any-return"

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import ConfigError, UserError, first_line
from cmexam_tune.models import attention, checkpoint
from cmexam_tune.models.families.chatglm import configuration, quantization
from cmexam_tune.models.families.chatglm.configuration import (
    ChatGLM2Config,
    ChatGLMConfig,
    find_file,
    read_values,
)
from cmexam_tune.models.families.chatglm.modeling_v1 import ChatGLMForCausalLM
from cmexam_tune.models.families.chatglm.modeling_v2 import ChatGLM2ForCausalLM
from cmexam_tune.models.families.chatglm.prefix import attach_authors_prefix
from cmexam_tune.models.families.chatglm.tokenization import ChatGLM2Tokenizer, ChatGLMTokenizer, SentencePieceTokenizer


def load_model(folder: str | Path, prefix: str | Path | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Load a ChatGLM checkpoint in its original layout, in eval mode.

    Args:
        folder: config.json as released and `.safetensors` or `.bin` weights (int8 and int4 too); or a hub name.
        prefix: a P-tuning checkpoint of the ChatGLM authors (file or folder), put in front of every layer.
        dtype: float32, float16, bfloat16, or auto: float32 on a CPU, half precision on a card.

    Raises:
        UserError: missing or damaged files, another architecture, or a prefix of another size.
    """
    if dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r} is unknown; known: auto, float32, float16, bfloat16.")
    model = ModelConfig(family="chatglm", model_name_or_path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    loaded = read_model(model)
    if prefix is not None:
        loaded = attach_authors_prefix(loaded, prefix)
    return loaded.eval()


def read_model(model: ModelConfig, device: str = "cpu") -> PreTrainedModel:
    """Load the model that `model` names, without adapters; see `checkpoint.read_weights`.

    Raises:
        UserError: as `load_model`.
        ConfigError: `model.config` names something that this config does not have.
    """
    values = checkpoint.raw_config(model)
    if values.get("model_type") != "chatglm":
        raise UserError(
            f"{model.model_name_or_path}: is a {values.get('model_type')!r} model, not a ChatGLM. Set model.family."
        )
    # The raw file, because transformers replaces `_name_or_path` by the folder.
    raw = read_values(checkpoint.location(model), revision=model.revision)
    config = configuration.from_values(raw, model.model_name_or_path)
    checkpoint.change(config, model)
    cls = ChatGLMForCausalLM if isinstance(config, ChatGLMConfig) else ChatGLM2ForCausalLM
    usual = not config.quantization_bit and quantization.has_usual_files(checkpoint.location(model), model.revision)
    if usual or device == "meta":
        config.quantization_bit = 0
        return checkpoint.read_weights(cls, model, config, device)
    return _from_state(cls, model, config, device)


def _from_state(
    cls: type[PreTrainedModel], model: ModelConfig, config: ChatGLMConfig | ChatGLM2Config, device: str
) -> PreTrainedModel:
    dtype, place = checkpoint.dtype(model), checkpoint.location(model)
    # ZeRO-3 takes the values from the first process; the others need names and shapes only.
    held = "meta" if is_deepspeed_zero3_enabled() and torch.distributed.get_rank() else device
    try:
        state = quantization.read_state(place, config.quantization_bit, dtype, model.revision, held)
        config.quantization_bit = 0
        loaded, info = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True,
            attn_implementation=attention.suited(model.attn_implementation),
            device_map=None if device == "cpu" else {"": device},
        )  # fmt: skip
    except UserError:
        raise
    except checkpoint.LOADING as error:
        raise UserError(f"{place}: the weights cannot be loaded ({first_line(error)}).") from None
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{place}: {len(missing)} weights are not in the checkpoint, the first is {missing[0]}.")
    loaded.config.name_or_path = place
    result: PreTrainedModel = loaded
    return result


def load_tokenizer(
    folder: str | Path, version: int | None = None, revision: str | None = None
) -> SentencePieceTokenizer:
    """Load the tokenizer of a ChatGLM checkpoint.

    Args:
        folder: holds `ice_text.model` (version 1) or `tokenizer.model` (2 and 3); or a hub name.
        version: 1, 2 or 3, where the folder does not tell: 3 has the role tokens of a conversation.
        revision: on the hub.

    Raises:
        UserError: no such file, or one that is not a sentencepiece model.
    """
    stored = read_values(folder, "tokenizer_config.json", revision)
    first = None if version in (2, 3) else find_file(folder, "ice_text.model", revision)
    path = first or (None if version == 1 else find_file(folder, "tokenizer.model", revision))
    if path is None:
        raise UserError(f"{folder}: holds neither ice_text.model (ChatGLM-6B) nor tokenizer.model (ChatGLM2/3-6B).")
    try:
        if first is not None:
            images = stored.get("num_image_tokens", _image_tokens(folder, revision))
            return ChatGLMTokenizer(str(path), num_image_tokens=int(images))
        version = version or stored.get("glm_version") or _version(folder, revision)
        encode_special = bool(stored.get("encode_special_tokens", False))
        return ChatGLM2Tokenizer(str(path), glm_version=version, encode_special_tokens=encode_special)
    except checkpoint.LOADING as error:
        raise UserError(
            f"{path}: not a sentencepiece model ({first_line(error)}). GLM-4's tokenizer is another "
            "kind: use its '-hf' checkpoint, which transformers reads."
        ) from None


def _image_tokens(folder: str | Path, revision: str | None) -> int:
    """Return 20000 for the first release's vocabulary, whose text ids start after the image tokens, else 0."""
    values = read_values(folder, revision=revision)
    return 20000 if values.get("bos_token_id") == 150004 or values.get("vocab_size") == 150528 else 0


def _version(folder: str | Path, revision: str | None) -> int:
    """Tell ChatGLM3 from ChatGLM2, whose networks are the same, by what the checkpoint's own files say."""
    for name in ("tokenization_chatglm.py", "tokenizer_config.json"):
        path = find_file(folder, name, revision)
        if path is not None and "<|assistant|>" in path.read_text(encoding="utf-8"):
            return 3
    named = f"{read_values(folder, revision=revision).get('_name_or_path', '')} {folder}".lower()
    return 3 if "chatglm3" in named else 2
