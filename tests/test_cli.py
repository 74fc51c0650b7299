"""Command lines made of signatures (`core/cli.py`): python -m pytest tests/test_cli.py"""

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import docs_commands
import pytest

from cmexam_tune import __main__
from cmexam_tune.core import cli
from cmexam_tune.core.cli import File, Flag, Folder, Override


def work(
    files: "Sequence[str | Path]",
    out: str | Path | None = None,
    *,
    mode: Literal["plain", "rich"] = "plain",
    limit: int | None = None,
    share: float = 0.5,
    drop: Annotated[Sequence[str], Flag("a,b", separator=",")] = ("near",),
    seeds: bool | None = None,
    overwrite: bool = False,
) -> None:
    """Not shown.

    Args:
        files: what is read,
            from any folder.
        out: not shown, because the program says it.
        mode: how.
        limit: only the first so many.
        share: of 100% of them.
        drop: reasons.
        seeds: whether there are several.
        overwrite: replace.

    Raises:
        UserError: not shown.
    """


calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


@cli.program(work, lambda: "examples:\n  made when they are shown")
def program(
    exam: str,
    /,
    *overrides: Override,
    files: Annotated[Sequence[File], Flag(names=("--input", "-i"))],
    out: Folder | None = None,
    **options: Any,
) -> int | None:
    """Work on files.

    Args:
        exam: its format.
        out: where to.
    """
    calls.append(((exam, *overrides), {"files": files, "out": out, **options}))
    if out == "both":
        raise cli.WrongUsage("not both.")
    return None


def called(*words: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    calls.clear()
    assert program(["x", *words]) is None
    return calls[0]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        program(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_only_what_is_given_is_passed_on() -> None:
    """What is not on the command line is left to the function, whose defaults stand in one place."""
    assert called("--input", "a", "b") == (("x",), {"files": ["a", "b"], "out": None})


def test_types() -> None:
    words = "-i a --mode rich --limit 3 --share 0.25 --drop near,exact --no-seeds --overwrite --out DIR"
    _, flags = called(*words.split())
    assert flags == {
        "files": ["a"],
        "out": "DIR",
        "mode": "rich",
        "limit": 3,
        "share": 0.25,
        "drop": ["near", "exact"],
        "seeds": False,
        "overwrite": True,
    }


@pytest.mark.parametrize(
    "words",
    [
        "a.b=1 --input f g --out o c.d=2",
        "--input f g a.b=1 c.d=2 --out o",
        "--input f --input g a.b=1 --out o c.d=2",
        "--out o --input f a.b=1 g c.d=2",
    ],
)
def test_overrides_stand_anywhere(words: str) -> None:
    positional, flags = called(*words.split())
    assert (sorted(positional[1:]), flags) == (["a.b=1", "c.d=2"], {"files": ["f", "g"], "out": "o"})


def test_a_file_with_an_equals_sign_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.jsonl").touch()
    assert called("--input", "lr=1.jsonl", "a.b=1") == (("x", "a.b=1"), {"files": ["lr=1.jsonl"], "out": None})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("x", "required: --input"),
        ("--input f", "required: exam"),
        ("x --input f --limmit 3", "--limmit, did you mean '--limit'?"),
        ("x --input f --mode poor", "invalid choice: 'poor'"),
        ("x --input f --limit many", "invalid int value: 'many'"),
        ("x --input f --out both", "not both."),
        ("x --input a.b=1", "--input: expected at least one"),
    ],
)
def test_mistakes_are_one_message(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, *words.split())
    assert error.startswith("error: ") and message in error and error.endswith("\nSee cmexam-tune test_cli --help.\n")


def test_help_is_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        program(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "Not shown" not in shown and "not shown" not in shown
    for text in (
        "Work on files.",
        "exam its format",
        "--out DIR where to",
        "--input FILE [FILE ...], -i FILE [FILE ...] what is read, from any folder",
        "--share N of 100% of them (default: 0.5)",
        "--drop a,b reasons (default: near)",
        "--mode {plain,rich} how (default: plain)",
        "--seeds, --no-seeds whether there are several",
        "--overwrite replace examples: made when they are shown",
    ):
        assert text in shown, text


@pytest.mark.parametrize("name", __main__.PROGRAMS)
def test_every_flag_is_explained(name: str) -> None:
    """By its line in a docstring: nothing else says what a flag does."""
    with docs_commands.parsing_only(empty=True), pytest.raises(docs_commands.Parsed) as stopped:
        importlib.import_module(f"cmexam_tune.{name}").main([])
    assert [action.dest for action in stopped.value.parser._actions if len(action.help or "") < 8] == []


def test_help_of_light_programs_loads_nothing_slow() -> None:
    code = """import sys
from cmexam_tune import __main__
try:
    __main__.main([sys.argv[1], "--help"])
finally:
    print(*sys.modules)"""
    for name in ("evaluate", "stats", "check", "preprocess", "runs", "predict"):
        words = [sys.executable, "-c", code, name]
        loaded = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()[-1].split()
        assert "argparse" in loaded and not {"torch", "transformers", "matplotlib", "pandas"} & set(loaded), name


def test_programs_are_attributes_of_the_package() -> None:
    """In a process of its own: elsewhere other tests have imported the programs."""
    code = """
import sys, cmexam_tune
question = cmexam_tune.Question("q", "s", {"A": "x", "B": "y"}, "B")
report = cmexam_tune.evaluate([cmexam_tune.Prediction("q", "B")], [question])
assert report.overall["accuracy"] == 100
from cmexam_tune.predict import predict
from cmexam_tune import evaluate, predict as program
assert program.predict is predict and program is cmexam_tune.predict and callable(program) and program.main
for name in ("train", "preprocess", "export", "check", "stats", "annotate", "judge", "reproduce", "runs", "tiny"):
    assert callable(getattr(cmexam_tune, name)), name
assert not hasattr(cmexam_tune, "nothing") and not hasattr(cmexam_tune, "_tables") and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_out_of_memory_is_one_message_without_torch(tmp_path: Path) -> None:
    """A stand-in of torch's name, in a process that has not imported torch."""
    code = (
        "import sys\nfrom cmexam_tune.core import cli\nclass OutOfMemoryError(RuntimeError): pass\n"
        "def main(argv): raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.49 GiB.')\n"
        "try: cli.run(main, [])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "False\n"
    assert done.stderr.startswith("error: CUDA out of memory. Tried to allocate 2.49 GiB.\n")
    assert "generation.batch_size" in done.stderr and "training.per_device_train_batch_size" in done.stderr
    other = code.replace("OutOfMemoryError", "AnotherError")
    assert "Traceback" in subprocess.run([sys.executable, "-c", other], capture_output=True, text=True).stderr


def test_a_command_that_is_none_is_called_unknown(capsys):
    assert __main__.main(["evalute"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unknown command 'evalute'") and "evaluate" in said.splitlines()[0]
