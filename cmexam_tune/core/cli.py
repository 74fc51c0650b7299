"""Command lines made of signatures, and one place where errors become messages and exit statuses.

A flag is described once: its name, type and default are a parameter, its help is that parameter's line under `Args:`.

    @cli.program(check, EXAMPLES)
    def main(*, questions: Sequence[File], out: Folder, **options: Any) -> None:
        result = check(questions, out=out, **options)

turns `main` into `main(argv)`. Positional-only parameters of it are positional, `*overrides` takes the words
`section.key=value`, every other parameter is a flag; `**options` stands for the keyword-only parameters of `check`.
"""

# Own code, because none of tyro, cyclopts, jsonargparse and typer reads `--questions A B key=value --out DIR` in any
# order, and each of them adds 0.06 to 0.18 s of processor time to the start of every program.

import argparse
import functools
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from cmexam_tune.core import files
from cmexam_tune.core.errors import TrainingStopped, UserError, first_line
from cmexam_tune.core.variants import suggest

Main = Callable[[Sequence[str]], int | None]
# What shells report of a program that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED = 130
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl(2): the signal to send to this process when its parent has ended."""
OUT_OF_MEMORY = (
    "The card's memory is too small for this. Answering: lower generation.batch_size, prompt.max_source_length or "
    "generation.max_new_tokens. Training: lower training.per_device_train_batch_size or training.max_tokens_per_batch, "
    "set training.gradient_checkpointing=true. LoRA: model.load_in_4bit=true. `nvidia-smi` names other programs on the "
    "card."
)
HOST_MEMORY = (
    "this machine's memory is too small for this. Split large files; a line of gigabytes in a table is mostly a quote "
    "that is not closed."
)
# Control characters but tab and newline, marks that reorder text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Flag:
    """What the name and type of a parameter do not say about its flag, put beside the type by `Annotated`."""

    metavar: str | None = None
    """What stands for the value in the help."""
    names: tuple[str, ...] = ()
    """Instead of `--name-of-the-parameter`."""
    separator: str | None = None
    """Between the items of one value: `--drop exact,near`; without it a sequence is several words."""
    help: str = ""
    """For parameters that no docstring describes, because every program has them."""


File = Annotated[str | Path, Flag("FILE")]
Folder = Annotated[str | Path, Flag("DIR")]
Recipe = Annotated[str | Path, Flag("NAME_OR_PATH")]
Override = Annotated[
    str,
    Flag(
        "key=value",
        help="change a value of the config: section.key=value, for example training.learning_rate=2e-4; `cmexam-tune "
        "train --help` lists them",
    ),
]


class WrongUsage(UserError):
    """Flags that do not go together, or one that is missing; the message ends with where the help is."""


def program(
    function: Callable[..., object] | None, epilog: str | Callable[[], str]
) -> Callable[[Callable[..., int | None]], Main]:
    """Turn the decorated function, which has a program's flags as parameters, into the program's `main(argv)`.

    Args:
        function: what the program does, as a notebook calls it, if it can. Its keyword-only parameters are flags, too,
            and its docstring explains what the decorated function's does not.
        epilog: end of the help, examples; a function is called only when the help is shown.
    """
    if function is not None and function.__module__ in sys.modules:
        # `import cmexam_tune; cmexam_tune.train(...)`: the name is the module's, whose function is the program. Python
        # looks `__call__` up in the class, so that the module needs one of its own.
        module: Any = sys.modules[function.__module__]
        module.__class__ = type("Program", (ModuleType,), {"__call__": staticmethod(function)})

    def decorate(command: Callable[..., int | None]) -> Main:
        @functools.wraps(command)
        def main(argv: Sequence[str]) -> int | None:
            parser = Parser(Path(inspect.getfile(command)).stem, _summary(command), epilog)
            parameters = _parameters(command, function or command)
            texts = _descriptions(function or command) | _descriptions(command)
            for parameter in parameters:
                names, settings = _argument(parameter, texts.get(parameter.name, ""))
                parser.add_argument(*names, **settings)
            words, flags = _arguments(parser, parameters, argv)
            try:
                return command(*words, **flags)
            except WrongUsage as error:
                parser.error(str(error))

        return main

    return decorate


def _parameters(command: Callable[..., object], function: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters that are flags: the command's, and where it takes `**options`, the function's."""
    declared = inspect.signature(command, eval_str=True).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared.values()):
        return list(declared.values())
    options = inspect.signature(function, eval_str=True).parameters.values()
    return [
        *(parameter for parameter in declared.values() if parameter.kind is not parameter.VAR_KEYWORD),
        # A parameter that both have is the command's: its type or its help differs on the command line.
        *(option for option in options if option.kind is option.KEYWORD_ONLY and option.name not in declared),
    ]


def _summary(function: Callable[..., object]) -> str:
    """Return a docstring without its sections."""
    return re.split(r"\n\n\w+:\n", inspect.getdoc(function) or "")[0]


def _descriptions(function: Callable[..., object]) -> dict[str, str]:
    """Return the text of every parameter under `Args:`."""
    section = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5}.*)*)", section, re.M)}


def _argument(parameter: inspect.Parameter, text: str) -> tuple[list[str], dict[str, Any]]:
    """Return what `ArgumentParser.add_argument` takes: names, and keyword arguments."""
    types, flag = _types(parameter.annotation), _flag(parameter.annotation)
    # What is not on the command line is left to the function's own default.
    settings: dict[str, object] = {
        "default": argparse.SUPPRESS,
        "help": ((text or flag.help).removesuffix(".") + _default(parameter)).replace("%", "%%"),
    }
    if parameter.kind is parameter.VAR_POSITIONAL:
        return [parameter.name], {**settings, "nargs": "*", "metavar": flag.metavar}
    if parameter.kind is parameter.POSITIONAL_ONLY:
        optional = {} if parameter.default is parameter.empty else {"nargs": "?"}
        return [parameter.name], {**settings, **optional, "metavar": flag.metavar}
    names = _names(parameter)
    settings |= {"dest": parameter.name, "required": parameter.default is parameter.empty}
    if bool in types:
        return names, {**settings, "action": argparse.BooleanOptionalAction if NoneType in types else "store_true"}
    settings["metavar"] = flag.metavar
    if flag.separator:
        return names, {**settings, "type": functools.partial(_split, flag.separator)}
    if sequence := next((kind for kind in types if get_origin(kind) is Sequence), None):
        settings |= {"nargs": "+", "action": "extend"}
        types = _types(get_args(sequence)[0])
    if number := next((kind for kind in types if kind in (int, float)), None):
        settings |= {"type": number, "metavar": flag.metavar or "N"}
    if literal := next((kind for kind in types if get_origin(kind) is Literal), None):
        settings |= {"choices": get_args(literal)}
    return names, settings


def _types(annotation: object) -> list[object]:
    """Return the members of a union, or the one type, without what `Annotated` adds."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _types(member)]
    return [annotation]


def _flag(annotation: object) -> Flag:
    """Return what the `Flag`s in an annotation say, the outer ones before the inner ones."""
    settings: dict[str, Any] = {}
    for part in get_args(annotation):
        flag = part if isinstance(part, Flag) else _flag(part)
        settings |= {name: value for name, value in vars(flag).items() if value}
    return Flag(**settings)


def _names(parameter: inspect.Parameter) -> list[str]:
    return list(_flag(parameter.annotation).names or [f"--{parameter.name.replace('_', '-')}"])


def _default(parameter: inspect.Parameter) -> str:
    """Return the default as the end of a flag's help; one that says nothing (None, false, empty) is left out."""
    value = parameter.default
    if value in (parameter.empty, None, "", ()) or isinstance(value, bool):
        return ""
    return f" (default: {value if isinstance(value, str | int | float) else ','.join(map(str, value))})"


def _split(separator: str, value: str) -> list[str]:
    return [item.strip() for item in value.split(separator) if item.strip()]


def _arguments(
    parser: "Parser", parameters: Sequence[inspect.Parameter], argv: Sequence[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the positional and the keyword arguments in a command line."""
    values = vars(parser.read(argv))
    words = [
        values.pop(parameter.name)
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in values
    ]
    override_name = next(
        (parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL), None
    )
    if override_name is None:
        return words, values
    words += values.pop(override_name, [])
    # A flag that takes several words also takes the overrides behind them: `--config A B generation.mode=likelihood`.
    for parameter in parameters:
        if isinstance(value := values.get(parameter.name), list):
            # A file's name may hold an equals sign, too.
            overrides = [word for word in value if "=" in word and not Path(word).exists()]
            words += overrides
            values[parameter.name] = [word for word in value if word not in overrides]
            if len(overrides) == len(value):
                parser.error(f"argument {_names(parameter)[0]}: expected at least one argument")
    return words, values


class Parser(argparse.ArgumentParser):
    """ArgumentParser for a program `cmexam-tune <name>`: help keeps its layout, wrong flags get a suggestion."""

    def __init__(self, name: str, description: str, epilog: str | Callable[[], str]) -> None:
        super().__init__(
            prog=f"cmexam-tune {name}",
            description=description,
            # Examples are lines to be copied: nothing may be wrapped.
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # `--over` in somebody's script would become ambiguous with the next flag that begins so.
            allow_abbrev=False,
        )
        self._examples = epilog

    def format_help(self) -> str:
        """Return the help, the end of which may take some time to make."""
        self.epilog = self._examples if isinstance(self._examples, str) else self._examples()
        return super().format_help()

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return what a command line says; one that cannot be read ends the program."""
        # Before argparse looks, which names an unknown flag only if no other is missing, and suggests nothing.
        known = list(self._option_string_actions)
        for word in argv:
            name = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][\w-]*", name) and name not in known:
                self.error(f"unrecognized arguments: {word}{suggest(name, known)}")
        # Overrides may stand between flags, which plain `parse_args` refuses for `*` positionals.
        return self.parse_intermixed_args(list(argv))

    def error(self, message: str) -> NoReturn:
        """Print the message in the form of all other errors and exit with 2."""
        self.exit(2, f"error: {printable(message)}\nSee {self.prog} --help.\n")


def exactly_one(**flags: object) -> Any:
    """Return the value of the only flag that is given.

    Raises:
        WrongUsage: none or several of them are given.
    """
    values = [value for value in flags.values() if value]
    if len(values) != 1:
        raise WrongUsage(f"exactly one of {', '.join(f'--{name}' for name in flags)} is needed.")
    return values[0]


def printable(text: str) -> str:
    """Return text with its control characters spelled out: data of others must not steer a terminal."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str = "") -> None:
    """Print a result to standard output, at once."""
    print(printable(text), flush=True)


def in_notebook() -> bool:
    """Return whether this runs in a notebook, which shows standard error in red."""
    # Whoever runs in a notebook has IPython imported; importing it to ask would take longer than most programs run.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    # IPython in a terminal is a shell too; a notebook's has a kernel.
    return getattr(shell, "kernel", None) is not None


def note(text: str) -> None:
    """Print progress or a warning to standard error (in a notebook below the cell), at once."""
    print(printable(text), file=sys.stdout if in_notebook() else sys.stderr, flush=True)


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Call a program's `main(argv)` and exit: 0 done, 2 the caller's mistake, 1 a failure, 130 interrupted."""
    _end_with_torchrun()
    try:
        sys.exit(main(sys.argv[1:] if argv is None else argv) or 0)
    except UserError as error:
        _stop(f"error: {error}", 2)
    except TrainingStopped as error:
        _stop(f"stopped: {error}", 1)
    except KeyboardInterrupt:
        _stop("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # `cmexam-tune recipes | head`: the reader has what it wanted. Python would complain once more at its exit.
        sys.stderr.close()
        sys.exit(1)
    except RuntimeError as error:
        # Known by name, so that a program which needs no torch does not import it for this.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _stop(f"error: {first_line(error)}\n{OUT_OF_MEMORY}", 2)
    except MemoryError:
        _stop(f"error: {HOST_MEMORY}", 2)
    except OSError as error:
        if (message := files.explain(error)) is None:
            raise
        _stop(f"error: {message}", 2)


def _end_with_torchrun() -> None:
    """Let Linux ask this process to end when torchrun has, which leaves its workers behind if it is killed itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Python has no prctl(2) of its own.
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(message: str, status: int) -> NoReturn:
    # A message may quote a line of a file, which may be megabytes.
    note("\n".join(line if len(line) <= 1000 else f"{line[:900]} ... {line[-90:]}" for line in message.splitlines()))
    sys.exit(status)
