"""The base layer: configuration, strict reading, JSON lines, records, files, exit statuses."""

import copy
import dataclasses
import datetime
import errno
import json
import os
import subprocess
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import jsonschema
import pytest
import yaml
from kit import run_program
from pydantic import Field

from cmexam_tune import __main__, config
from cmexam_tune.config import describing, installed_versions
from cmexam_tune.config import settings as sections
from cmexam_tune.core import (
    cli,
    documents,
    files,
    jsonl,
    variants,
)
from cmexam_tune.core.errors import ConfigError, DataError, TrainingStopped, UserError
from cmexam_tune.core.schema import Prediction, Question, letters
from cmexam_tune.core.strict import Problems, build
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.adapters.lora import LoRA

lora = LoRA()

GOOD: dict[str, Any] = {
    "data": {"train": ["a.jsonl"]},
    "prompt": {"style": "answer", "max_source_length": 64, "max_target_length": 16},
    "model": {"family": "llama", "model_name_or_path": "x/y"},
    "tuning": {"method": "lora", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05},
    "training": {"global_batch_size": 4, "learning_rate": 3e-4, "num_train_epochs": 1},
    "generation": {"max_new_tokens": 8},
    "out": "runs/x",
}
QUESTION = {"id": "q:1", "stem": "题干", "options": {"A": "甲", "B": "乙"}, "answer": "A"}


def write(folder: Path, values: Any, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
    return path


def changed(key: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(GOOD)
    section, _, name = key.partition(".")
    if name:
        values[section][name] = value
    else:
        values[section] = value
    return values


def test_good_is_good_and_round_trips(tmp_path: Path) -> None:
    first = config.parse_config(GOOD)
    assert first.training.arguments["learning_rate"] == 3e-4
    assert first.tuning.settings.r == 8
    assert config.load_config(write(tmp_path, config.dump_config(first))) == first


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.train", 3, "data.train[0]: should be a valid string, got 3"),
        ("data.trian", ["x"], "data.trian: unknown key, did you mean 'train'?"),
        ("data.max_train_samples", "many", "data.max_train_samples: should be a valid integer, got 'many'"),
        ("data", ["a.jsonl"], "data: expected a section with keys"),
        ("data", None, "data: expected a section with keys"),
        ("prompt.style", ["a"], "prompt.style: should be a valid string, got ['a']"),
        ("prompt.max_source_length", 12.5, "prompt.max_source_length: should be a valid integer, got 12.5"),
        ("prompt.max_source_length", True, "prompt.max_source_length: should be a valid integer, got True"),
        ("prompt.max_source_length", None, "prompt.max_source_length: should be a valid integer, got None"),
        ("model.family", "lama", "model.family: 'lama' is unknown, did you mean 'llama'?"),
        ("model.dtype", "float8", "model.dtype: 'float8' is not a choice, did you mean 'float"),
        ("model.head", "choise", "model.head: 'choise' is not a choice, did you mean 'choice'?"),
        ("model.config", 3, "model.config: should be an object, got 3"),
        (
            "model.trust_remote_code",
            "yes please",
            "model.trust_remote_code: should be a valid boolean, got 'yes please'",
        ),
        ("model", {"family": "llama"}, "model.model_name_or_path: required key is missing"),
        ("tuning.method", "lorra", "tuning.method: 'lorra' is unknown, did you mean 'lora'?"),
        ("tuning", {"r": 8}, "tuning.method: required key is missing; known: "),
        ("tuning.r", "8", "tuning.r: should be a valid integer, got '8'"),
        ("tuning.lora_dropout", 1.5, "tuning.lora_dropout: should be less than 1, got 1.5"),
        ("tuning.pre_seq_lenn", 8, "tuning.pre_seq_lenn: unknown key"),
        ("training.learning_rat", 1.0, "training.learning_rat: unknown key, did you mean 'learning_rate'?"),
        ("training.learning_rate", "2e-2 or so", "training.learning_rate: should be a valid number, got '2e-2 or so'"),
        (
            "training.per_device_train_batch_size",
            1.5,
            "training.per_device_train_batch_size: should be a valid integer, got 1.5",
        ),
        ("training.bf16", "auto", "training.bf16: should be a valid boolean, got 'auto'"),
        ("training.packing", 1, "training.packing: should be a valid boolean, got 1"),
        ("training.output_dir", "x", "training.output_dir: unknown key"),
        ("generation.max_new_token", 8, "generation.max_new_token: unknown key, did you mean 'max_new_tokens'?"),
        ("generation.max_new_tokens", "many", "generation.max_new_tokens: should be a valid integer, got 'many'"),
        ("generation.do_sample", "maybe", "generation.do_sample: should be a valid boolean"),
        ("generation.mode", "guess", "generation.mode: 'guess' is not a choice"),
        ("model.config", {datetime.date(2020, 1, 1): 3}, "model: keys must be str"),
        ("genration", {}, "genration: unknown section, did you mean 'generation'?"),
        ("out", "", "out: required key is missing"),
        ("out", 3, "out: required key is missing"),
    ],
)
def test_wrong_values(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse_config(changed(key, value), "c.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("c.yaml cannot be used:\n  - ")


def test_all_problems_at_once() -> None:
    values = changed("training.learning_rat", 1)
    values["prompt"]["style"] = 3.5
    values["tuning"]["r"] = "x"
    del values["out"]
    with pytest.raises(ConfigError) as caught:
        config.parse_config(values)
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize(
    ("written", "value"),
    [("2e-2", 0.02), ("2E-2", 0.02), ("1e5", 1e5), (".5e1", 5.0), ("3.e-4", 3e-4), ("1_0e2", 1e3), ("-1e-3", -1e-3)],
)
def test_numbers_as_people_write_them(tmp_path: Path, written: str, value: float) -> None:
    path = write(tmp_path, f"x: {written}\ny: [{written}]\n")
    assert config.read_yaml(path) == {"x": value, "y": [value]}
    loaded = config.load_config(write(tmp_path, GOOD, "g.yaml"), [f"model.config={{x: {written}}}"])
    assert loaded.model.config["x"] == value


@pytest.mark.parametrize("text", ["2e-2x", "e5", "1e", "0x1e2", "v1e5"])
def test_not_everything_with_an_e_is_a_number(tmp_path: Path, text: str) -> None:
    assert not isinstance(config.read_yaml(write(tmp_path, f"x: {text}\n"))["x"], float)


@pytest.mark.parametrize(
    ("override", "check"),
    [
        ("data.train=[a.jsonl, b.jsonl]", lambda c: c.data.train == ("a.jsonl", "b.jsonl")),
        ("data.train=one.jsonl", lambda c: c.data.train == ("one.jsonl",)),
        ("model.model_name_or_path=/a=b", lambda c: c.model.model_name_or_path == "/a=b"),
        ("model.adapter_name_or_path=", lambda c: c.model.adapter_name_or_path is None),
        ("model.config.hidden_dropout_prob=0.4", lambda c: c.model.config == {"hidden_dropout_prob": 0.4}),
        ("tuning.target_modules=all-linear", lambda c: c.tuning.settings.target_modules == "all-linear"),
        ("tuning.target_modules=[q_proj]", lambda c: c.tuning.settings.target_modules == ("q_proj",)),
        ("training.eval_strategy=no", lambda c: c.training.arguments["eval_strategy"] == "no"),
        ("training.num_train_epochs=3.0", lambda c: c.training.arguments["num_train_epochs"] == 3),
        ("prompt.style=4", lambda c: c.prompt.style == "4"),
        ("out=elsewhere", lambda c: c.out == "elsewhere"),
        ("training.batch_size=8", lambda c: c.training.global_batch_size == 8),
        ("tuning.lora_rank=4", lambda c: c.tuning.settings.r == 4),
    ],
)
def test_overrides(tmp_path: Path, override: str, check: Any) -> None:
    assert check(config.load_config(write(tmp_path, GOOD), [override]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.seed=-1"], "  - training.seed: should be greater than or equal to 0, got -1"),
        (["generation.stop_strings=['']"], "  - generation.stop_strings: an empty text would end every answer"),
        (["generation.votes=3"], "  - generation.votes: 3 outputs would all be the same."),
        (["tuning.method=ptuning"], "  - tuning.num_virtual_tokens: required key is missing"),
        (["data.train=[3]"], "  - data.train[0]: should be a valid string, got 3"),
        (["learning_rate=1e-4"], "  - learning_rate: unknown section, did you mean 'training.learning_rate'?"),
    ],
)
def test_a_mistake_in_an_override_is_not_laid_to_the_file(tmp_path: Path, overrides: list[str], message: str) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError) as caught:
        config.load_config(path, overrides)
    head, text = str(caught.value).splitlines()
    assert head == f"the overrides cannot be used with {path}:"
    assert text.startswith(message)


def test_mistakes_of_file_and_override_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, {**changed("prompt.style", [1]), "genration": {}})
    with pytest.raises(ConfigError) as caught:
        config.load_config(path, ["training.seed=-1", "prompt.shots=2"])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} cannot be used:" and lines[3] == f"the overrides cannot be used with {path}:"
    assert [line[:16] for line in lines[1:3]] == ["  - genration: u", "  - prompt.style"]
    assert lines[4].startswith("  - training.seed: ") and len(lines) == 5


def test_an_address_needs_four_lines(tmp_path: Path) -> None:
    text = "data: {test: q.jsonl}\nmodel:\n  {family: endpoint, base_url: http://x/v1,\n   model_name_or_path: y}"
    settings = config.load_config(write(tmp_path, text, "mine.yaml"))
    assert (settings.model.base_url, settings.data.test) == ("http://x/v1", ("q.jsonl",))
    assert (settings.prompt.style, settings.tuning.method, settings.out) == ("answer", None, "runs/mine")
    assert config.load_config(write(tmp_path, config.dump_config(settings))) == settings
    with pytest.raises(ConfigError, match=r"tuning\.method: required key is missing"):
        config.parse_config({**settings.to_dict(), "tuning": {"r": 3}})


def test_silence_is_the_default_of_the_library() -> None:
    from peft import LoraConfig

    tuned = config.load_config("head_bert", ["tuning.method=lora", "tuning.r=4"]).tuning.settings
    library = LoraConfig()
    assert tuned.r == 4 and (tuned.lora_alpha, tuned.lora_dropout) == (library.lora_alpha, library.lora_dropout)
    assert lora.Settings().r == library.r and tuned.bias == library.bias
    shown = describing.show_config(config.parse_config(changed("training.seed", 1)))
    assert "  # max_steps: -1\n" in shown and "# seed" not in shown and "# learning_rate" not in shown
    assert "gradient_accumulation_steps" not in shown, "global_batch_size decides"
    assert yaml.safe_load(shown) == config.parse_config(changed("training.seed", 1)).to_dict()


def test_a_thousand_may_be_written_1e3(tmp_path: Path) -> None:
    settings = config.load_config(write(tmp_path, GOOD), ["training.max_steps=1e3", "prompt.max_source_length=1e3"])
    assert repr(settings.training.arguments["max_steps"]) == repr(settings.prompt.max_source_length) == "1000"


def test_another_method_drops_the_old_keys(tmp_path: Path) -> None:
    new = config.load_config(write(tmp_path, GOOD), ["tuning.method=ptuning", "tuning.num_virtual_tokens=4"])
    assert new.tuning.settings.num_virtual_tokens == 4
    same = config.load_config(write(tmp_path, GOOD), ["tuning.method=lora", "tuning.r=2"])
    assert (same.tuning.settings.r, same.tuning.settings.lora_alpha) == (2, 16)


@pytest.mark.parametrize("override", ["training.learning_rate", "=3", "prompt.style.deep=3"])
def test_broken_overrides(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        config.load_config(write(tmp_path, GOOD), [override])


def test_aliases_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = changed("training.evaluation_strategy", "epoch")
    loaded = config.load_config(write(tmp_path, values))
    assert loaded.training.arguments["eval_strategy"] == "epoch"
    assert capsys.readouterr().err == "note: training.evaluation_strategy is called training.eval_strategy here\n"
    values["training"]["eval_strategy"] = "steps"
    with pytest.raises(ConfigError, match="another name for"):
        config.load_config(write(tmp_path, values))


def test_every_alias_leads_somewhere() -> None:
    own = {
        "data": config.DataConfig,
        "prompt": config.PromptConfig,
        "model": config.ModelConfig,
        "training": config.TrainingConfig,
    }
    for (section, old), new in config.ALIASES.items():
        target, _, name = new.partition(".")
        assert target == section, old
        known = set(own[section].__dataclass_fields__) if section in own else {"method"}  # type: ignore[attr-defined]
        if section == "training":
            known |= set(installed_versions.training())
        if section == "tuning":
            known |= {f for m in variants.names("tuning") for f in Method.named(m).Settings.__annotations__}
        assert name in known, new
        assert old not in known, old


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not YAML"),
        ("- a\n- b", "must hold sections"),
        ("", "is empty"),
        ("a: 1\na: 2", "stands twice"),
        ("extends: c.yaml\nout: x", "extends itself"),
        ("extends: nowhere.yaml", "no such config"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load_config(write(tmp_path, text))


def test_yaml_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("out: 输出".encode("gbk"))
    with pytest.raises(ConfigError, match=r"not UTF-8 .*at byte 5"):
        config.load_config(path)


def test_extends_states_only_what_differs(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    write(tmp_path, {"extends": "base.yaml", "training": {"learning_rate": 1e-5}}, "middle.yaml")
    leaf = config.load_config(write(tmp_path, {"extends": "middle.yaml", "out": "leaf"}, "leaf.yaml"))
    assert config.load_config(tmp_path / "middle.yaml").out == "runs/middle", "not the run of what it extends"
    assert leaf.training.arguments == {"learning_rate": 1e-5, "num_train_epochs": 1}
    assert (leaf.out, leaf.tuning.settings.r) == ("leaf", 8)


@pytest.mark.parametrize("name", ["lora_llama", "lora_llama.yaml", "recipes/lora/lora_llama.yaml"])
def test_recipes_are_found_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "/" not in name:
        monkeypatch.chdir(tmp_path)
    assert config.find_recipe(name).name == "lora_llama.yaml"


def test_unknown_recipe_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'lora_llama\.yaml'"):
        config.find_recipe("lora_lama.yaml")


def test_foreign_names_are_the_library_s() -> None:
    from transformers import GenerationConfig, TrainingArguments

    assert set(installed_versions.training()) == {
        f for f in TrainingArguments.__dataclass_fields__ if f != "output_dir"
    }
    assert set(installed_versions.generation()) == {
        name for name in vars(GenerationConfig()) if not name.startswith("_")
    }
    assert {*sections.TrainingArguments.__annotations__} <= {*installed_versions.training()}
    assert {*sections.GenerationOptions.__annotations__} <= {*installed_versions.generation()}


@dataclass(frozen=True)
class Plain:
    """As a user's own method may state its settings: without pydantic's decorator."""

    ratio: float = 0.0
    sizes: tuple[int, ...] = ()
    rank: Annotated[int, Field(ge=1)] = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    name: tuple[str, ...] | str | None = None


@pytest.mark.parametrize(
    ("values", "result"),
    [
        ({"ratio": 3, "sizes": [1, 2]}, Plain(3.0, (1, 2))),
        ({"more": {"a": [1]}, "name": "x"}, Plain(more={"a": [1]}, name="x")),
        ({"name": ["a"]}, Plain(name=("a",))),
        ({"rank": 0}, "tuning.rank: should be greater than or equal to 1, got 0"),
        ({"rank": "8"}, "tuning.rank: should be a valid integer, got '8'"),
        ({"sizes": [1, "x"], "rank": True}, "tuning.sizes[1]: should be a valid integer, got 'x'"),
        ({"name": 3}, "tuning.name: should be a valid array, got 3"),
        ({"rnak": 3}, "tuning.rnak: unknown key, did you mean 'rank'?"),
    ],
)
def test_settings_without_pydantic_are_checked_too(values: dict[str, Any], result: Any) -> None:
    problems = Problems()
    built = build(Plain, values, "tuning", problems)
    assert built == (None if isinstance(result, str) else result)
    assert problems[:1] == ([result] if isinstance(result, str) else [])


def test_what_transformers_names_has_its_types_and_defaults() -> None:
    """The ranges in `schema.py` are of the type that the installed version has."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    for name, narrowed in typing.get_type_hints(sections.TrainingArguments).items():
        kinds = {float if hint is int and hints[name] is float else hint for hint in typing.get_args(narrowed)}
        assert (kinds or {narrowed}) <= {hints[name], *typing.get_args(hints[name]), typing.Literal[-1]}, name
    for name, described in describing.section_schema(installed_versions.arguments("training"))["properties"].items():
        assert TrainingArguments.__dataclass_fields__[name].default == described.get("default", mock.ANY), name


def test_editors_see_what_the_reader_sees(capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped recipes fit the JSON Schema; mistakes that `train` refuses do not."""
    assert not __main__.main(["train", "--schema"])
    recipe = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(recipe)
    validator = jsonschema.Draft202012Validator(recipe)
    recipes = [path for folder in config.recipe_folders() for path in folder.rglob("*.yaml")]
    for path in recipes:
        validator.validate(json.loads(json.dumps(documents.read_yaml(path))))
    validator.validate(config.parse_config(GOOD).to_dict())
    validator.validate(changed("tuning", {"method": "my_lab.norms", "final": True}))
    wrong = [("tuning.r", "8"), ("tuning.rr", 8), ("tuning.num_virtual_tokens", 8), ("training.learning_rate", 0),
             ("training.learning_rat", 1e-4), ("generation.mode", "guess"), ("prompt.shots", -1), ("genration", {}),
             ("generation.max_new_tokens", "many"), ("data.train", 3)]  # fmt: skip
    assert [key for key, value in wrong if validator.is_valid(changed(key, value))] == []
    learning_rate = recipe["properties"]["training"]["properties"]["learning_rate"]
    assert learning_rate["default"] == 5e-5 and "optimizer" in learning_rate["description"]


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "  tuning.r  (integer, 1 to 65,536; 8)\n      Rank of the updates.\n" in shown
    own = [(section, field.name) for section, cls in sections.SECTIONS.items() for field in dataclasses.fields(cls)]
    hidden = {"method", "settings", "arguments"}
    assert [name for section, name in own if f"  {section}.{name}  (" not in shown and name not in hidden] == []


def test_every_setting_has_help() -> None:
    methods = [Method.named(name).Settings for name in variants.names("tuning")]
    for cls in [cls for name, cls in sections.SECTIONS.items() if name != "tuning"] + methods:
        assert [key.name for key in describing.keys(cls) if not key.help] == [], cls


def test_variants_are_files() -> None:
    assert all(not name.startswith("_") for name in variants.names("tuning"))


# --- records and JSON lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f.jsonl:2: broken JSON"),
        ("[1]", "f.jsonl:2: a JSON object is needed"),
        ('{"id": "q:2"}', "f.jsonl:2: not a Question: stem: required key is missing; options: required"),
        (json.dumps({**QUESTION, "id": "q:1"}), "f.jsonl:2: duplicate id 'q:1', first on line 1"),
        (json.dumps({**QUESTION, "id": 2}), "f.jsonl:2: not a Question: id: should be a valid string, got 2"),
        (json.dumps({**QUESTION, "id": "b", "answer": ["A"]}), "answer: should be a valid string, got ['A']"),
        (json.dumps({**QUESTION, "id": "b", "options": ["x"]}), "options: should be an object, got ['x']"),
        (json.dumps({**QUESTION, "id": "b", "answer": "C"}), "answer 'C' names C, options are AB"),
        (json.dumps({**QUESTION, "id": "b", "answer": "BA"}), "not made of sorted distinct letters"),
        (json.dumps({**QUESTION, "id": "b", "answer": ""}), "not made of sorted distinct letters"),
        (json.dumps({**QUESTION, "id": "b", "stem": " "}), "id and stem must not be empty"),
        (json.dumps({**QUESTION, "id": "b", "options": {"A": "x"}}), "1 options, 2 to 10 are possible"),
        (json.dumps({**QUESTION, "id": "b", "options": {"A": "x", "b": "y"}}), "'b' is not one of A to Z"),
        (json.dumps({**QUESTION, "id": "b", "kind": "both"}), "kind: 'both' is not a choice; known: single, multiple"),
    ],
)
def test_broken_lines(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(QUESTION) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(jsonl.read(path, Question))
    assert message in str(caught.value)


def test_other_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"question_id": "\xc4\xe3"}\n')
    with pytest.raises(DataError, match=r"f.jsonl:1: not UTF-8"):
        list(jsonl.read(path, Prediction))
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match="only blank lines"):
        list(jsonl.read(path, Prediction))
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        list(jsonl.read(path, Prediction))
    with pytest.raises(UserError, match="is a folder"):
        list(jsonl.read(tmp_path, Prediction))
    with pytest.raises(UserError, match="no such file"):
        list(jsonl.read(tmp_path / "g.jsonl", Prediction))


def test_records_round_trip(tmp_path: Path) -> None:
    questions = [
        Question("a", "题", {"A": "甲", "B": "\u2028乙"}, "AB", None, "multiple", {"Difficulty level": "1"}),
        Question("b", "题", {"A": "1 mg/kg", "F": "乙"}, None),
    ]
    path = tmp_path / "deep" / "q.jsonl"
    assert jsonl.write(path, questions) == 2
    assert list(jsonl.read(path, Question)) == questions
    assert list(json.loads(path.read_text(encoding="utf-8").split("\n")[0])) == [
        "id", "stem", "options", "answer", "explanation", "kind", "facets",
    ]  # fmt: skip
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(jsonl.read(path, Question)) == questions
    with pytest.raises(UserError, match="--overwrite"):
        jsonl.write(path, questions)
    assert jsonl.write(path, questions[:1], overwrite=True) == 1
    assert [p.name for p in path.parent.iterdir()] == ["q.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.atomic_write(path) as handle:
        handle.write("new")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_letters() -> None:
    assert letters("cAc") == "AC"


# --- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("no"), 2, "error: no\n"),
        (TrainingStopped("loss"), 1, "stopped: loss\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 2, "error: /x: No space left on device."),
        (MemoryError(), 2, "error: this machine's memory is too small for this. Split large files"),
    ],
)
def test_exit_statuses(error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: Any) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        cli.run(main, [])
    assert caught.value.code == status
    assert capsys.readouterr().err.startswith(message)


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.run(lambda argv: 1 // 0, [])
    with pytest.raises(OSError, match="weird"):
        cli.run(lambda argv: (_ for _ in ()).throw(OSError(errno.EIO, "weird")), [])


def test_the_command_lists_its_programs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-m", "cmexam_tune", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0
    assert all(name in done.stdout for name in __main__.PROGRAMS)
    assert run_program().returncode == 2
    wrong = run_program("trian")
    assert wrong.returncode == 2 and "did you mean 'train'" in wrong.stderr


@pytest.mark.parametrize("program", list(__main__.PROGRAMS))
def test_every_program_has_help_and_refuses_unknown_flags(program: str) -> None:
    helped = run_program(program, "--help")
    assert helped.returncode == 0, helped.stderr
    assert f"cmexam-tune {program}" in helped.stdout
    wrong = run_program(program, "--no-such-flag")
    assert wrong.returncode == 2


def test_a_prompt_file_that_an_override_names_is_not_the_recipe_s_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^prompt\.file: nowhere\.yaml: no such file"):
        config.load_config(write(tmp_path, GOOD), ["prompt.file=nowhere.yaml"])
