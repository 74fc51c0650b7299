"""One experiment is one YAML file: sections data, prompt, model, tuning, training, generation and the key out.

Read strictly: every problem at once, with 'did you mean'; names of other tools are accepted as aliases with a note.
Numbers live in the recipes.
"""

import dataclasses
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cmexam_tune.core import documents, variants
from cmexam_tune.core.config import external
from cmexam_tune.core.config.sections import (
    SECTIONS,
    Config,
    DataConfig,
    GenerationConfig,
    ModelConfig,
    PromptConfig,
    TrainingConfig,
    TuningConfig,
)
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.strict import Problems, build, convert

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


_CLASSES = {
    "data": DataConfig, "prompt": PromptConfig, "model": ModelConfig, "tuning": TuningConfig,
    "training": TrainingConfig, "generation": GenerationConfig,
}  # fmt: skip


def recipe_folders() -> list[Path]:
    """Return where recipes lie: in the checkout, and in the wheel."""
    package = Path(__file__).resolve().parents[2]
    return [folder for folder in (package.parent / "recipes", package / "recipes") if folder.is_dir()]


def find_recipe(name: str | Path) -> Path:
    """Return the YAML file called `name`: a path, else in the checkout's recipes/, else among the shipped recipes.

    Raises:
        ConfigError: there is none; the message names the places and the nearest recipe.
    """
    folders = recipe_folders()
    for candidate in (Path(name), *(folder / name for folder in folders)):
        for path in (candidate, candidate.with_name(candidate.name + ".yaml")):
            if path.is_file():
                return path
    known = sorted({path.name for folder in folders for path in folder.glob("*.yaml")})
    raise ConfigError(
        f"{name}: no such config{variants.suggest(str(name), known)}. Shipped recipes: {', '.join(known)}."
    )


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe by path or name, apply `section.key=value` overrides, and resolve it.

    Raises:
        ConfigError: every problem that was found, one a line.
    """
    path = find_recipe(name)
    values = read_yaml(path)
    changes = [_parse_override(override) for override in overrides]
    _check_trust(path, values, changes)
    for change in changes:
        _own_words(change, path)
        merge(values, change)
    return parse_config(values, str(path))


def _own_words(values: dict[str, Any], path: Path) -> None:
    """Put the words of `prompt.file` into `prompt`, so that they are recorded with the run."""
    prompt = values.get("prompt")
    if not isinstance(prompt, dict) or (name := prompt.pop("file", None)) is None:
        return
    beside = path.parent / str(name)
    file = beside if beside.is_file() else Path(str(name))
    if not file.is_file():
        raise ConfigError(f"{path}: prompt.file: {name}: no such file, neither beside the recipe nor in {Path.cwd()}.")
    texts = read_mapping(file)
    if not texts or {*texts} - {"ask", "write"} or not all(isinstance(text, str) for text in texts.values()):
        raise ConfigError(
            f"{file}: a prompt file holds the texts `ask` and `write`, found {', '.join(texts) or 'none'}."
        )
    values["prompt"] = {**texts, **prompt}


def _check_trust(path: Path, values: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Import the modules that the command names; refuse a file that asks for a checkpoint's own code by itself."""
    sections = [change[name] for change in changes for name in change if isinstance(change[name], Mapping)]
    for name in [section.get(key) for section in sections for key in ("family", "method")]:
        if isinstance(name, str) and "." in name:
            variants.import_outside(name)
    model = values.get("model")
    asks = isinstance(model, Mapping) and model.get("trust_remote_code")
    if asks and not any("trust_remote_code" in section for section in sections):
        raise ConfigError(
            f"{path}: model.trust_remote_code: a file cannot ask for the Python code of a checkpoint to be run. If you "
            "trust its author, add model.trust_remote_code=true to the command."
        )


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML file and everything it `extends`, nearest last."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: extends itself by way of {', '.join(str(p.name) for p in seen)}.")
    values = read_mapping(path)
    _own_words(values, path)
    parent = values.pop("extends", None)
    if parent is None:
        return _rename_aliases(values)
    beside = path.parent / str(parent)
    base = read_yaml(beside if beside.is_file() else find_recipe(str(parent)), (*seen, path))
    return merge(base, _rename_aliases(values))


def read_mapping(path: Path) -> dict[str, Any]:
    """Read one YAML file that holds keys."""
    try:
        values = documents.read_yaml(path, "config")
    except UserError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections ({', '.join(SECTIONS)}), found {type(values).__name__}.")
    return values


def merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put `changes` into `base` by section and return `base`; a new tuning method drops the old one's keys."""
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            if key == "tuning" and value.get("method", old.get("method")) != old.get("method"):
                old.clear()
            merge(old, value)
        else:
            base[key] = value
    return base


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: an override is section.key=value, for example training.learning_rate=2e-4.")
    value = raw if _is_text(key, raw) else _parse_value(raw, key)
    nested: dict[str, Any] = {}
    *sections, last = key.split(".")
    inner = nested
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    return _rename_aliases(nested)


def _is_text(key: str, raw: str) -> bool:
    """Whether a value is taken letter by letter: paths hold `#`, `: ` and brackets, which mean something in YAML."""
    section, _, name = ALIASES.get((key.partition(".")[0], key.partition(".")[2]), key).partition(".")
    hint = str if key == "out" else typing.get_type_hints(_CLASSES.get(section, Config)).get(name)
    kinds = {hint, *(typing.get_args(hint) if typing.get_origin(hint) is not Mapping else ())}
    quoted = raw in ("", "null", "~") or raw[0] in "\"'" or (raw[0] == "[" and typing.get_origin(hint) is tuple)
    return str in kinds and typing.get_origin(hint) is not Mapping and not quoted


def _parse_value(raw: str, key: str) -> Any:
    if len(raw) > documents.MAX_YAML:
        raise ConfigError(f"{key}: {len(raw):,} characters, at most {documents.MAX_YAML:,} are possible.")
    try:
        return documents.parse_yaml(raw, key) if raw else None
    except documents.Broken:
        return raw
    except DataError as error:
        raise ConfigError(str(error)) from None


def _rename_aliases(values: dict[str, Any]) -> dict[str, Any]:
    for section in [s for s in SECTIONS if isinstance(values.get(s), dict)]:
        for old in list(values[section]):
            if (new := ALIASES.get((section, old))) is None:
                continue
            name = new.partition(".")[2]
            if name in values[section]:
                raise ConfigError(f"{section}.{old} is another name for {new}, which is given too. Keep one.")
            sys.stderr.write(f"note: {section}.{old} is called {new} here\n")
            values[section][name] = values[section].pop(old)
    return values


def parse_config(values: Mapping[str, Any], source: str = "config") -> Config:
    """Resolve a plain mapping into a `Config`.

    Raises:
        ConfigError: every problem that was found, one a line.
    """
    problems = Problems()
    values = {section: {}, **values} if (section := "generation") not in values else dict(values)
    for key in values:
        if key not in (*SECTIONS, "out"):
            problems.add(str(key), f"unknown section{variants.suggest(str(key), (*SECTIONS, 'out'))}")
    for section in SECTIONS:
        if not isinstance(values.get(section, {}), Mapping):
            problems.add(section, f"expected a section with keys, got {values[section]!r}")
    if not problems:
        ready = dict(values)
        ready["tuning"] = _tuning(values.get("tuning", {}), problems)
        ready["training"] = _split(
            TrainingConfig, values.get("training", {}), external.training(), "training", problems
        )
        ready["generation"] = _split(
            GenerationConfig, values["generation"], external.generation(), "generation", problems
        )
        if isinstance(values.get("prompt"), Mapping) and isinstance(values["prompt"].get("style"), int):
            ready["prompt"] = {**values["prompt"], "style": str(values["prompt"]["style"])}
        typed = _assemble(ready, problems)
        if typed is not None and not problems:
            return typed
    raise ConfigError(
        "\n".join([f"{source} cannot be used:", *(f"  - {problem}" for problem in dict.fromkeys(problems))])
    )


def _assemble(ready: Mapping[str, Any], problems: Problems) -> Config | None:
    own = ("data", "prompt", "model")
    built = {name: build(_CLASSES[name], ready.get(name, {}), name, problems) for name in own}
    out = ready.get("out")
    if not isinstance(out, str) or not out:
        problems.add("out", "required key is missing: the run folder, for example out=runs/my_run")
        return None
    if built["model"] is not None and built["model"].family:
        _check_variant("families", built["model"].family, "model.family", problems)
    return Config(**built, tuning=ready["tuning"], training=ready["training"], generation=ready["generation"], out=out)


def _check_variant(folder: variants.Folder, name: str, key: str, problems: Problems) -> bool:
    if wrong := variants.problem(folder, name):
        problems.add(key, wrong)
    return wrong is None


def _tuning(values: Mapping[str, Any], problems: Problems) -> TuningConfig | None:
    method = values.get("method")
    if not isinstance(method, str):
        problems.add("tuning.method", f"required key is missing; known: {', '.join(variants.names('tuning'))}")
        return None
    if not _check_variant("tuning", method, "tuning.method", problems):
        return None
    settings = {key: value for key, value in values.items() if key != "method"}
    return TuningConfig(method, build(variants.load("tuning", method).Settings, settings, "tuning", problems))


def _split(cls: type, values: Mapping[str, Any], library: Mapping[str, Any], where: str, problems: Problems) -> Any:
    """Build `cls` from its own keys and put the rest, checked against the `library`'s, into its `arguments`."""
    own = {f.name for f in dataclasses.fields(cls)} - {"arguments"}
    arguments = {key: value for key, value in values.items() if key not in own}
    for key, value in arguments.items():
        if key not in library:
            problems.add(f"{where}.{key}", f"unknown key{variants.suggest(str(key), {*own, *library})}")
        elif key.endswith("_strategy") and value is False:
            arguments[key] = "no"  # what YAML makes of a bare `no`
        else:
            convert(library[key], value, f"{where}.{key}", problems)
    return build(cls, {**{k: v for k, v in values.items() if k in own}, "arguments": arguments}, where, problems)


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.to_dict(), allow_unicode=True, sort_keys=False)
