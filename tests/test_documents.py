"""JSON and YAML of others: plain values, or one DataError that names the place; never a traceback, never a hang."""

import time
from pathlib import Path

import pytest

from cmexam_tune import config
from cmexam_tune.core import documents, jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import Prediction

DEEP = 100_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)

MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "broken JSON"),
        ('{"a": 1,\n}', "line 2"),
        ("[" * DEEP + "]" * DEEP, "nested too deep"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "nested too deep"),
        ("[" * 101 + "]" * 101, "nested too deep"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ('{"a": "\\ud83d"}', "half of a surrogate pair"),
        ('{"a": ' + "9" * 6000 + "}", "6000 digits"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e400}', "1e400"),
    ],
)
def test_broken_json(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        documents.read_json(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 500
    path.write_text('{"question_id": "a", "text": ""}\n' + text.replace("\n", "") + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        list(jsonl.read(path, Prediction))
    assert str(caught.value).startswith(f"{path}:2: ")


def test_good_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('\ufeff{"a": [1e3, "\\ud83d\\ude00", 1000000000000000019884624838656, {"b": null}]}')
    assert documents.read_json(path) == {"a": [1000.0, "😀", 1000000000000000019884624838656, {"b": None}]}
    assert documents.parse_json("[NaN]", "x", finite=False) != []
    with pytest.raises(DataError, match="an array is needed, found dict"):
        documents.read_json(path, kind=list)
    path.write_bytes(b"{}" + b" " * documents.MAX_JSON)
    with pytest.raises(DataError, match="at most 67,108,864"):
        documents.read_json(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "do its aliases"),
        (MERGES, "aliases"),
        ("a: &a [*a]", "nested too deep"),
        ("[" * (DEEP // 10) + "]", "nested too deep"),
        ("\n".join(" " * i + "a:" for i in range(150)), "nested too deep"),
        ("a: 1\nb: 2\na: 3", "'a' stands twice"),
        ("data: 2020-13-45", "month must be in 1..12"),
        ("lr: .nan", "nan is no number"),
        ("lr: 1e400", "inf is no number"),
        ("a: [x, {b: .inf}]", "inf is no number"),
        ("a: " + "9" * 6000, "4300 digits"),
        ('a: "\\ud83d"', "half of a surrogate pair|invalid Unicode character escape"),
        ("a: !!python/object/apply:os.system [ls]", "not YAML"),
        ("? [a]\n: b", "not YAML"),
        ("a: \x07", "not YAML"),
    ],
)
def test_broken_yaml(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    start = time.perf_counter()
    with pytest.raises(DataError, match=message):
        documents.read_yaml(path)
    with pytest.raises(ConfigError, match=message):
        config.load_config(path)
    assert time.perf_counter() - start < 20


def test_good_yaml() -> None:
    assert documents.parse_yaml("a: &a {lr: 2e-2, 1: x}\nb: {<<: *a, lr: 1}\n", "x") == {
        "a": {"lr": 0.02, 1: "x"},
        "b": {"lr": 1, 1: "x"},
    }
    assert documents.parse_yaml("", "x") is None


@pytest.mark.parametrize("path", ["runs/a #1", "runs/a: b", "runs/{a}", "[a]/b", "runs/2020-13-45", "1e5", "no", "*a"])
def test_a_path_is_taken_letter_by_letter(path: str) -> None:
    words = [
        f"out={path}",
        f"model.base_model={path}",
        f"data.cache_dir={path}",
        "prompt.style=1",
        "prompt.system=null",
    ]
    got = config.load_config("lora_llama", words)
    assert (got.out, got.model.model_name_or_path, got.data.cache_dir) == (path, path, path)
    assert (got.prompt.style, got.prompt.system) == ("1", None)
    if not path.startswith("["):
        assert config.load_config("lora_llama", [f"data.train={path}"]).data.train == (path,)
    assert config.load_config("lora_llama", [f"data.train=[x, '{path}']"]).data.train == ("x", path)


@pytest.mark.parametrize(
    "word", ["training.learning_rate=.nan", "model.config={a: 1e400}", "training.seed=" + "9" * 6000]
)
def test_values_of_overrides_are_read_like_files(word: str) -> None:
    with pytest.raises(UserError, match=word.partition("=")[0].replace(".", r"\.")):
        config.load_config("lora_llama", [word])
