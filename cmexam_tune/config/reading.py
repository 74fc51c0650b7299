"""Reads one experiment: YAML files that extend each other, then `section.key=value` overrides, then strict checks.

All problems are reported at once, with 'did you mean', and attributed to the file or the override they come from.
"""

import contextlib
import dataclasses
import difflib
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cmexam_tune.config import installed_versions
from cmexam_tune.config.overrides import parse_override, rename_aliases
from cmexam_tune.config.settings import SECTIONS, Config, TrainingConfig, TuningConfig
from cmexam_tune.core import documents, variants
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.strict import Problems, build

_PUBLISH = "what is trained to be published. If you want that, add"
COMMAND_ONLY = {
    "model.trust_remote_code": "the Python code of a checkpoint to be run. If you trust its author, add",
    "model.engine_command": "a command to be started. If you trust it, add",
    "model.engine_arguments": "options of a server, which may be code. If you trust them, add",
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
    """Return the YAML file called `name`: a path, else one in any folder of the checkout's or the wheel's recipes/.

    Raises:
        ConfigError: there is none; the message names the places and the nearest recipe.
    """
    spellings = (str(name), f"{name}.yaml")
    for path in map(Path, spellings):
        with contextlib.suppress(OSError, ValueError):  # too long, or a NUL character
            if path.is_file():
                return path
    recipes = [path for folder in recipe_folders() for path in sorted(folder.rglob("*.yaml"))]
    for path in recipes:
        if path.name in spellings:
            return path
    known = sorted({path.name for path in recipes})
    near = difflib.get_close_matches(str(name), known, n=5, cutoff=0.5)
    like = f", did you mean {near[0]!r}? Like it: {', '.join(near[1:])}" if near else ""
    raise ConfigError(
        f"{reprlib.repr(str(name))[1:-1]}: no such config, neither a file nor one of {len(known)} shipped recipes"
        f"{like}. `cmexam-tune recipes` lists them."
    )


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe by path or name, apply `section.key=value` overrides, and resolve it.

    Raises:
        ConfigError: every problem that was found, one a line.
    """
    path = find_recipe(name)
    values = read_yaml(path)
    changes = [parse_override(override) for override in overrides]
    # Before anything of the file is looked at further: it may be a stranger's.
    _check_trust(path, values, changes)
    for change in changes:
        _read_prompt_file(change, path)
        merge(values, change)
    return parse_config({"out": f"runs/{path.stem}", **values}, str(path), changes)


def read_prompt_file(path: Path) -> dict[str, str]:
    """Return the texts of a prompt file: `ask`, `write` or both.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    texts = documents.read_yaml(path, "prompt file")
    if not isinstance(texts, dict) or not texts or {*texts} - {"ask", "write"}:
        content = ", ".join(map(str, texts)) if isinstance(texts, dict) else type(texts).__name__
        raise ConfigError(f"{path}: a prompt file holds the texts `ask` and `write`, found {content or 'nothing'}.")
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise ConfigError(f"{path}: {wrong[0]}: a text is needed, found {type(texts[wrong[0]]).__name__}.")
    return texts


def _read_prompt_file(values: dict[str, object], path: Path) -> None:
    """Put the texts of `prompt.file` into `prompt`, so that they are recorded with the run."""
    prompt = values.get("prompt")
    if not isinstance(prompt, dict) or (name := prompt.pop("file", None)) is None:
        return
    beside = path.parent / str(name)
    file = beside if beside.is_file() else Path(str(name))
    if not file.is_file():
        raise ConfigError(f"prompt.file: {name}: no such file, neither beside {path} nor in {Path.cwd()}.")
    values["prompt"] = {**read_prompt_file(file), **prompt}


def _check_trust(path: Path, values: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Import the modules that the command names; refuse a file that asks for a checkpoint's own code by itself."""
    sections = [change[name] for change in changes for name in change if isinstance(change[name], Mapping)]
    for name in [section.get(key) for section in sections for key in ("family", "method", "objective")]:
        if isinstance(name, str) and "." in name:
            variants.import_outside(name)
    for key, what in COMMAND_ONLY.items():
        name, _, field = key.partition(".")
        section = values.get(name)
        if isinstance(section, Mapping) and section.get(field) and not any(field in change for change in sections):
            value = "true" if section[field] is True else "..."
            raise ConfigError(f"{path}: {key}: a file cannot ask for {what} {key}={value} to the command.")


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, object]:
    """Return the keys of a YAML file merged over those of the file that it `extends`; `out` is not inherited.

    Args:
        path: the file.
        seen: the files that extend it, for the message about a circle.
    """
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: extends itself by way of {', '.join(str(p.name) for p in seen)}.")
    values = read_mapping(path)
    _read_prompt_file(values, path)
    parent = values.pop("extends", None)
    if parent is None:
        return rename_aliases(values)
    beside = path.parent / str(parent)
    base = read_yaml(beside if beside.is_file() else find_recipe(str(parent)), (*seen, path))
    base.pop("out", None)  # the run of another experiment
    return merge(base, rename_aliases(values))


def read_mapping(path: Path) -> dict[str, object]:
    """Read one YAML file that holds keys."""
    try:
        values = documents.read_yaml(path, "config")
    except UserError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections ({', '.join(SECTIONS)}), found {type(values).__name__}.")
    return values


def merge(base: dict[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Put `changes` into `base` by section and return `base`; a new tuning method drops the old one's keys."""
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            # `r: 8` of LoRA means nothing to P-tuning and would be refused as an unknown key.
            if key == "tuning" and value.get("method", old.get("method")) != old.get("method"):
                old.clear()
            merge(old, value)
        else:
            base[key] = value
    return base


def parse_config(
    values: Mapping[str, object], source: str = "config", overrides: Sequence[Mapping[str, object]] = ()
) -> Config:
    """Resolve a plain mapping into a `Config`.

    Args:
        values: sections and `out`, overrides included.
        source: the file that they come from, for messages.
        overrides: what `parse_override` returned: problems with these keys are not attributed to `source`.

    Raises:
        ConfigError: every problem that was found, one a line.
    """
    problems = Problems()
    for key in values:
        if key not in (*SECTIONS, "out"):
            problems.add(str(key), f"unknown section{_place(str(key))}")
    sections = {name: _section(name, values.get(name, {}), problems) for name in SECTIONS}
    out = values.get("out")
    if not isinstance(out, str) or not out:
        problems.add("out", "required key is missing: the run folder, for example out=runs/my_run")
    if problems:
        raise _refusal(problems, source, overrides)
    return Config(**sections, out=str(out))


def _refusal(problems: Sequence[str], source: str, overrides: Sequence[Mapping[str, object]]) -> ConfigError:
    """Return the error, which attributes a problem to the overrides if one touches its key, and else to the file."""
    changed = {
        f"{section}.{name}" if name else section
        for override in overrides
        for section, value in override.items()
        for name in (value if isinstance(value, Mapping) else ("",))
    }
    if "tuning.method" in changed:  # another method has other keys altogether
        changed.add("tuning")
    of_file, of_overrides = [f"{source} cannot be used:"], [f"the overrides cannot be used with {source}:"]
    for problem in problems:
        key = problem.partition(": ")[0]
        touched = any(f"{key}.".startswith((f"{name}.", f"{name}[")) or name.startswith(f"{key}.") for name in changed)
        (of_overrides if touched else of_file).append(f"  - {problem}")
    return ConfigError("\n".join(line for lines in (of_file, of_overrides) if len(lines) > 1 for line in lines))


def _place(name: str) -> str:
    """Return where a key without its section belongs, or the nearest section."""
    keys = {f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    keys |= {f"training.{key}" for key in installed_versions.training()}
    keys |= {f"generation.{key}" for key in installed_versions.generation()}
    exact = [f"{section}.{name}" for section in SECTIONS if f"{section}.{name}" in keys]
    return f", did you mean {exact[0]!r}?" if exact else variants.suggest(name, (*SECTIONS, "out", *keys))


def _section(name: str, values: object, problems: Problems) -> Any:
    """Return a section's dataclass, or None after adding its problems."""
    if not isinstance(values, Mapping):
        problems.add(name, f"expected a section with keys, got {values!r}")
        return None
    # Whoever writes 1e3 means a thousand, which YAML makes a float; strict pydantic takes no float for an integer.
    values = {
        str(key): int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in values.items()
    }
    if name == "tuning":
        return _tuning(values, problems)
    if name in ("training", "generation"):
        values = _with_arguments(name, values, problems)
    section = build(SECTIONS[name], values, name, problems)
    if name == "model" and section is not None:
        _check_variant("families", section.family, "model.family", problems)
    return section


def _check_variant(folder: variants.Folder, name: str, key: str, problems: Problems) -> bool:
    if wrong := variants.problem(folder, name):
        like = next((family for family, names in LAYOUTS.items() if name.lower().rstrip("0123456789.-") in names), None)
        problems.add(key, f"{name!r} models are laid out like {like}; use {like}" if like else wrong)
    return wrong is None


def _tuning(values: Mapping[str, object], problems: Problems) -> TuningConfig | None:
    method = values.get("method")
    if method is None and not values.keys() - {"method"}:
        return TuningConfig()
    if not isinstance(method, str):
        problems.add("tuning.method", f"required key is missing; known: {', '.join(variants.names('tuning'))}")
        return None
    if not _check_variant("tuning", method, "tuning.method", problems):
        return None
    settings = {key: value for key, value in values.items() if key != "method"}
    return TuningConfig(method, build(variants.the_class("tuning", method).Settings, settings, "tuning", problems))


def _with_arguments(section: str, values: Mapping[str, object], problems: Problems) -> dict[str, object]:
    """Return a section's own keys, and those of transformers, which its source checks, under `arguments`."""
    ours = {field.name for field in dataclasses.fields(SECTIONS[section])} - {"arguments"}
    foreign = {
        key: "no" if value is False and key.endswith("_strategy") else value  # YAML reads a bare `no` as false
        for key, value in values.items()
        if key not in ours
    }
    trl_config = _trl_config(section, values, problems)
    if trl_config is None or installed_versions.has_trl():
        checked = build(installed_versions.arguments(section, trl_config), foreign, section, problems, also=ours)
    else:
        checked = foreign  # a run can be opened where nothing could check TRL's names; training asks for TRL
    arguments = foreign if checked is None else {key: checked[key] for key in foreign}
    return {**{key: value for key, value in values.items() if key in ours}, "arguments": arguments}


def _trl_config(section: str, values: Mapping[str, object], problems: Problems) -> str | None:
    """Return the class of TRL whose names the section `training` may hold."""
    name = values.get("objective", TrainingConfig.objective)
    if section != "training" or not isinstance(name, str):
        return None
    if not _check_variant("objectives", name, "training.objective", problems):
        return None
    trl_config: str | None = variants.the_class("objectives", name).trl_config
    return trl_config


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.to_dict(), allow_unicode=True, sort_keys=False)
