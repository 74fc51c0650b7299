"""`cmexam-tune <program> ...` and `python -m cmexam_tune <program> ...`."""

import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from cmexam_tune.core import __version__, cli
from cmexam_tune.core.variants import suggest

if TYPE_CHECKING:  # it reads recipes, which half of the programs do not, and pydantic would double their start
    from cmexam_tune.interop.compat.cmexam_repo import Script

PROGRAMS = {
    "preprocess": "raw exam files into questions and prompts",
    "check": "duplicates, overlap with tests and suspicious questions",
    "stats": "Table 2 of the CMExam paper for any question files",
    "recipes": "find a recipe: base model, exam, method, hardware, row of a paper",
    "train": "tune a model by a recipe",
    "runs": "trained and unfinished runs: loss, accuracy, how to go on",
    "predict": "let a tuned or off-the-shelf model answer questions",
    "evaluate": "score predictions and write a report",
    "judge": "score answers to CMB-Clin's cases by models or people",
    "annotate": "let models propose CMExam's annotations, for people to review",
    "select": "training data made of sampled answers that the key has judged",
    "export": "write a run as a merged model or adapter",
    "compare": "a model before and after tuning, on questions of your own",
    "leaderboard": "a site that ranks sealed results of several systems",
    "reproduce": "whole rows of the papers, from raw file to table",
    "chat": "ask a trained model questions in the terminal",
    "serve": "an OpenAI-compatible endpoint for a trained model",
    "tiny": "tiny random models for machines without weights",
}


def usage() -> str:
    """Return the list of programs."""
    lines = [f"  {name:<12}{text}" for name, text in PROGRAMS.items()]
    return "\n".join(["usage: cmexam-tune PROGRAM ...", "", *lines, "", "cmexam-tune PROGRAM --help explains each."])


def main(argv: Sequence[str]) -> int | None:
    """Hand the rest of the command line to the program that it names."""
    if not argv or argv[0] in ("-h", "--help"):
        cli.say(usage())
        return 0 if argv else 2
    if argv[0] in ("--version", "version"):
        cli.say(__version__)
        return 0
    if argv[0] not in PROGRAMS:
        cli.note(f"error: unknown command {argv[0]!r}{suggest(argv[0], PROGRAMS)}.\n\n{usage()}")
        return 2
    status: int | None = importlib.import_module(f"cmexam_tune.{argv[0]}").main(argv[1:])
    return status


def answer(script: "Script") -> NoReturn:
    """Run the programs that a command line of the original CMExam repository translates to, and exit."""

    def translated(words: Sequence[str]) -> int | None:
        if set(words) & {"-h", "--help"}:
            cli.say(script.usage())
            return 0
        for command in script.commands(words):
            cli.note(f"$ cmexam-tune {shlex.join(command)}")
            if status := main(command):
                return status
        return 0

    cli.run(translated)


def entry() -> None:
    """Run `cmexam-tune` as the console script that setup.py installs."""
    cli.run(main)


if __name__ == "__main__":
    sys.argv[0] = "cmexam-tune"
    entry()
