"""Tiny random ChatGLM checkpoints in the original layout: config.json, safetensors and a sentencepiece tokenizer."""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceTrainer

from cmexam_tune.models.families.chatglm.configuration import ChatGLM2Config, ChatGLMConfig
from cmexam_tune.models.families.chatglm.modeling_v1 import ChatGLMForCausalLM
from cmexam_tune.models.families.chatglm.modeling_v2 import ChatGLM2ForCausalLM
from cmexam_tune.models.families.chatglm.tokenization import ChatGLM2Tokenizer, ChatGLMTokenizer

SPREAD = 0.15
"""Of the weights: with the usual 0.02 a random model's attention is too faint for a prefix to change anything."""

CLASSES = {
    "AutoConfig": "configuration_chatglm.ChatGLMConfig",
    "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
}


def build(
    folder: Path,
    texts: Iterable[str],
    *,
    version: int = 1,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 0,
    seed: int = 0,
) -> Path:
    """Write a tiny checkpoint that `load_model` and `load_tokenizer` read like a released one.

    Args:
        folder: to write into.
        texts: what the tokenizer is trained on.
        version: 1 (ChatGLM-6B), 2 or 3.
        hidden: width; a multiple of 16.
        layers: blocks.
        vocab: rows of the embedding, at least as many as the tokenizer has tokens.
        seed: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    heads = max(4, hidden // 64)
    if version == 1:
        _train(folder / "ice_text.model", texts, V1_SYMBOLS)
        config, fields = _first(folder, hidden, layers, vocab, heads)
        config.initializer_range = SPREAD
        ChatGLMForCausalLM(config).save_pretrained(folder)
    else:
        _train(folder / "tokenizer.model", texts, V2_SYMBOLS)
        config, fields = _second(folder, version, hidden=hidden, layers=layers, vocab=vocab, heads=heads)
        config.initializer_range = SPREAD
        ChatGLM2ForCausalLM(config).save_pretrained(folder)
    drop = (
        "initializer_range",
        "transformers_version",
        "dtype",
        "id2label",
        "label2id",
        "rope_interpolation",
        "tie_word_embeddings",
    )
    values = {key: value for key, value in config.to_diff_dict().items() if key not in drop}
    released = {"architectures": ["ChatGLMModel"], "auto_map": CLASSES, "model_type": "chatglm"}
    _write(folder / "config.json", {**values, **_fields(config), **released, "torch_dtype": "float32"})
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "ChatGLMTokenizer", **fields})
    return folder


def _first(folder: Path, hidden: int, layers: int, vocab: int, heads: int) -> tuple[Any, dict[str, Any]]:
    tokenizer = ChatGLMTokenizer(str(folder / "ice_text.model"))
    config = ChatGLMConfig(
        vocab_size=max(vocab, tokenizer.vocab_size),
        hidden_size=hidden,
        inner_hidden_size=4 * hidden,
        num_layers=layers,
        num_attention_heads=heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id,
        gmask_token_id=tokenizer.gmask_token_id,
    )
    return config, {"num_image_tokens": 0, "remove_space": False, "do_lower_case": False}


def _second(
    folder: Path, version: int, *, hidden: int, layers: int, vocab: int, heads: int
) -> tuple[Any, dict[str, Any]]:
    tokenizer = ChatGLM2Tokenizer(str(folder / "tokenizer.model"), glm_version=version)
    config = ChatGLM2Config(
        padded_vocab_size=max(vocab, tokenizer.vocab_size),
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        kv_channels=hidden // heads,
        multi_query_group_num=2,
        ffn_hidden_size=hidden * 8 // 3 // 16 * 16,
    )
    return config, {"glm_version": version, "remove_space": False, "do_lower_case": False}


def _fields(config: object) -> dict[str, object]:
    """Return what the originals' config.json always name, also where it is the default."""
    names = ["hidden_size", "num_layers", "num_attention_heads", "layernorm_epsilon", "eos_token_id", "pad_token_id"]
    if isinstance(config, ChatGLMConfig):
        names += ["inner_hidden_size", "max_sequence_length", "position_encoding_2d", "vocab_size", "bos_token_id"]
        names += ["mask_token_id", "gmask_token_id"]
    else:
        names += ["ffn_hidden_size", "seq_length", "kv_channels", "padded_vocab_size", "multi_query_group_num"]
        names += ["add_qkv_bias", "add_bias_linear", "multi_query_attention", "rmsnorm", "post_layer_norm"]
    return {name: getattr(config, name) for name in names}


V1_SYMBOLS = {
    "model_type": "unigram",
    "normalization_rule_name": "nmt_nfkc",
    "pad_id": 3,
    "pad_piece": "<pad>",
    "user_defined_symbols": ["<n>", "<|tab|>", *(f"<|blank_{k}|>" for k in range(2, 81))],
    "control_symbols": ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"],
}
V2_SYMBOLS = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def _train(path: Path, texts: Iterable[str], fields: dict[str, Any]) -> None:
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=_lines(texts),
        model_writer=model,
        vocab_size=3000,
        hard_vocab_limit=False,
        character_coverage=0.9999,
        byte_fallback=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        **{"pad_id": -1, **fields},
    )
    path.write_bytes(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield pieces of text short enough for the trainer, which skips long ones."""
    for text in texts:
        for line in text.splitlines():
            yield from (line[start : start + 500] for start in range(0, len(line), 500))


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
