"""Commands checked without running them, and a reader who runs those of a page with tiny models and a small server."""

import argparse
import dataclasses
import functools
import importlib.util
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import docs_blocks
import kit
import pytest
import shell_stubs
from docs_blocks import ROOT

from cmexam_tune import __main__, config
from cmexam_tune.config import installed_versions, settings
from cmexam_tune.core import variants
from cmexam_tune.models.adapters import Method
from cmexam_tune.report.papers import entries

TRANSLATED = ("ptuning/main.py", "lora/finetune.py", "lora/infer.py", "preprocess/generate_prompt.py")
KEY = re.compile(r"(?:data|prompt|model|tuning|training|generation)\.[a-z]\w*")


class Parsed(Exception):
    """A program has read its command line, and goes no further."""

    def __init__(self, parser: argparse.ArgumentParser, got: argparse.Namespace) -> None:
        super().__init__()
        self.parser, self.got = parser, got


@contextmanager
def parsing_only(empty: bool = False) -> Iterator[None]:
    """Stop every program once its command line is parsed, or before that where it is `empty`."""

    def parse(known: Callable[..., Any]) -> Callable[..., Any]:
        def read(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> Any:
            if empty:
                raise Parsed(parser, argparse.Namespace())
            got, more = known(parser, list(argv if argv is not None else sys.argv[1:]))
            if more:
                parser.error(f"unknown: {more}")
            raise Parsed(parser, got)

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            known = getattr(argparse.ArgumentParser, name.replace("parse_", "parse_known_"))
            patch.setattr(argparse.ArgumentParser, name, parse(known))
        yield


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return what a program of ours reads from its command line; recipes and keys must exist."""
    with parsing_only(), pytest.raises(Parsed) as stopped:
        __main__.main(words)
    got = stopped.value.got
    changes = [word for word in getattr(got, "overrides", ()) if "=" in word]
    for recipe in recipes_of(got) or ([] if words[0] == "reproduce" else ["lora_qwen.yaml"] if changes else []):
        if not recipe.startswith(("my_", "path/")):
            config.load_config(recipe, [] if any("my_lab" in change for change in changes) else changes)
    for word in getattr(got, "rows", ()):
        row, change = re.fullmatch(r"(?:([^=:]+):)?(\w+\.\w+=.*)", word).groups() if "=" in word else (word, None)
        row = "lora_llama" if row in (None, "ROW") else row
        config.load_config(entries.find(row).recipe, [change] if change else [])
    return got


def recipes_of(args: argparse.Namespace) -> list[str]:
    """Return what stands behind `--config`, which some programs call by what they do with several."""
    values = vars(args)
    recipe = values.get("config")
    return [recipe] if recipe else [*values.get("models", ()), *values.get("judges", ())]


def ours(words: Sequence[str]) -> list[str] | None:
    """Return the words behind `cmexam-tune` of a command line of our programs, however it is started."""
    for place, word in enumerate(words):
        if word == "cmexam-tune":
            return list(words[place + 1 :])
        if word.startswith("cmexam_tune.") and words[place - 1] in ("-m", "--module"):
            return [word.removeprefix("cmexam_tune."), *words[place + 1 :]]
    return None


def parse_command(words: Sequence[str]) -> None:
    """Check a command line without running it: program, flags, recipe, keys, script or target exist."""
    if (command := ours(words)) is not None:
        assert command[0] in (*__main__.PROGRAMS, "--help"), words
        if command[0] in __main__.PROGRAMS:
            parsed(command)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), words
    elif words[0] in ("python", "python3", "bash") and "/" in words[1]:
        assert (ROOT / words[1]).is_file(), words
        if words[1].startswith("benchmarks/"):
            text = (ROOT / words[1]).with_suffix(".py").read_text(encoding="utf-8")
            assert all(f'"{word}"' in text for word in words if word.startswith("--")), words


@functools.cache
def flags(program: str) -> set[str]:
    """Return the flags of a program."""
    with parsing_only(empty=True), pytest.raises(Parsed) as stopped:
        __main__.main([program])
    return set(stopped.value.parser._option_string_actions)


@functools.cache
def known_keys() -> set[str]:
    """Return every `section.key` of a config."""
    found = {f"{name}.{field.name}" for name, cls in settings.SECTIONS.items() for field in dataclasses.fields(cls)}
    found |= {f"training.{name}" for name in installed_versions.training()}
    if importlib.util.find_spec("trl"):  # an extra
        for trl_config in installed_versions.TRL_FILES:
            found |= {f"training.{name}" for name in installed_versions.training(trl_config)}
    else:
        found |= {"training.max_completion_length"}
    found |= {f"generation.{name}" for name in installed_versions.generation()}
    for method in variants.names("tuning"):
        found |= {f"tuning.{field.name}" for field in dataclasses.fields(Method.named(method).Settings)}
    return found | {"prompt.file", "tuning.method"} | {".".join(alias) for alias in config.ALIASES}


def check_names(words: Sequence[str]) -> None:
    """Check a command that is cut short or has NAMES in it: what it does name exists."""
    if not words or (command := ours(words)) is None:
        assert words[:1] != ["make"] or not words[1:] or f"\n{words[1]}:" in (ROOT / "Makefile").read_text("utf-8"), (
            words
        )
        if words[:1] in (["python"], ["python3"], ["bash"]) and "/" in "".join(words[1:2]):
            assert (ROOT / words[1]).is_file(), words
        return
    if command and command[0].isascii() and not command[0].isupper():
        assert command[0] in (*__main__.PROGRAMS, "--help"), words
    if command and command[0] in __main__.PROGRAMS:
        assert {word.partition("=")[0] for word in command if word.startswith("--")} <= flags(command[0]) | {"--help"}
    for before, word in pairwise(command):
        if before == "--config" and not word.isupper() and not word.startswith(("my_", "path/", "--", "$")):
            assert config.find_recipe(word), words
    own = any("my_lab" in word for word in command)
    assert own or {word.partition("=")[0] for word in command if KEY.match(word)} <= known_keys(), words


def rate(folder: Path, sheets: Sequence[str]) -> None:
    """Fill copies of the exported sheet as the people would who got them."""
    import openpyxl

    for name in sheets:
        book = openpyxl.load_workbook(folder / "sheet.xlsx")
        for row in book.active.iter_rows(min_row=2):
            for cell in row:
                if cell.value is None and book.active.cell(1, cell.column).value:
                    cell.value = 3
        book.save(folder / name)


# --- what stands in for weights and servers -----------------------------------------------------------------------


class Reader:
    """Someone who follows a page in a prepared folder; `whole`: with all steps of training that need no weights."""

    def __init__(self, folder: Path, address: str, whole: bool) -> None:
        self.folder, self.address, self.whole = folder, address, whole
        self.ran: list[str] = []

    def stand_ins(self, recipe: str, changes: Sequence[str], wanted: set[str]) -> list[str]:
        """Return overrides that put a tiny model, or the small server, where this machine has no weights."""
        model = config.load_config(recipe, changes).model
        if model.family == "endpoint":
            return [f"model.base_url={self.address}"] if "a server" in wanted else []
        words = []
        if "weights" in wanted and not Path(model.model_name_or_path).exists():
            words.append(f"model.model_name_or_path={kit.checkpoint(model.family, hidden=32, layers=2)}")
        if "weights" in wanted and model.adapter_name_or_path:
            words.append("model.adapter_name_or_path=null")
        return words

    def more(self, command: Sequence[str], wanted: set[str]) -> list[str]:
        """Return what is added to a command of ours."""
        got, added = parsed(command), []
        changes = [word for word in getattr(got, "overrides", ()) if "=" in word]
        for recipe in recipes_of(got):
            added += self.stand_ins(recipe, changes, wanted)
        if command[0] == "reproduce":
            rows = [entries.find(row).recipe for row in getattr(got, "rows", ()) if "=" not in row]
            added += [f"{row}:{word}" for row in rows for word in self.stand_ins(row, (), wanted)]
            added += [f"{row}:training.max_steps=1" for row in rows]
        if command[0] == "compare" or (command[0] == "train" and ("weights" in wanted or not self.whole)):
            added += ["training.max_steps=1", "training.eval_strategy=no", "training.save_strategy=no"]
        if "weights" in wanted and command[0] in ("predict", "compare"):
            added += ["generation.max_new_tokens=4", "generation.thinking_tokens=4"]
        return added

    def translated(self, words: Sequence[str]) -> list[list[str]]:
        """Return the commands of ours that a command line means."""
        if words[1:2] and words[1] in TRANSLATED:
            return [list(line) for line in runpy.run_path(str(ROOT / words[1]))["SCRIPT"].commands(words[2:])]
        command = ours(words)
        assert command is not None, f"{self.ran[-1]}: runs in no test and has no mark"
        return [command]

    def call(self, call: shell_stubs.Call) -> int:
        """Answer a command that bash came to; 0: it has done what the page says."""
        words, (program, *_) = call.words, call.words
        if "--import" in words:
            rate(call.folder, [word for word in words if word.startswith("sheet_")])
        self.ran.append(" ".join(words))
        slow = program == "cmexam-tune" and words[1] == "reproduce" and "weights" in call.needs and not self.whole
        if call.needs & docs_blocks.PARSED_ONLY or program == "make" or slow:
            parse_command(words)
            return 0
        assert program in ("cmexam-tune", "python", "python3"), f"{self.ran[-1]}: runs in no test and has no mark"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(call.folder)
            patch.setenv("OPENAI_API_KEY", call.key)
            patch.setattr(sys, "stdin", io.StringIO("感冒怎么办？\n"))
            patch.syspath_prepend(str(self.folder))
            patch.setattr("uvicorn.Server.run", lambda *args, **more: None)
            for command in self.translated(words):
                extra = self.more(command, call.needs) if command[0] in __main__.PROGRAMS else []
                if status := __main__.main([*command, *extra]):
                    return status
        return 0
