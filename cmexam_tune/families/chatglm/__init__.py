"""ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B and GLM-4 on current transformers, without remote code.

`load_model` and `load_tokenizer` are public; the rest is the family's part of training and prediction.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from cmexam_tune import prompts
from cmexam_tune.core.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.families import Loaded, llama
from cmexam_tune.families.chatglm.configuration import find_file
from cmexam_tune.families.chatglm.loading import load_model, load_tokenizer, read_model
from cmexam_tune.families.chatglm.prefix import attach_authors_prefix
from cmexam_tune.families.chatglm.tokenization import ChatGLM2Tokenizer, ChatGLMTokenizer
from cmexam_tune.models import causal, checkpoint, decode
from cmexam_tune.models.features import Encoded, Ids

__all__ = ["answer", "collate", "encode", "load", "load_model", "load_tokenizer"]

task: Literal["generate"] = "generate"
lora_targets: tuple[str, ...] = ("query_key_value",)
prefix_shifts_positions = False


def load(model: ModelConfig, questions: Sequence[Question] | None = None) -> Loaded:
    """Load a ChatGLM, or a GLM-4 in transformers' own layout.

    `model.adapter_name_or_path` is a PEFT adapter, which is merged, or a P-tuning checkpoint of the ChatGLM authors,
    which is put in front (for prediction).

    Raises:
        UserError: the path does not exist, or holds another architecture or a damaged model.
    """
    if model.head is not None:
        raise ConfigError(f"model.head={model.head}: family {model.family} writes its answers and has no head.")
    kind = checkpoint.raw_config(model).get("model_type")
    if kind in ("glm", "glm4"):
        return llama.load(model, questions)
    place = checkpoint.location(model)
    decoder = read_model(model)
    tokenizer: PreTrainedTokenizerBase
    # GLM-4 in the remote-code layout brings no sentencepiece model.
    glm4 = find_file(place, "tokenizer.json", model.revision) is not None
    tokenizer = checkpoint.read_tokenizer(model) if glm4 else load_tokenizer(place, revision=model.revision)
    rows = int(decoder.config.vocab_size)
    if len(tokenizer) > rows:
        raise UserError(f"{place}: {len(tokenizer)} tokens, but {rows} embeddings: they belong to different releases.")
    if model.adapter_name_or_path is not None:
        if (Path(model.adapter_name_or_path).expanduser() / "adapter_config.json").is_file():
            decoder, tokenizer = llama.merge_adapter(decoder, tokenizer, model)
        else:
            decoder = attach_authors_prefix(decoder, Path(model.adapter_name_or_path).expanduser())
    if isinstance(tokenizer, ChatGLM2Tokenizer):
        decoder.generation_config.eos_token_id = tokenizer.stop_ids
    decoder.config.use_cache = False
    decoder.generation_config.use_cache = True
    return Loaded(decoder, tokenizer)


def codec(tokenizer: PreTrainedTokenizerBase, prompt: PromptConfig) -> causal.Codec:
    """Return how this release writes prompts and completions; GLM-4 has a chat template and needs nothing of it."""
    if isinstance(tokenizer, ChatGLMTokenizer):
        first: Ids = [int(tokenizer.bos_token_id)]
        return causal.Codec(_source_v1, lambda tok, texts: _target(tok, texts, first), lambda tok: first)
    if isinstance(tokenizer, ChatGLM2Tokenizer):
        # ChatGLM3 opens its turn with an empty line of metadata, which it is trained to write.
        lead: Ids = tokenizer.text_ids(["\n"])[0] if _is_chat(tokenizer, prompt) else []
        return causal.Codec(_source_v2, lambda tok, texts: _target(tok, texts, lead), lambda tok: lead)
    return llama.codec


def _is_chat(tokenizer: ChatGLM2Tokenizer, prompt: PromptConfig) -> bool:
    return tokenizer.glm_version >= 3 and prompt.template == "auto"


def _source_v1(tokenizer: Any, texts: list[str], prompt: PromptConfig) -> list[Ids]:
    name = "chatglm" if prompt.template == "auto" else prompt.template
    rows = tokenizer.text_ids([prompts.wrap(text, name, prompt.system) for text in texts])
    return [[*row, tokenizer.gmask_token_id] for row in rows]


def _source_v2(tokenizer: Any, texts: list[str], prompt: PromptConfig) -> list[Ids]:
    if not _is_chat(tokenizer, prompt):
        name = "chatglm2" if prompt.template == "auto" else prompt.template
        rows = tokenizer.text_ids([prompts.wrap(text, name, prompt.system) for text in texts])
        return [tokenizer.build_inputs_with_special_tokens(row) for row in rows]
    system = tokenizer.build_single_message("system", "", prompt.system) if prompt.system else []
    special, line = tokenizer.special_ids, tokenizer.text_ids(["\n"])[0]
    return [
        tokenizer.build_inputs_with_special_tokens(
            [*system, special["<|user|>"], *line, *row, special["<|assistant|>"]]
        )
        for row in tokenizer.text_ids(texts)
    ]


def _target(tokenizer: Any, texts: list[str], lead: Ids) -> list[Ids]:
    return [[*lead, *row, int(tokenizer.eos_token_id)] for row in tokenizer.text_ids(texts)]


def encode(loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig) -> Encoded:
    """Return training rows in the originals' layouts; see `causal.encode`."""
    return causal.encode(codec(loaded.tokenizer, prompt), loaded, questions, prompt)


def collate(loaded: Loaded, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return one batch; see `causal.collate`."""
    return causal.collate(loaded, groups)


def answer(loaded: Loaded, questions: Sequence[Question], config: Config) -> Iterator[Prediction]:
    """Yield one prediction for each question; see `decode.answer`."""
    return decode.answer(codec(loaded.tokenizer, config.prompt), loaded, questions, config)
