"""Every variant provides what its folder's protocol says: same names, same parameters."""

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

from cmexam_tune.core import variants

PROTOCOLS: dict[variants.Folder, Any] = {
    folder: getattr(importlib.import_module(package), variants.PROTOCOLS[folder])
    for folder, package in variants.PACKAGES.items()
}
CASES = [(folder, name) for folder in PROTOCOLS for name in variants.names(folder)]


def members(protocol: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


@pytest.fixture(params=CASES, ids=[f"{folder}.{name}" for folder, name in CASES])
def variant(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """What provides the names: a module, or the one class in it."""
    folder, name = request.param
    return folder, variants.the_class(folder, name)() if folder in variants.IN_CONFIGS else variants.load(folder, name)


def test_there_are_variants() -> None:
    assert {folder for folder, _ in CASES} == set(PROTOCOLS)
    assert ("families", "llama") in CASES and ("tuning", "lora") in CASES and ("exams", "cmexam") in CASES
    assert ("scorers", "standard") in CASES


def test_names_and_parameters(variant: tuple[str, Any]) -> None:
    folder, module = variant
    for name, member in members(PROTOCOLS[folder]).items():
        provided = getattr(module, name)
        if isinstance(member, property) or not callable(member):
            continue
        wanted = [p for p in inspect.signature(member).parameters.values() if p.name != "self"]
        offered = inspect.signature(provided).parameters
        assert [p.name for p in wanted] == list(offered)[: len(wanted)], f"{folder}: {module}.{name}"
        extra = list(offered.values())[len(wanted) :]
        assert all(p.default is not inspect.Parameter.empty for p in extra), f"{folder}: {module}.{name}"
        for parameter in wanted:
            if parameter.default is not inspect.Parameter.empty:
                assert offered[parameter.name].default is not inspect.Parameter.empty, f"{name}({parameter.name})"


def test_values(variant: tuple[str, Any]) -> None:
    folder, module = variant
    if folder == "families":
        assert module.task in ("generate", "classify")
        assert isinstance(module.lora_targets, tuple) and all(isinstance(t, str) for t in module.lora_targets)
        assert isinstance(module.prefix_shifts_positions, bool)
    if folder == "tuning":
        assert isinstance(module.standalone, bool)
        assert dataclasses.is_dataclass(module.Settings)
        parameters: Any = module.Settings.__dataclass_params__  # type: ignore[attr-defined]
        assert parameters.frozen
    if folder == "metrics":
        assert module.METRIC.en.isascii() and not module.METRIC.zh.isascii()
    if folder == "scorers":
        assert module.SCORER.name == module.__name__.rpartition(".")[2].replace("_", "-")


def test_module_says_what_it_is(variant: tuple[str, Any]) -> None:
    assert (variant[1].__doc__ or "").strip()
