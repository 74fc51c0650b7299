"""Encoded questions: in parallel the same as in one process, cached, and never from a stale cache."""

import dataclasses
import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import train_helpers

pytest.importorskip("torch")

from cmexam_tune.batching import encoding
from cmexam_tune.core import config, jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.families import Family, Loaded
from cmexam_tune.models.features import Encoded
from cmexam_tune.runfolder import runs

World = tuple[config.Config, Family, Loaded, list[Question]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_helpers.world(tmp_path_factory.mktemp("encoding"), count=60)


@pytest.fixture
def world(folder: Path) -> World:
    settings = train_helpers.recipe(folder)
    questions = list(jsonl.read(folder / "train.jsonl", Question))
    family = runs.parts(settings)[0]
    return settings, family, family.load(settings.model), questions


def test_in_parallel_it_is_the_same(folder: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their order, and the report on what the limits did; limits that cut and refuse some."""
    _, family, loaded, questions = world
    limits = {"prompt__max_source_length": 55, "prompt__max_target_length": 60}
    found = []
    for workers in (1, 2, 3, 7):
        settings = train_helpers.recipe(folder, data__num_workers=workers, **limits)
        monkeypatch.setattr(encoding, "PARALLEL_FROM", 10)
        monkeypatch.setattr(family, "encode", _only_in(workers > 1, family.encode))
        found.append(encoding.whole(settings, family, loaded, questions))
        monkeypatch.undo()
    cut = found[0].truncation
    assert cut.explanations_cut > 0 and cut.stems_cut > 0 and 0 < len(found[0].rows) < len(questions)
    assert all(other == found[0] for other in found[1:])


def _only_in(children: bool, encode: Callable[..., Encoded]) -> Callable[..., Encoded]:
    import multiprocessing

    def checked(*arguments: Any) -> Encoded:
        assert (multiprocessing.parent_process() is not None) == children
        return encode(*arguments)

    return checked


def test_the_cache_is_read_and_a_damaged_one_made_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encoding.encode(*world, tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    good = file.read_bytes()
    damaged = [good[: len(good) // 2], b"", good.replace(b"truncation", b"truncatiom"), b"\xff\xfe" + good]
    for content in damaged:
        file.write_bytes(content)
        again = encoding.encode(*world, tmp_path)
        assert again == first and file.read_bytes() == good
    monkeypatch.setattr(encoding, "whole", lambda *_: pytest.fail("encoded again"))
    assert encoding.encode(*world, tmp_path) == first


def _another_tokenizer(world: World, folder: Path) -> Loaded:
    """The same words, one merge rule less."""
    copy = folder / "other_words"
    shutil.copytree(folder / "llama", copy, dirs_exist_ok=True)
    values = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    values["model"]["merges"].pop()
    (copy / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return world[1].load(dataclasses.replace(world[0].model, model_name_or_path=str(copy)))


def _with_chat_template(world: World, _folder: Path) -> Loaded:
    loaded = world[1].load(world[0].model)
    loaded.tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    return loaded


OTHER: dict[str, Callable[[World, Path], World]] = {
    **{
        f"prompt.{key}": lambda w, _, key=key, value=value: (
            dataclasses.replace(w[0], prompt=dataclasses.replace(w[0].prompt, **{key: value})), *w[1:]
        )
        for key, value in {
            "style": "answer", "template": "alpaca", "system": "Be brief.", "max_source_length": 161,
            "max_target_length": 97,
        }.items()
    },
    "tokenizer": lambda w, folder: (*w[:2], _another_tokenizer(w, folder), w[3]),
    "chat template": lambda w, folder: (*w[:2], _with_chat_template(w, folder), w[3]),
    "order": lambda w, _: (*w[:3], w[3][::-1]),
    "answer": lambda w, _: (*w[:3], [dataclasses.replace(w[3][0], answer="E"), *w[3][1:]]),
    "fewer": lambda w, _: (*w[:3], w[3][:-1]),
    "family code": lambda w, folder: (w[0], _family_of_yours(w[1], folder), *w[2:]),
}  # fmt: skip


def _family_of_yours(family: Any, folder: Path) -> Any:
    mine = types.SimpleNamespace(**vars(family))
    mine.__file__ = str(folder / "mine.py")
    (folder / "mine.py").write_text("# another way to encode\n", encoding="utf-8")
    return mine


@pytest.mark.parametrize("name", OTHER)
def test_whatever_changes_the_rows_changes_the_key(world: World, folder: Path, name: str) -> None:
    assert encoding.cache_key(*world) == encoding.cache_key(*world)
    assert encoding.cache_key(*OTHER[name](world, folder)) != encoding.cache_key(*world)
