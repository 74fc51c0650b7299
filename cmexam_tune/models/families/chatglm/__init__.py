"""ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B and GLM-4 on current transformers, without remote code.

`load_model` and `load_tokenizer` are public; the rest is the family's part of training and prediction.
"""

# transformers annotates its base classes only in part.
# mypy: disable-error-code="no-untyped-call, misc, has-type, no-any-return"

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from cmexam_tune import prompts
from cmexam_tune.config import ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.models import attention, causal, checkpoint
from cmexam_tune.models.causal import Codec
from cmexam_tune.models.families import Loaded, llama
from cmexam_tune.models.families.chatglm import configuration, quantization
from cmexam_tune.models.families.chatglm.authors_prefix import attach_authors_prefix
from cmexam_tune.models.families.chatglm.configuration import (
    ChatGLM2Config,
    ChatGLMConfig,
    find_file,
    read_values,
)
from cmexam_tune.models.families.chatglm.modeling_v1 import ChatGLMForCausalLM
from cmexam_tune.models.families.chatglm.modeling_v2 import ChatGLM2ForCausalLM
from cmexam_tune.models.families.chatglm.tokenization import (
    ChatGLM2Tokenizer,
    ChatGLMTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
)
from cmexam_tune.models.features import Ids
from cmexam_tune.prompts import Dialogue

__all__ = ["ChatGLM", "load_model", "load_tokenizer"]


class ChatGLM(llama.Llama):
    """ChatGLM-6B to GLM-4: layouts, tokenizers and rounds of their own, everything else as any decoder."""

    lora_targets: ClassVar[tuple[str, ...]] = ("query_key_value",)
    prefix_shifts_positions: ClassVar[bool] = False
    takes_authors_prefix: ClassVar[bool] = True
    learns_by_trl = False
    runs_in_ollama: ClassVar[bool] = False
    reads_gguf: ClassVar[bool] = False
    engines_compute: ClassVar[bool] = False

    def open(self, model: ModelConfig, questions: Iterable[Question] | None, device: str) -> Loaded:
        """Load a ChatGLM, or a GLM-4 in transformers' own layout.

        `model.adapter_name_or_path` is a PEFT adapter, which is merged, or a P-tuning checkpoint of the ChatGLM
        authors, which is put in front (for prediction).

        Raises:
            UserError: the path does not exist, or holds another architecture or a damaged model.
        """
        if model.head is not None:
            raise ConfigError(f"model.head={model.head}: family {model.family} writes its answers and has no head.")
        source = checkpoint.Checkpoint(model)
        if source.raw_config.get("model_type") in ("glm", "glm4"):
            return super().open(model, questions, device)
        place = source.place
        decoder = read_model(source, device)
        tokenizer: PreTrainedTokenizerBase
        # GLM-4 in the remote-code layout brings no sentencepiece model.
        glm4 = find_file(place, "tokenizer.json", model.revision) is not None
        tokenizer = source.tokenizer() if glm4 else load_tokenizer(place, revision=model.revision)
        rows = int(decoder.config.vocab_size)
        if len(tokenizer) > rows:
            raise UserError(
                f"{place}: {len(tokenizer)} tokens, but {rows} embeddings: they belong to different releases."
            )
        if model.adapter_name_or_path is not None:
            if (Path(model.adapter_name_or_path).expanduser() / "adapter_config.json").is_file():
                # Beside an adapter `export` puts the release's own tokenizer, which AutoTokenizer takes for another.
                decoder, tokenizer = llama.merge_adapter(decoder, tokenizer, model, words=glm4)
            else:
                decoder = attach_authors_prefix(decoder, Path(model.adapter_name_or_path).expanduser())
        if isinstance(tokenizer, ChatGLM2Tokenizer):
            decoder.generation_config.eos_token_id = tokenizer.stop_ids
        decoder.config.use_cache = False
        decoder.generation_config.use_cache = True
        return Loaded(decoder, tokenizer)

    def codec(self, tokenizer: PreTrainedTokenizerBase, prompt: PromptConfig, model: ModelConfig) -> Codec:
        """Return how this release is asked: `auto` is its own rounds or roles; GLM-4 has a chat template."""
        if isinstance(tokenizer, ChatGLM2Tokenizer) and tokenizer.glm_version >= 3 and prompt.template == "auto":
            # ChatGLM3 opens its turn with an empty line of metadata, which it is trained to write.
            lead: Ids = tokenizer.text_ids(["\n"])[0]
            sources = functools.partial(_role_ids, tokenizer)
            return Codec(sources, functools.partial(_target_ids, tokenizer, lead), lead)
        if isinstance(tokenizer, ChatGLMTokenizer):
            return _rounds(tokenizer, prompt, "chatglm", lead=[int(tokenizer.bos_token_id)])
        if isinstance(tokenizer, ChatGLM2Tokenizer):
            return _rounds(tokenizer, prompt, "chatglm2", lead=[])
        return super().codec(tokenizer, prompt, model)

    def collate(self, loaded: Loaded, groups: Sequence[Sequence[Mapping[str, object]]]) -> dict[str, torch.Tensor]:
        """Return one batch: ChatGLM-6B's with the mask that its context needs, the others' as any decoder's."""
        prefix_lm = isinstance(loaded.model.config, ChatGLMConfig)
        return causal.collate(loaded, groups) if prefix_lm else super().collate(loaded, groups)

    def whole_formats(self, model: ModelConfig) -> tuple[Literal["hf", "released"], ...]:
        """Return `hf`, which here is the authors' layout."""
        return ("hf",)


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
    loaded = read_model(checkpoint.Checkpoint(model))
    if prefix is not None:
        loaded = attach_authors_prefix(loaded, prefix)
    return loaded.eval()


def read_model(source: checkpoint.Checkpoint, device: str = "cpu") -> PreTrainedModel:
    """Load the network of a checkpoint, without adapters; see `Checkpoint.weights`.

    Raises:
        UserError: as `load_model`.
        ConfigError: `model.config` names something that this config does not have, or 4 bits cannot be made of it.
    """
    model, kind = source.model, source.raw_config.get("model_type")
    if kind != "chatglm":
        raise UserError(f"{model.model_name_or_path}: is a {kind!r} model, not a ChatGLM. Set model.family.")
    # The file itself once more: in `raw_config` transformers has put the folder in place of `_name_or_path`, and that
    # name tells ChatGLM2-32K from ChatGLM3.
    values = read_values(source.place, revision=model.revision)
    config = configuration.from_values(values, model.model_name_or_path)
    checkpoint.change(config, model)
    cls = ChatGLMForCausalLM if isinstance(config, ChatGLMConfig) else ChatGLM2ForCausalLM
    usual_files = not config.quantization_bit and quantization.has_usual_files(source.place, model.revision)
    if model.load_in_4bit and not (usual_files and cls is ChatGLM2ForCausalLM):
        raise ConfigError(
            f"model.load_in_4bit: {model.model_name_or_path} has no weights of 4 bits here; leave it out. They can be "
            "made of ChatGLM2, ChatGLM3 and GLM-4, from a release that is not quantised itself."
        )
    if usual_files or device == "meta":
        config.quantization_bit = 0
        return source.weights(cls, config, device)
    return _from_state(cls, source, config, device)


def _from_state(
    cls: type[PreTrainedModel], source: checkpoint.Checkpoint, config: ChatGLMConfig | ChatGLM2Config, device: str
) -> PreTrainedModel:
    """Return the network with weights that transformers does not find or understand by itself: packed, or renamed."""
    model, place, dtype = source.model, source.place, checkpoint.dtype(source.model)
    # ZeRO-3 takes the values from the first process; the others need names and shapes only.
    target = "meta" if is_deepspeed_zero3_enabled() and torch.distributed.get_rank() else device
    try:
        state = quantization.read_state(place, config.quantization_bit, dtype, model.revision, target)
        config.quantization_bit = 0
        loaded, info = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True,
            attn_implementation=attention.suited(model.attn_implementation),
            device_map=None if device == "cpu" else {"": device},
        )  # fmt: skip
    except UserError:
        raise
    except checkpoint.LOADING as error:
        raise checkpoint.unloadable(place, error) from None
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"{place}: {len(missing)} weights are not in the checkpoint, the first is {missing[0]}.")
    loaded.config.name_or_path = place
    result: PreTrainedModel = loaded
    return result


def _rounds(tokenizer: SentencePieceTokenizer, prompt: PromptConfig, default: str, lead: Ids) -> Codec:
    """Return the codec of a wrapper of text, the release's `own` unless the prompt names another."""
    template = prompts.template(default if prompt.template == "auto" else prompt.template)

    def sources(dialogues: Sequence[Dialogue]) -> list[Ids]:
        rows = tokenizer.text_ids([template.render(dialogue) for dialogue in dialogues])
        # `lead` stands in front of the completion.
        return [row[: len(row) - len(lead)] for row in map(tokenizer.build_inputs_with_special_tokens, rows)]

    targets = functools.partial(_target_ids, tokenizer, lead)
    return Codec(sources, targets, lead, stop=template.stop, template=template)


def _role_ids(tokenizer: ChatGLM2Tokenizer, dialogues: Sequence[Dialogue]) -> list[Ids]:
    """Return ChatGLM3's messages as ids: role token, a line of metadata, content."""
    rows = []
    for dialogue in dialogues:
        messages = [tokenizer.build_single_message(m["role"], "", m["content"]) for m in dialogue.messages()]
        ids = [token for message in messages for token in message] + [tokenizer.special_ids["<|assistant|>"]]
        rows.append(tokenizer.build_inputs_with_special_tokens(ids))
    return rows


def _target_ids(tokenizer: SentencePieceTokenizer, lead: Ids, texts: Sequence[str]) -> list[Ids]:
    return [[*lead, *row, int(tokenizer.eos_token_id)] for row in tokenizer.text_ids(texts)]
