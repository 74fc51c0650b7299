"""Decoders laid out like LLaMA: what transformers loads by itself (LLaMA, Alpaca, Vicuna, Huatuo, Qwen, GLM-4, ...)."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils.generic import is_flash_attention_requested

from cmexam_tune import prompts
from cmexam_tune.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError, UserError, first_line
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import THINK
from cmexam_tune.models import (
    causal,
    checkpoint,
    checkpoint_validation,
    layouts,
    released,
)
from cmexam_tune.models.causal import Codec
from cmexam_tune.models.completion import TextEngine
from cmexam_tune.models.engines import ElsewhereModel, ServedModel
from cmexam_tune.models.families import Loaded, Writer
from cmexam_tune.models.features import Encoded, Ids
from cmexam_tune.models.generation.decoder import Decoder
from cmexam_tune.prompts import ChatTemplate, Dialogue


class Llama(Writer):
    """Every decoder that transformers loads by itself; a family of dialogue models overrides `codec` only."""

    lora_targets: ClassVar[tuple[str, ...]] = ("q_proj", "v_proj")
    loads_in_4bit: ClassVar[bool] = True
    reads_gguf: ClassVar[bool] = True
    runs_in_ollama: ClassVar[bool] = True
    learns_by_trl: ClassVar[bool] = True
    engines_compute: ClassVar[bool] = True

    def open(self, model: ModelConfig, questions: Iterable[Question] | None, device: str) -> Loaded:
        """Load a decoder; an adapter in `model.adapter_name_or_path` is merged into it.

        Raises:
            UserError: the path does not exist, or holds an encoder, an encoder-decoder or a damaged model.
        """
        if model.head is not None:
            raise ConfigError(f"model.head={model.head}: family {model.family} writes its answers and has no head.")
        source = checkpoint.Checkpoint(model)
        config = source.config()
        kind, name = config.model_type, model.model_name_or_path
        if config.is_encoder_decoder:
            raise UserError(f"{name}: is an encoder-decoder ({kind}); family llama needs a decoder.")
        if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
            raise UserError(f"{name}: is an encoder ({kind}). Set model.family=bert, or name a decoder.")
        generates = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in released.KINDS
        if not generates and not model.trust_remote_code:
            raise UserError(f"{name}: transformers has no text-generating model for type {kind!r}.")
        decoder = source.weights(AutoModelForCausalLM, config, device)
        tokenizer = source.tokenizer()
        if model.adapter_name_or_path is not None:
            decoder, tokenizer = merge_adapter(decoder, tokenizer, model)
        if tokenizer.eos_token_id is None:
            raise UserError(f"{name}: its tokenizer has no EOS token, so answers would never end. Set eos_token in it.")
        # With a cache transformers does not look for packed rows; generate asks for one by its own config.
        decoder.config.use_cache = False
        decoder.generation_config.use_cache = True
        return Loaded(decoder, tokenizer)

    def codec(self, tokenizer: PreTrainedTokenizerBase, prompt: PromptConfig, model: ModelConfig) -> Codec:
        """Return how a model is asked: `auto` is its tokenizer's chat template if there is one, else no wrapper."""
        template = chat_template(tokenizer, prompt, model)
        # A published wrapper does not write BOS; the tokenizer puts it in front, as in the authors' scripts.
        ids = functools.partial(text_ids if template.is_models_own else source_ids, tokenizer)
        return Codec(
            functools.partial(role_ids, tokenizer, template)
            if isinstance(tokenizer, released.RoleTokenizer)
            else lambda dialogues: ids([template.render(dialogue) for dialogue in dialogues]),
            functools.partial(target_ids, tokenizer),
            stop=template.stop,
            # The template opens the model's thinking, so that its output only closes it.
            thinks=template.is_models_own and template.render(Dialogue("?")).rstrip().endswith(THINK),
            template=template,
        )

    def encode(
        self, loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig
    ) -> Encoded:
        """Return training rows; see `causal.encode`."""
        return causal.encode(self.codec(loaded.tokenizer, prompt, model), questions, prompt)

    def collate(self, loaded: Loaded, groups: Sequence[Sequence[Mapping[str, object]]]) -> dict[str, torch.Tensor]:
        """Return one batch; see `causal.collate`.

        Without `attention_mask`: padding is on the right, where causal attention never looks, and carries no label.
        With a mask transformers leaves the fast causal kernels and repeats the key and value heads.

        For FlashAttention everything becomes one row [1, tokens] without padding, with the places where questions begin
        and the length of the longest: transformers then runs the kernel for rows of different lengths. It would look
        for them in `position_ids`, too, but in every layer, and wait for the card each time.
        """
        if not is_flash_attention_requested(loaded.model.config):
            batch = causal.collate(loaded, groups)
            batch.pop("attention_mask", None)
            return batch
        rows = [row for group in groups for row in group]
        batch = causal.collate(loaded, [rows])
        batch.pop("attention_mask", None)
        return batch | causal.bounds(rows)

    def whole_formats(self, model: ModelConfig) -> tuple[Literal["hf", "released"], ...]:
        """Return transformers' layout where it has a class for the model, and that of the release if it is another."""
        return released.whole_formats(checkpoint.Checkpoint(model).config())

    def engine(self, loaded: Loaded, config: Config) -> TextEngine:
        """Return the engine that generates text with the model, in this process or at a server."""
        codec = self.codec(loaded.tokenizer, config.prompt, config.model)
        elsewhere: Any = loaded.model
        return (ServedModel if isinstance(elsewhere, ElsewhereModel) else Decoder)(codec, loaded, config)


def merge_adapter(
    decoder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, words: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Merge the PEFT adapter `model.adapter_name_or_path` into a decoder.

    An adapter that brings a tokenizer with more words (Chinese-Alpaca) replaces the base's, if `words`.

    Raises:
        UserError: no adapter there, or one that does not fit this model.
    """
    folder = str(Path(model.adapter_name_or_path or "").expanduser())
    path = Path(folder)
    embeddings: Any = decoder.get_input_embeddings()
    # A name on the hub has exactly one slash; whatever else is no folder cannot be fetched.
    if (path.is_dir() or folder.count("/") != 1) and not (path / "adapter_config.json").is_file():
        raise UserError(f"model.adapter_name_or_path={folder}: holds no adapter_config.json, so it is no PEFT adapter.")
    if path.is_dir():
        checkpoint_validation.check(path)
    if words and path.is_dir() and any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
        tokenizer = checkpoint.read_tokenizer(folder, model)
        if len(tokenizer) > embeddings.num_embeddings:
            decoder.resize_token_embeddings(len(tokenizer))
    try:
        merged: PreTrainedModel = layouts.open_lora(decoder, folder).merge_and_unload(safe_merge=True)
    except checkpoint.LOADING as error:
        raise UserError(
            f"model.adapter_name_or_path={folder}: cannot be merged into {model.model_name_or_path} "
            f"({first_line(error)})."
        ) from None
    return merged, tokenizer


def chat_template(tokenizer: PreTrainedTokenizerBase, prompt: PromptConfig, model: ModelConfig) -> ChatTemplate:
    """Return the chat template in force, with the recipe's arguments for it.

    Raises:
        ConfigError: an unknown wrapper, or arguments for a template that is not the model's own.
    """
    if prompt.template == "auto" and tokenizer.chat_template:
        arguments = {"tokenize": False, "add_generation_prompt": True, **model.chat_template_kwargs}
        apply: Any = tokenizer.apply_chat_template
        return ChatTemplate("auto", lambda messages, num_examples: str(apply(messages, **arguments)))
    if model.chat_template_kwargs:
        raise ConfigError(
            f"model.chat_template_kwargs: {model.model_name_or_path} has no chat template, or prompt.template="
            f"{prompt.template} replaces it. Leave them out."
        )
    return prompts.template("none" if prompt.template == "auto" else prompt.template)


def role_ids(tokenizer: released.RoleTokenizer, template: ChatTemplate, dialogues: Sequence[Dialogue]) -> list[Ids]:
    """Return dialogues as ids in which only the template writes special tokens: those that somebody typed stay text."""
    front: Ids = [] if template.is_models_own else source_ids(tokenizer, [""])[0]
    rendered = [template.render(dialogue.with_texts(tokenizer.broken)) for dialogue in dialogues]
    return [front + tokenizer.prompt_ids(text) for text in rendered]


def text_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Return texts as ids, with no special tokens but those written in them."""
    rows: list[Ids] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return rows


def source_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Return prompts as ids, with what the tokenizer puts in front and without EOS."""
    rows: list[Ids] = tokenizer(list(texts))["input_ids"]
    # A tokenizer saved with `add_eos_token` would end the prompt before its answer.
    return [row[:-1] if row and row[-1] == tokenizer.eos_token_id else row for row in rows]


def target_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Return completions as ids with EOS, tokenised apart from the prompt so that no token spans the boundary."""
    return [[*row, int(tokenizer.eos_token_id)] for row in text_ids(tokenizer, texts)]
