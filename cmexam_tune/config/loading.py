"""One experiment is one YAML file: sections data, prompt, model, tuning, training, generation and the key out.

Read strictly: every problem at once, with 'did you mean'; names of other tools are accepted as aliases with a note.
Numbers live in the recipes.
"""

import contextlib
import dataclasses
import difflib
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cmexam_tune.config import installed_versions, ranges, words
from cmexam_tune.config.overrides import parse_override, rename_aliases
from cmexam_tune.config.schema import (
    CLASSES,
    SECTIONS,
    Config,
    GenerationConfig,
    TrainingConfig,
    TuningConfig,
)
from cmexam_tune.core import documents, variants
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.strict import Problems, build, convert

_PUBLISH = "what is trained to be published. If you want that, add"
COMMAND_ONLY = {
    "model.trust_remote_code": "the Python code of a checkpoint to be run. If you trust its author, add",
    "training.push_to_hub": _PUBLISH,
    "training.hub_model_id": _PUBLISH,
    "training.hub_token": _PUBLISH,
}
"""Settings that count only where the command says so too, and what they do."""
LAYOUTS = {
    "llama": ("qwen", "alpaca", "vicuna", "huatuo", "huatuogpt", "baichuan", "internlm", "glm", "mistral", "yi",
              "deepseek", "gemma", "medalpaca", "bentsao", "gpt"),
    "bert": ("roberta", "macbert", "ernie", "electra", "deberta"),
}  # fmt: skip
"""Names that people try as `model.family`, and the family that they are laid out like."""


def recipe_folders() -> list[Path]:
    """Return where recipes are: in the checkout, and in the wheel."""
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package.parent / "recipes", package / "recipes") if folder.is_dir()]


def find_recipe(name: str | Path) -> Path:
    """Return the YAML file called `name`: a path, else in the checkout's recipes/, else among the shipped recipes.

    Raises:
        ConfigError: there is none; the message names the places and the nearest recipe.
    """
    folders = recipe_folders()
    for candidate in (str(name), *(str(folder / name) for folder in folders)):
        for path in (Path(candidate), Path(f"{candidate}.yaml")):
            with contextlib.suppress(OSError, ValueError):  # too long, or a NUL character
                if path.is_file():
                    return path
    known = sorted({path.name for folder in folders for path in folder.glob("*.yaml")})
    near = difflib.get_close_matches(str(name), known, n=5, cutoff=0.5)
    like = f", did you mean {near[0]!r}? Like it: {', '.join(near[1:])}" if near else ""
    raise ConfigError(
        f"{reprlib.repr(str(name))[1:-1]}: no such config, neither a file nor one of {len(known)} shipped recipes"
        f"{like}. All of them: recipes/README.md."
    )


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe by path or name, apply `section.key=value` overrides, and resolve it.

    Raises:
        ConfigError: every problem that was found, one a line.
    """
    path = find_recipe(name)
    values = read_yaml(path)
    changes = [parse_override(override) for override in overrides]
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
    values["prompt"] = {**words.read_file(file), **prompt}


def _check_trust(path: Path, values: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Import the modules that the command names; refuse a file that asks for a checkpoint's own code by itself."""
    sections = [change[name] for change in changes for name in change if isinstance(change[name], Mapping)]
    for name in [section.get(key) for section in sections for key in ("family", "method")]:
        if isinstance(name, str) and "." in name:
            variants.import_outside(name)
    for key, what in COMMAND_ONLY.items():
        name, _, field = key.partition(".")
        section = values.get(name)
        if isinstance(section, Mapping) and section.get(field) and not any(field in change for change in sections):
            value = "true" if section[field] is True else "..."
            raise ConfigError(f"{path}: {key}: a file cannot ask for {what} {key}={value} to the command.")


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML file and everything it `extends`, nearest last."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: extends itself by way of {', '.join(str(p.name) for p in seen)}.")
    values = read_mapping(path)
    _own_words(values, path)
    parent = values.pop("extends", None)
    if parent is None:
        return rename_aliases(values)
    beside = path.parent / str(parent)
    base = read_yaml(beside if beside.is_file() else find_recipe(str(parent)), (*seen, path))
    return merge(base, rename_aliases(values))


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


def parse_config(values: Mapping[str, Any], source: str = "config") -> Config:
    """Resolve a plain mapping into a `Config`.

    Raises:
        ConfigError: every problem that was found, one a line.
    """
    problems = Problems()
    values = {section: {}, **values} if (section := "generation") not in values else dict(values)
    for key in values:
        if key not in (*SECTIONS, "out"):
            problems.add(str(key), f"unknown section{_place(str(key))}")
    for section in SECTIONS:
        if not isinstance(values.get(section, {}), Mapping):
            problems.add(section, f"expected a section with keys, got {values[section]!r}")
    if not problems:
        ready = dict(values)
        ready["tuning"] = _tuning(values.get("tuning", {}), problems)
        ready["training"] = _split(
            TrainingConfig, values.get("training", {}), installed_versions.training(), "training", problems
        )
        ready["generation"] = _split(
            GenerationConfig, values["generation"], installed_versions.generation(), "generation", problems
        )
        for section in ranges.RANGES:
            ranges.check(section, values.get(section, {}), problems)
        if isinstance(values.get("prompt"), Mapping) and isinstance(values["prompt"].get("style"), int):
            ready["prompt"] = {**values["prompt"], "style": str(values["prompt"]["style"])}
        typed = _assemble(ready, problems)
        if typed is not None and not problems:
            return typed
    raise ConfigError(
        "\n".join([f"{source} cannot be used:", *(f"  - {problem}" for problem in dict.fromkeys(problems))])
    )


def _place(name: str) -> str:
    """Return where a key without its section belongs, or the nearest section."""
    keys = {f"{section}.{field.name}" for section in SECTIONS for field in dataclasses.fields(CLASSES[section])}
    keys |= {f"training.{key}" for key in installed_versions.training()} | {
        f"generation.{key}" for key in installed_versions.generation()
    }
    exact = [f"{section}.{name}" for section in SECTIONS if f"{section}.{name}" in keys]
    return f", did you mean {exact[0]!r}?" if exact else variants.suggest(name, (*SECTIONS, "out", *keys))


def _assemble(ready: Mapping[str, Any], problems: Problems) -> Config | None:
    own = ("data", "prompt", "model")
    built = {name: build(CLASSES[name], ready.get(name, {}), name, problems) for name in own}
    out = ready.get("out")
    if not isinstance(out, str) or not out:
        problems.add("out", "required key is missing: the run folder, for example out=runs/my_run")
        return None
    if built["model"] is not None and built["model"].family:
        _check_variant("families", built["model"].family, "model.family", problems)
    return Config(**built, tuning=ready["tuning"], training=ready["training"], generation=ready["generation"], out=out)


def _check_variant(folder: variants.Folder, name: str, key: str, problems: Problems) -> bool:
    if wrong := variants.problem(folder, name):
        like = next((family for family, names in LAYOUTS.items() if name.lower().rstrip("0123456789.-") in names), None)
        problems.add(key, f"{name!r} models are laid out like {like}; use {like}" if like else wrong)
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
