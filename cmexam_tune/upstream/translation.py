"""The original CMExam repository's command lines, translated into a recipe and its overrides.

The scripts in `preprocess/`, `ptuning/` and `lora/` are tables of flags; this module reads them. A target of a flag is
one or more config keys, or one of: @input and @styles (preprocess), @train and @predict (which program), @questions,
@run (a trained run, an adapter or a prefix checkpoint), @use_run (whether to use it), @folder and @file (of the
predictions), @accumulation, @overwrite.
"""

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cmexam_tune.core import cli, config
from cmexam_tune.core.config import external
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.variants import suggest

Flags = Mapping[str, str]
VALUES = {"med_template": "cmexam_lora"}
"""Names of the original repository for a value that has another name here."""


def parse(argv: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return flags and values of `--name value`, `--name=value` and bare `--name` (true); the last one counts.

    Raises:
        ConfigError: a flag that is not `known`, or a value without a flag.
    """
    given: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_").partition("=")
            if equals:
                value = word.partition("=")[2]
            if name not in known:
                raise ConfigError(f"--{name}: unknown flag{suggest(name, known)}.")
            given[name] = value if equals else "true"
            name = "" if equals else name
        elif name:
            given[name], name = word, ""
        else:
            raise ConfigError(f"{word!r}: a value without a flag before it.")
    return given


def questions(path: str) -> tuple[str, str | None]:
    """Return the questions file behind a data file of the original scripts, and the template its name carries.

    A questions file is itself; a CSV is preprocessed beside itself; for rendered prompts (`train_prompt_1.json`, there
    or not) the questions beside them are taken, because only they let options and answers be kept whole.

    Raises:
        DataError: there are only rendered prompts; the message says which command makes the questions.
    """
    file = Path(path)
    if file.is_file() and _is_questions(file):
        return path, None
    found = re.fullmatch(r"(.+?)(?:_prompt(?:_(\w+))?)?", file.stem)
    base, style = (found[1], found[2]) if found else (file.stem, None)
    for candidate in (file, *(file.with_name(base + suffix) for suffix in (".questions.jsonl", ".csv", ".xlsx"))):
        if candidate.is_file() and candidate.suffix in (".csv", ".xlsx"):
            return _preprocessed(candidate), style
        if candidate.is_file() and _is_questions(candidate):
            cli.note(f"note: {path}: reading its questions, {candidate}")
            return str(candidate), style
    raise DataError(
        f"{path}: no questions here{' (rendered prompts only)' if file.is_file() else ''}. Make them from the released "
        f"CSV: python preprocess/generate_prompt.py --filepath {file.with_name(base + '.csv')} --templates 1"
    )


def _is_questions(file: Path) -> bool:
    with file.open("rb") as handle:
        try:
            first = json.loads(handle.readline())
        except (json.JSONDecodeError, UnicodeDecodeError):
            return False
    return isinstance(first, dict) and "stem" in first


def _preprocessed(raw: Path) -> str:
    target = raw.with_name(f"{raw.stem}.questions.jsonl")
    if not target.is_file():
        _call("preprocess", ["cmexam", "--input", str(raw), "--out", str(raw.parent)])
    return str(target)


def translate(given: Mapping[str, str], flags: Flags, gone: Flags) -> tuple[list[str], dict[str, str]]:
    """Return config overrides for the flags that were given, and the values of the special (@) targets."""
    overrides: list[str] = []
    special: dict[str, str] = {}
    for name, value in given.items():
        if name in gone:
            cli.note(f"note: --{name}: {gone[name]}")
            continue
        value = _usable(name, VALUES.get(value, value))
        for target in flags.get(name, f"training.{name}").split():
            if target.startswith("@"):
                special[target] = value
            elif target.startswith("data.") and not target.startswith("data.max"):
                file, style = questions(value)
                overrides.append(f"{target}={file}")
                if style and target == "data.train":
                    overrides.append(f"prompt.style={style}")
            else:
                overrides.append(f"{target}={value}")
    if "@accumulation" in special or "per_device_train_batch_size" in given:
        rows = int(given.get("per_device_train_batch_size", "8")) * int(special.pop("@accumulation", "1"))
        overrides.append(f"training.global_batch_size={rows}")
    return overrides, special


def _usable(name: str, value: str) -> str:
    if name == "report_to" and value not in ("none", "all") and importlib.util.find_spec(value) is None:
        cli.note(f"note: --report_to {value}: {value} is not installed, so nothing is reported to it")
        return "none"
    return value


def run(recipe: str, flags: Flags, gone: Flags, argv: Sequence[str] | None = None, predict: bool = False) -> None:
    """Answer a command line of `ptuning/main.py`, `lora/finetune.py` or `lora/infer.py`, and exit.

    Args:
        recipe: what holds where no flag says otherwise.
        flags: flag -> targets; names of `TrainingArguments` need no entry.
        gone: flag -> why it has no effect here.
        argv: the command line without the program's name.
        predict: this script only predicts.
    """

    def main(words: Sequence[str]) -> int | None:
        if set(words) & {"-h", "--help"}:
            cli.say(usage(recipe, flags, gone))
            return None
        given = parse(words, [*flags, *gone, *external.training(), *_aliases()])
        overrides, special = translate(given, flags, gone)
        if special.get("@train", "true") != "false" and ("@train" in special or not (predict or "@predict" in special)):
            extra = ["--overwrite"] if "@overwrite" in special else []
            _call("train", ["--config", recipe, *extra, *overrides])
        if predict or "@predict" in special:
            _call("predict", predict_arguments(recipe, overrides, special))
        return None

    cli.run(main, argv)


def predict_arguments(recipe: str, overrides: Sequence[str], special: Mapping[str, str]) -> list[str]:
    """Return the arguments of `cmexam-tune predict` for a translated command line.

    Raises:
        UserError: no file to predict was named.
    """
    values = dict(override.partition("=")[::2] for override in overrides)
    asked = special.get("@questions") or values.get("data.test")
    if not asked:
        raise UserError("no questions to predict: name them with --test_file (ptuning) or --instruct_dir (lora).")
    folder = Path(special.get("@folder") or values.get("out", "output"))
    file = folder / Path(special.get("@file", "generated_predictions.jsonl")).with_suffix(".jsonl")
    arguments = ["--questions", questions(asked)[0], "--out", str(file)]
    weights = Path(special.get("@run", ""))
    if "@run" not in special or special.get("@use_run", "true").lower() == "false":
        return ["--config", recipe, *arguments, *overrides]
    trained = weights.parent if weights.name.startswith("checkpoint-") and not _is_run(weights) else weights
    if not _is_run(trained):
        return ["--config", recipe, *arguments, f"model.adapter_name_or_path={weights}", *overrides]
    if trained != weights:
        cli.note(f"note: {weights}: predicting with what its run ended on, {trained}/adapter")
    return ["--run", str(trained), *arguments, *(o for o in overrides if o.startswith("generation."))]


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def prompts(flags: Flags, argv: Sequence[str] | None = None) -> None:
    """Answer a command line of `preprocess/generate_prompt.py`: questions and prompts beside the CSV; then exit."""

    def main(words: Sequence[str]) -> int | None:
        if set(words) & {"-h", "--help"}:
            cli.say(usage("", flags, {}))
            return None
        given = parse(words, list(flags))
        _, special = translate(given, flags, {})
        if "@input" not in special:
            raise UserError("--filepath: name the CSV, for example --filepath data/train.csv --templates 1,4")
        raw = Path(special["@input"])
        styles = special.get("@styles", "1,2")
        _call("preprocess", ["cmexam", "--input", str(raw), "--out", str(raw.parent), "--styles", styles])
        return None

    cli.run(main, argv)


def usage(recipe: str, flags: Flags, gone: Flags) -> str:
    """Return the table of a script's flags and what they are here."""
    rows = [f"  --{name:<30}{target}" for name, target in flags.items()]
    rows += [f"  --{name:<30}no effect: {reason}" for name, reason in gone.items()]
    head = f"usage: python {Path(sys.argv[0]).name} --FLAG VALUE ...\n\n"
    more = f"\n\nRecipe: {recipe}; every flag of transformers' TrainingArguments is known too." if recipe else ""
    return head + "The flags of the original CMExam repository, and what they set here:\n" + "\n".join(rows) + more


def _aliases() -> list[str]:
    return [old for section, old in config.ALIASES if section == "training"]


def _call(program: str, arguments: Sequence[str]) -> None:
    cli.note(f"$ cmexam-tune {program} {' '.join(arguments)}")
    module = importlib.import_module(f"cmexam_tune.{program}")
    if status := module.main(arguments):
        sys.exit(status)
