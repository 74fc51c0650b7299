"""One argument convention for every program, and one place where errors become messages and exit statuses."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from cmexam_tune.core import files
from cmexam_tune.core.errors import TrainingStopped, UserError

OVERRIDES_HELP = (
    "change a value of the config: section.key=value, for example training.learning_rate=2e-4; `cmexam-tune train "
    "--help` lists them"
)
INTERRUPTED = 130
# Control characters but tab and newline, marks that reorder text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Parser(argparse.ArgumentParser):
    """ArgumentParser for a program `cmexam-tune <name>`: help keeps its layout, wrong flags get a suggestion."""

    def __init__(self, name: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"cmexam-tune {name}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Print the message in the form of all other errors and exit with 2."""
        self.exit(2, f"error: {printable(message)}\nSee {self.prog} --help.\n")


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add `--config NAME_OR_PATH` and the `key=value` overrides."""
    parser.add_argument(
        "--config", required=required, metavar="NAME_OR_PATH", help="a YAML file, or the name of a shipped recipe"
    )
    add_overrides(parser)


def add_model_source(parser: argparse.ArgumentParser) -> None:
    """Add `--run DIR` or `--config NAME_OR_PATH`, and the `key=value` overrides."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="DIR", help="a run folder of cmexam-tune train")
    source.add_argument("--config", metavar="NAME_OR_PATH", help="a recipe whose model answers as it is")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the `key=value` overrides."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)


def without_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of an option that takes several, and the overrides that were written behind them."""
    found = [word for word in words if "=" in word and not Path(word).exists()]
    return [word for word in words if word not in found], found


def printable(text: str) -> str:
    """Return text with its control characters spelled out: data of others must not steer a terminal."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str = "") -> None:
    """Print a result to standard output, at once."""
    print(printable(text), flush=True)


def in_notebook() -> bool:
    """Return whether this runs in a notebook, which shows standard error in red."""
    return getattr(getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)(), "kernel", None) is not None


def note(text: str) -> None:
    """Print progress or a warning to standard error (in a notebook below the cell), at once."""
    print(printable(text), file=sys.stdout if in_notebook() else sys.stderr, flush=True)


def run(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> NoReturn:
    """Call a program's `main(argv)` and exit: 0 done, 2 the caller's mistake, 1 a failure, 130 interrupted."""
    try:
        sys.exit(main(sys.argv[1:] if argv is None else argv) or 0)
    except UserError as error:
        _stop(f"error: {error}", 2)
    except TrainingStopped as error:
        _stop(f"stopped: {error}", 1)
    except KeyboardInterrupt:
        _stop("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if (message := files.explain(error)) is None:
            raise
        _stop(f"error: {message}", 2)


def _stop(message: str, status: int) -> NoReturn:
    note("\n".join(line if len(line) <= 1000 else f"{line[:900]} ... {line[-90:]}" for line in message.splitlines()))
    sys.exit(status)
