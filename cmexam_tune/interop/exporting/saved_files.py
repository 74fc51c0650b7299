"""What an export holds beside the weights: its tokenizer with a chat template, and settings where older tools look."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune.config import Config
from cmexam_tune.core import documents
from cmexam_tune.models import families
from cmexam_tune.models.causal import Codec
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.families.llama import source_ids
from cmexam_tune.prompts import Dialogue, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBES = (
    Dialogue("下列药物中属于β受体阻断药的是\nA 普萘洛尔"),
    Dialogue("Which?", (Message("user", "你好\n"), Message("assistant", " 您好 "))),
)
"""Conversations that a chat template must write as they are written in training."""


def prompt_codec(config: Config, loaded: Loaded) -> Codec | None:
    """Return how a run's model is asked; None: it writes no text."""
    family = Family.named(config.model.family)
    if not isinstance(family, families.Writer):
        return None
    decoder: Any = family.engine(loaded, config)
    codec: Codec = decoder.codec
    return codec


def save_tokenizer(config: Config, loaded: Loaded, out: Path) -> None:
    """Save a model's tokenizer; one without a chat template gets one that writes the prompt of training."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        tokenizer.chat_template = chat_template(config, loaded)
    tokenizer.save_pretrained(out)


def chat_template(config: Config, loaded: Loaded) -> str | None:
    """Return the wrapper of a training prompt as Jinja.

    None: a model that writes no text, or whose tokenizer does not make the same tokens of what the template writes.
    """
    codec, tokenizer = prompt_codec(config, loaded), loaded.tokenizer
    if codec is None or codec.template is None:
        return None
    source = codec.template.for_tokenizer(config.prompt.system, prefix(tokenizer))
    for probe in PROBES:
        (ids,) = codec.sources([probe._replace(system=config.prompt.system)])
        text = tokenizer.apply_chat_template(probe.messages(), chat_template=source, tokenize=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != [*ids, *codec.lead]:
            return None
    return source


def prefix(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the special tokens that a tokenizer puts before every text."""
    (ids,) = source_ids(tokenizer, [""])
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def add_older_names(folder: Path) -> None:
    """Write RoPE and chat template also where tools look that do not know the files of transformers 5.

    Ollama reads `rope_theta` and `rope_scaling` of config.json and `chat_template` of tokenizer_config.json, and goes
    on with a wrong base or without a template where they are missing. transformers takes its own names first, or reads
    the same from both.
    """
    _amend(folder / "config.json", _older_rope)
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8")
        _amend(folder / "tokenizer_config.json", lambda values: {"chat_template": text})


def _amend(path: Path, amendment: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    values = documents.read_json(path)
    text = json.dumps({**values, **amendment(values)}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _older_rope(config: dict[str, Any]) -> dict[str, object]:
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:  # no rotary positions, or others in each layer, which had no older form
        return {}
    older = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") == "default":
        return older
    # transformers takes `rope_scaling` before `rope_parameters`: it has to say all.
    return {**older, "rope_scaling": {**rope, "type": rope["rope_type"]}}
