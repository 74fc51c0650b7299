"""`cmexam-tune runs`: the runs in a folder, how good each is, and how to go on."""

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cmexam_tune.core import cli, documents
from cmexam_tune.core.cli import Folder
from cmexam_tune.core.errors import UserError
from cmexam_tune.report.table import Table


@dataclass(frozen=True)
class Line:
    """One run."""

    path: Path
    method: str
    data: str
    loss: float | None
    """Of training, the last that was logged."""
    accuracy: float | None
    """Per cent: of the newest report about its predictions, else the best exam accuracy while training."""
    hours: float
    """Since something was last written to it."""
    next: str
    """The command that goes on with it."""


def runs(folder: Folder = "runs") -> list[Line]:
    """Return the runs in a folder and in its folders, the newest first.

    Args:
        folder: folder of run folders.

    Raises:
        UserError: no such folder.
    """
    top = Path(folder)
    if not top.is_dir():
        raise UserError(f"{top}: no such folder. Name one that holds run folders, for example runs.")
    lines = [line for path in _folders(top) if (line := _line(path)) is not None]
    return sorted(lines, key=lambda line: line.hours)


def _folders(top: Path) -> Iterator[Path]:
    """Yield folders with a config and what training writes beside it, as far down as `reproduce` puts them."""
    for pattern in ("", "*/", "*/*/", "*/*/*/"):
        for path in sorted(top.glob(f"{pattern}environment.json")):
            if (path.parent / "config.yaml").is_file() and not path.parent.name.startswith("."):
                yield path.parent


def _line(path: Path) -> Line | None:
    """Return what there is to say of a run; None, with a note, if it cannot be read."""
    from cmexam_tune.training.run_directory import run as run_directory

    try:
        run = run_directory.look_at(path)
        log = run.log
    except (UserError, ValueError) as error:
        cli.note(f"note: {path} is left out, it cannot be read ({str(error).splitlines()[0]})")
        return None
    losses = [entry["loss"] for entry in log if "loss" in entry]
    accuracies = [entry["eval_exam_accuracy"] for entry in log if "eval_exam_accuracy" in entry]
    reported = _reported(path)
    written = max(file.stat().st_mtime for file in path.iterdir() if file.is_file())
    config = run.config
    return Line(
        path,
        f"{config.model.family} {config.tuning.method}",
        ", ".join(dict.fromkeys(Path(file).name.removesuffix(".questions.jsonl") for file in config.data.train)),
        losses[-1] if losses else None,
        max(accuracies, default=None) if reported is None else reported,
        (time.time() - written) / 3600,
        _next(path, run.finished),
    )


def _reported(path: Path) -> float | None:
    """Return the accuracy of the newest report about the run."""
    from cmexam_tune.training.run_directory import run as run_directory

    for file in reversed(run_directory.reports(path)):
        try:
            report = documents.read_json(file, "report")
        except UserError as error:
            cli.note(f"note: a report is left out, it cannot be read ({str(error).splitlines()[0]})")
            continue
        if not run_directory.is_about(report, path):
            continue
        overall = report.get("overall")
        value = overall.get("accuracy") if isinstance(overall, dict) else None
        return float(value) if isinstance(value, int | float) else None
    return None


def _next(path: Path, finished: bool) -> str:
    place = shlex.quote(str(path))
    if finished:
        return f"cmexam-tune predict --run {place} --questions FILE --out FILE"
    return f"cmexam-tune train --config {shlex.quote(str(path / 'config.yaml'))} out={place}"


def table(lines: Sequence[Line]) -> Table:
    """Return the runs as a table."""
    return Table(
        ("run", "method", "data", "loss", "accuracy", "age", "go on with"),
        tuple(
            (
                str(line.path),
                line.method,
                line.data,
                "-" if line.loss is None else f"{line.loss:.4f}",
                "-" if line.accuracy is None else f"{line.accuracy:.1f}%",
                _age(line.hours),
                line.next,
            )
            for line in lines
        ),
    )


def _age(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"


@cli.program(runs, "examples:\n  cmexam-tune runs runs")
def main(folder: Folder = "runs", /) -> None:
    """List the runs in a folder: method, data, loss, accuracy, age, and the command that goes on with each."""
    lines = runs(folder)
    cli.say(table(lines).text() if lines else f"{folder}: no run in it.")


if __name__ == "__main__":
    cli.run(main)
