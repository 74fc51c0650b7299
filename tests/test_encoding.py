"""Encoded questions: in parallel the same as in one process, cached, and never from a stale cache."""

import dataclasses
import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_kit

pytest.importorskip("torch")

from cmexam_tune import config
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.features import Encoded
from cmexam_tune.training.data import encoding
from cmexam_tune.training.data.batches import EncodedQuestions
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.run_directory import run

World = tuple[config.Config, Family, Loaded, QuestionFiles]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_kit.world(tmp_path_factory.mktemp("encoding"), count=60)


@pytest.fixture
def world(folder: Path) -> World:
    recipe = training_kit.recipe(folder)
    family = run.parts(recipe)[0]
    return recipe, family, family.load(recipe.model), QuestionFiles((str(folder / "train.jsonl"),))


def encoder(world: World, cache: Path = Path("cache")) -> encoding.Encoder:
    recipe, family, loaded, _ = world
    return encoding.Encoder(recipe.prompt, recipe.model, family, loaded, cache, recipe.data.num_workers)


def encode(world: World, cache: Path) -> EncodedQuestions:
    return encoder(world, cache).encode(world[3])


def key(world: World) -> str:
    return encoder(world).key(world[3])


def content(encoded: EncodedQuestions) -> Any:
    lists = encoded.lengths, encoded.num_targets, encoded.sources
    return encoded.table.to_list(), *lists, encoded.truncation


def test_it_is_what_the_family_encodes(world: World, tmp_path: Path) -> None:
    """To the bit, with lengths and labels counted from the samples themselves."""
    recipe, family, loaded, questions = world
    samples = encode(world, tmp_path)
    plain = family.encode(loaded, list(questions), recipe.prompt, recipe.model)
    assert samples.table.to_list() == [dict(row) for row in plain.rows]
    assert samples.truncation == plain.truncation
    assert samples.lengths == [len(row["input_ids"]) for row in plain.rows]
    assert samples.num_targets == [sum(label != -100 for label in row["labels"]) for row in plain.rows]


def test_in_parallel_it_is_the_same(folder: Path, world: World, tmp_path: Path, monkeypatch: Any) -> None:
    """Samples, their order, and the report on what the limits did; limits that cut and refuse some."""
    _, family, loaded, questions = world
    limits = {"prompt__max_source_length": 55, "prompt__max_target_length": 60}
    found = []
    for workers in (1, 2, 3, 7):
        recipe = training_kit.recipe(folder, data__num_workers=workers, **limits)
        monkeypatch.setattr(encoding, "PART", 9)
        monkeypatch.setattr(encoding, "CHUNK", 4)
        seen = tmp_path / f"seen{workers}"
        monkeypatch.setattr(family, "encode", _noted(seen, family.encode))
        found.append(content(encode((recipe, family, loaded, questions), tmp_path / str(workers))))
        monkeypatch.undo()
        processes = set(seen.read_text().split())
        assert processes == {str(os.getpid())} if workers == 1 else str(os.getpid()) not in processes
    cut = found[0][-1]
    assert cut.explanations_cut > 0 and cut.stems_cut > 0 and 0 < len(found[0][0]) < 60
    assert all(other == found[0] for other in found[1:])


def _noted(file: Path, encode: Callable[..., Encoded]) -> Callable[..., Encoded]:
    def noted(*arguments: Any) -> Encoded:
        with file.open("a") as handle:
            handle.write(f"{os.getpid()}\n")
        return encode(*arguments)

    return noted


def test_the_cache_is_read_and_a_damaged_one_made_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content(encode(world, tmp_path))
    (rows,) = tmp_path.rglob("*.arrow")
    (part,) = (path.parent for path in tmp_path.rglob("dataset_info.json"))
    (manifest,) = tmp_path.rglob("encoded.json")
    good, facts = rows.read_bytes(), [part / "dataset_info.json", part / "state.json", manifest]
    damaged = [(rows, good[: len(good) // 2]), (rows, b""), (rows, b"\xff\xfe" + good)]
    for path, bad in [*damaged, *((path, bad) for path in facts for bad in (b"{", b"[]", b"{}"))]:
        path.unlink()
        path.write_bytes(bad)
        assert content(encode(world, tmp_path)) == first, (path.name, bad[:9])
        assert rows.is_file() and all(path.is_file() for path in facts)
    shutil.rmtree(part)
    assert content(encode(world, tmp_path)) == first, "a part is missing"
    monkeypatch.setattr(world[1], "encode", lambda *_: pytest.fail("encoded again"))
    monkeypatch.setattr(QuestionFiles, "sourced", lambda *_: pytest.fail("read again"))
    assert content(encode(world, tmp_path)) == first


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
    "order": lambda w, folder: (*w[:3], _written(folder, list(w[3])[::-1])),
    "answer": lambda w, folder: (*w[:3], _written(folder, _answered_otherwise(list(w[3])))),
    "fewer": lambda w, _: (*w[:3], dataclasses.replace(w[3], limit=59)),
    "family code": lambda w, folder: (w[0], _family_of_yours(w[1], folder), *w[2:]),
}  # fmt: skip


def _written(folder: Path, questions: list[Question]) -> QuestionFiles:
    jsonl.write(folder / "other.jsonl", questions, overwrite=True)
    return QuestionFiles((str(folder / "other.jsonl"),))


def _answered_otherwise(questions: list[Question]) -> list[Question]:
    return [dataclasses.replace(questions[0], answer="E"), *questions[1:]]


def _family_of_yours(family: Any, folder: Path) -> Any:
    mine = types.SimpleNamespace(**vars(family))
    mine.__file__ = str(folder / "mine.py")
    (folder / "mine.py").write_text("# another way to encode\n", encoding="utf-8")
    return mine


@pytest.mark.parametrize("name", OTHER)
def test_whatever_changes_the_rows_changes_the_key(world: World, folder: Path, name: str) -> None:
    assert key(world) == key(world)
    assert key(OTHER[name](world, folder)) != key(world)


def test_code_that_makes_no_tokens_does_not_change_the_key(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(world)
    read = Path.read_bytes
    for name, same in (
        ("monitor.py", True),
        ("cli.py", True),
        ("features.py", False),
        ("styles.py", False),
        ("order.py", False),
        ("llama.py", False),
        ("causal.py", False),
        ("encoding.py", False),
    ):
        monkeypatch.setattr(Path, "read_bytes", lambda p, n=name: read(p) + b"#" * (p.name == n))
        assert (key(world) == before) == same, name
