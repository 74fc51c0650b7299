"""The original CMExam repository's command lines, translated into command lines of `cmexam-tune`.

The scripts in `preprocess/`, `ptuning/` and `lora/` are tables of flags (`Script`); nothing is run here. A target of a
flag is one or more config keys, or one of: @input and @styles (preprocess), @train and @predict (which program),
@questions, @run (a trained run, an adapter or a prefix checkpoint), @use_run (whether to use it), @folder and @file (of
the predictions), @accumulation.
"""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cmexam_tune import config
from cmexam_tune.config import installed_versions
from cmexam_tune.core import cli
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.variants import suggest

Flags = Mapping[str, str]
Command = list[str]
"""The words of a command line, without `cmexam-tune`."""
VALUES = {"med_template": "cmexam_lora"}
"""Names of the original repository for a value that has another name here."""


@dataclass(frozen=True)
class Script:
    """A script of the original repository: its flags, and what they are here."""

    flags: Flags
    """Flag -> targets; names of `TrainingArguments` need no entry."""
    ignored: Flags = field(default_factory=dict)
    """Flag -> why it has no effect here."""
    recipe: str | None = None
    """What holds where no flag says otherwise; None: the script makes prompts."""
    predicts: bool = False
    """Whether the script only predicts."""

    def commands(self, words: Sequence[str]) -> list[Command]:
        """Return the command lines that do what the script's command line `words` asks for, in order.

        Raises:
            UserError: an unknown flag, a value that cannot be, or data that cannot be found.
        """
        if self.recipe is None:
            return [_preprocess(_Translation(parse(words, list(self.flags)), self))]
        known_flags = [*self.flags, *self.ignored, *installed_versions.training(), *_aliases()]
        line = _Translation(parse(words, known_flags), self)
        predict = self.predicts or line.asks("@predict")
        commands = []
        if line.asks("@train") if "@train" in line.special else not predict:
            commands.append(["train", "--config", self.recipe, *line.overrides])
            line.special["@run"] = line.value("out") or config.load_config(self.recipe).out
        if predict:
            commands.append(_predict(self.recipe, line, trained=bool(commands)))
        return [*line.preparations, *commands]

    def usage(self) -> str:
        """Return the table of the script's flags and what they are here."""
        rows = [f"  --{name:<30}{target}" for name, target in self.flags.items()]
        rows += [f"  --{name:<30}no effect: {reason}" for name, reason in self.ignored.items()]
        head = "The flags of the original CMExam repository (--FLAG VALUE), and what they set here:"
        recipe = f"Recipe: {self.recipe}; every flag of transformers' TrainingArguments is known too."
        return "\n".join([head, *rows, *(["", recipe] if self.recipe else [])])


def parse(argv: Sequence[str], known_flags: Sequence[str]) -> dict[str, str]:
    """Return flags and values of `--name value`, `--name=value` and bare `--name` (true); the last one counts.

    Raises:
        ConfigError: a flag that is not in `known_flags`, or a value without a flag.
    """
    flags: dict[str, str] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_").partition("=")
            if equals:
                value = word.partition("=")[2]
            if name not in known_flags:
                raise ConfigError(f"--{name}: unknown flag{suggest(name, known_flags)}.")
            flags[name] = value if equals else "true"
            name = "" if equals else name
        elif name:
            flags[name], name = word, ""
        else:
            raise ConfigError(f"{word!r}: a value without a flag before it.")
    return flags


class _Translation:
    """One command line: config overrides, the values of the special (@) targets, and what must be done before."""

    def __init__(self, flags: Flags, script: Script) -> None:
        self.overrides: list[str] = []
        self.special: dict[str, str] = {}
        self.preparations: list[Command] = []
        for name, value in flags.items():
            if name in script.ignored:
                cli.note(f"note: --{name}: {script.ignored[name]}")
                continue
            value = _available(name, VALUES.get(value, value))
            for target in script.flags.get(name, f"training.{name}").split():
                self._set(target, value)
        if "@accumulation" in self.special or "per_device_train_batch_size" in flags:
            # Their scripts count a step in micro-batches of one card, our recipes in questions over all of them.
            questions = _count("per_device_train_batch_size", flags.get("per_device_train_batch_size", "8"))
            questions *= _count("gradient_accumulation_steps", self.special.pop("@accumulation", "1"))
            self.overrides.append(f"training.global_batch_size={questions}")

    def _set(self, target: str, value: str) -> None:
        if target.startswith("@"):
            self.special[target] = value
        elif target in ("data.train", "data.validation", "data.test"):
            file, style = self.questions(value)
            self.overrides.append(f"{target}={file}")
            if style and target == "data.train":
                self.overrides.append(f"prompt.style={style}")
        else:
            self.overrides.append(f"{target}={value}")

    def asks(self, target: str) -> bool:
        """Whether a flag without a value, or with a true one, was given."""
        return self.special.get(target, "false").lower() not in ("false", "0", "no")

    def value(self, key: str) -> str | None:
        """Return the last value given for a config key."""
        return dict(override.partition("=")[::2] for override in self.overrides).get(key)

    def questions(self, path: str) -> tuple[str, str | None]:
        """Return the questions file behind a data file of the original scripts, and the template its name carries.

        A questions file is itself; a CSV is preprocessed beside itself; for rendered prompts (`train_prompt_1.json`,
        there or not) the questions beside them are taken, because only they let options and answers be kept whole.

        Raises:
            DataError: there are only rendered prompts; the message says which command makes the questions.
        """
        file = Path(path)
        if file.is_file() and _is_questions(file):
            return path, None
        match = re.fullmatch(r"(.+?)(?:_prompt(?:_(\w+))?)?", file.stem)
        base, style = (match[1], match[2]) if match else (file.stem, None)
        for candidate in (file, *(file.with_name(base + suffix) for suffix in (".questions.jsonl", ".csv", ".xlsx"))):
            if candidate.is_file() and candidate.suffix in (".csv", ".xlsx"):
                return self._preprocessed(candidate), style
            if candidate.is_file() and _is_questions(candidate):
                cli.note(f"note: {path}: reading its questions, {candidate}")
                return str(candidate), style
        only_prompts = " (rendered prompts only)" if file.is_file() else ""
        raise DataError(
            f"{path}: no questions here{only_prompts}. Make them from the released CSV: python "
            f"preprocess/generate_prompt.py --filepath {file.with_name(base + '.csv')} --templates 1"
        )

    def _preprocessed(self, raw: Path) -> str:
        target = raw.with_name(f"{raw.stem}.questions.jsonl")
        command = ["preprocess", "cmexam", "--input", str(raw), "--out", str(raw.parent)]
        if not target.is_file() and command not in self.preparations:
            self.preparations.append(command)
        return str(target)


def _is_questions(file: Path) -> bool:
    with file.open("rb") as handle:
        try:
            first = json.loads(handle.readline())
        except (json.JSONDecodeError, UnicodeDecodeError):
            return False
    return isinstance(first, dict) and "stem" in first


def _available(name: str, value: str) -> str:
    if name == "report_to" and value not in ("none", "all") and importlib.util.find_spec(value) is None:
        cli.note(f"note: --report_to {value}: {value} is not installed, so nothing is reported to it")
        return "none"
    return value


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise ConfigError(f"--{name} {text}: a whole number above 0 is needed.")
    return int(text)


def _preprocess(line: _Translation) -> Command:
    if "@input" not in line.special:
        raise UserError("--filepath: name the CSV, for example --filepath data/train.csv --templates 1,4")
    raw, styles = Path(line.special["@input"]), line.special.get("@styles", "1,2")
    return ["preprocess", "cmexam", "--input", str(raw), "--out", str(raw.parent), "--styles", styles]


def _predict(recipe: str, line: _Translation, trained: bool) -> Command:
    """Return the command line of `cmexam-tune predict`: with what this command trained, what it names, or the base."""
    named = line.special.get("@questions")
    questions = line.questions(named)[0] if named else line.value("data.test")
    if not questions:
        raise UserError("no questions to predict: name them with --test_file (ptuning) or --instruct_dir (lora).")
    folder = Path(line.special.get("@folder") or line.value("out") or "output")
    file = folder / Path(line.special.get("@file", "generated_predictions.jsonl")).with_suffix(".jsonl")
    command = ["predict", "--questions", questions, "--out", str(file)]
    if "@run" not in line.special or ("@use_run" in line.special and not line.asks("@use_run")):
        return [*command, "--config", recipe, *line.overrides]
    weights = Path(line.special["@run"])
    run = weights.parent if weights.name.startswith("checkpoint-") and not _is_run(weights) else weights
    if not trained and not _is_run(run):
        return [*command, "--config", recipe, f"model.adapter_name_or_path={weights}", *line.overrides]
    if run != weights:
        cli.note(f"note: {weights}: predicting with what its run ended on, {run}/adapter")
    return [*command, "--run", str(run), *(o for o in line.overrides if o.startswith("generation."))]


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _aliases() -> list[str]:
    return [old for section, old in config.ALIASES if section == "training"]
