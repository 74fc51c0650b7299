"""`section.key=value` on the command line, and the names that other tools have for a key."""

import sys
import typing
from collections.abc import Mapping
from typing import Any

from cmexam_tune.config.settings import SECTIONS, Config
from cmexam_tune.core import documents
from cmexam_tune.core.errors import ConfigError, DataError

# Names other tools have for the same setting: (section, name there) -> name here, in `section.key` form.
ALIASES: dict[tuple[str, str], str] = {
    ("data", "train_file"): "data.train", ("data", "data_path"): "data.train",
    ("data", "dataset"): "data.train", ("data", "validation_file"): "data.validation",
    ("data", "valid"): "data.validation", ("data", "val"): "data.validation",
    ("data", "valid_data_path"): "data.validation", ("data", "eval_dataset"): "data.validation",
    ("data", "test_file"): "data.test", ("data", "max_samples"): "data.max_train_samples",
    ("data", "preprocessing_num_workers"): "data.num_workers", ("prompt", "prompt_id"): "prompt.style",
    ("prompt", "prompt_template_name"): "prompt.template", ("prompt", "cutoff_len"): "prompt.max_source_length",
    ("model", "base_model"): "model.model_name_or_path", ("model", "path"): "model.model_name_or_path",
    ("model", "torch_dtype"): "model.dtype", ("model", "resume_from_checkpoint"): "model.adapter_name_or_path",
    ("tuning", "finetuning_type"): "tuning.method", ("tuning", "pre_seq_len"): "tuning.num_virtual_tokens",
    ("tuning", "lora_rank"): "tuning.r", ("tuning", "lora_r"): "tuning.r",
    ("tuning", "lora_target"): "tuning.target_modules",
    ("tuning", "lora_target_modules"): "tuning.target_modules",
    ("training", "evaluation_strategy"): "training.eval_strategy",
    ("training", "batch_size"): "training.global_batch_size",
    ("training", "micro_batch_size"): "training.per_device_train_batch_size",
    ("training", "num_epochs"): "training.num_train_epochs",
    ("training", "warmup_ratio"): "training.warmup_steps", ("training", "neat_packing"): "training.packing",
    ("training", "early_stopping_steps"): "training.early_stopping_patience",
}  # fmt: skip


def parse_override(text: str) -> dict[str, object]:
    """Return an override as the mapping that is merged into a config.

    Raises:
        ConfigError: no override, or a value that cannot be read.
    """
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: an override is section.key=value, for example training.learning_rate=2e-4.")
    # Python reads bytes of a command line that are not UTF-8 as lone surrogates, which no file could record.
    if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{text!a}: not UTF-8, which every setting is.")
    value = raw if _is_text(key, raw) else _parse_value(raw, key)
    nested: dict[str, Any] = {}
    *sections, last = key.split(".")
    inner = nested
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return rename_aliases(nested)


def _is_text(key: str, raw: str) -> bool:
    """Return whether a value is taken verbatim: paths hold `#`, `: ` and brackets, which mean something in YAML."""
    section, _, name = ALIASES.get((key.partition(".")[0], key.partition(".")[2]), key).partition(".")
    hint = str if key == "out" else typing.get_type_hints(SECTIONS.get(section, Config)).get(name)
    kinds = {hint} if typing.get_origin(hint) in (None, Mapping) else set(typing.get_args(hint))
    quoted = raw in ("", "null", "~") or raw[0] in "\"'" or (raw[0] == "[" and typing.get_origin(hint) is tuple)
    return str in kinds and not quoted


def _parse_value(raw: str, key: str) -> object:
    """Return a value as YAML reads it; what is not YAML (`a: b: c`) is the text that it looks like."""
    if len(raw) > documents.MAX_YAML:
        raise ConfigError(f"{key}: {len(raw):,} characters, at most {documents.MAX_YAML:,} are possible.")
    try:
        return documents.parse_yaml(raw, key) if raw else None
    except documents.Broken:
        return raw
    except DataError as error:
        raise ConfigError(str(error)) from None


def rename_aliases(values: dict[str, Any]) -> dict[str, object]:
    """Rename keys that are called as in another tool, with a note for each, and return `values`.

    Raises:
        ConfigError: a key is given under both names.
    """
    for section in [s for s in SECTIONS if isinstance(values.get(s), dict)]:
        for old in list(values[section]):
            if (new := ALIASES.get((section, old))) is None:
                continue
            name = new.partition(".")[2]
            # Neither wins silently: whoever gives both may mean either.
            if name in values[section]:
                raise ConfigError(f"{section}.{old} is another name for {new}, which is given too. Keep one.")
            sys.stderr.write(f"note: {section}.{old} is called {new} here\n")
            values[section][name] = values[section].pop(old)
    return values
