"""Raw exam files into question records, and into prompts for other training tools."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal

from cmexam_tune import prompts
from cmexam_tune.core import cli, jsonl, variants
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.files import check_input, check_output, sha256
from cmexam_tune.core.schema import Example, Question
from cmexam_tune.exams import RowReport, cmb
from cmexam_tune.overlap.duplicates import Duplicates

Format = Literal["prompt", "alpaca", "sharegpt", "messages"]
FORMATS: dict[str, Callable[[Example], object]] = {
    "prompt": dataclasses.asdict,
    "alpaca": lambda e: {"id": e.question_id, "instruction": e.prompt, "input": "", "output": e.completion},
    "sharegpt": lambda e: {
        "id": e.question_id,
        "conversations": [{"from": "human", "value": e.prompt}, {"from": "gpt", "value": e.completion}],
    },
    "messages": lambda e: {
        "id": e.question_id,
        "messages": [{"role": "user", "content": e.prompt}, {"role": "assistant", "content": e.completion}],
    },
}
NO_PUBLISHED_ANSWER = "no published answer"

EPILOG = """writes, for an input file val.csv:
  DIR/val.questions.jsonl   one question a line: what train, predict, evaluate and stats read
  DIR/val.<style>.jsonl     for each of --styles; rows that a style cannot render are counted and skipped
  DIR/val.report.json       rows, kept, dropped and repaired with reasons and row numbers, duplicates
CMB-Clin files give DIR/<stem>.cases.jsonl in place of questions. Nothing is written if any file cannot be used.

examples:
  cmexam-tune preprocess cmexam --input data/train.csv data/val.csv --out data/cmexam
  cmexam-tune preprocess cmexam --input data/val.csv --out prompts --styles 1,4 --format alpaca
  cmexam-tune preprocess cmb --input CMB-test-choice-question-merge.json --answers CMB-test-choice-answer.json --out cmb
"""


def preprocess(  # noqa: PLR0913 - one argument for each flag of the program
    exam: str,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    answers: str | Path | None = None,
    styles: Sequence[str] = (),
    format: Format = "prompt",
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Write the questions of raw exam files, and what was kept, repaired and dropped, to the folder `out`.

    Args:
        exam: name of a file in `cmexam_tune/exams/` (cmexam, cmb), or of a module of the caller's own (`my_lab.exam`).
        inputs: raw files; their stems name what is written.
        out: the folder, made where needed.
        answers: second file with the answers (cmb test).
        styles: names or ids of `prompts.STYLES` to render.
        format: keys of the rendered rows, see `FORMATS`.
        overwrite: replace files of an earlier call.

    Returns:
        The content of each `<stem>.report.json`, in the order of `inputs`.

    Raises:
        UserError: a file is missing or cannot be used, an output exists, exam, style or format is unknown; then
            nothing is written.
    """
    module = variants.load("exams", exam)
    for style in styles:
        prompts.style_named(style)
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} is unknown; known: {', '.join(FORMATS)}.")
    paths = _check_inputs(inputs)
    for path in paths:
        check_output(Path(out) / f"{path.stem}.report.json", overwrite)
    second = check_input(answers, "file of answers") if answers is not None else None
    with _all_or_nothing(Path(out), overwrite) as claim:
        duplicates = Duplicates()
        job = _Job(module, second, tuple(dict.fromkeys(styles)), FORMATS[format], claim, duplicates)
        reports = [
            _cases(job, path) if exam == "cmb" and cmb.is_clin(path) else _questions(job, path) for path in paths
        ]
        found = duplicates.groups()
        for path, report in zip(paths, reports, strict=True):
            report["duplicates"] = [group for group in found if path.stem in group["files"]]
            text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
            claim(f"{path.stem}.report.json").write_text(text, encoding="utf-8")
    return reports


@dataclass(frozen=True)
class _Job:
    """What is the same for every input file."""

    module: ModuleType
    answers: Path | None
    styles: tuple[str, ...]
    shape: Callable[[Example], object]
    claim: Callable[[str], Path]
    """Returns where to write the output file of that name."""
    duplicates: Duplicates


def _check_inputs(inputs: Sequence[str | Path]) -> list[Path]:
    paths = [check_input(path, "exam file") for path in inputs]
    for stem, count in Counter(path.stem for path in paths).items():
        if count > 1:
            raise UserError(f"--input: {count} files are called {stem!r}; what is written is named by it. Rename one.")
    return paths


@contextlib.contextmanager
def _all_or_nothing(out: Path, overwrite: bool) -> Iterator[Callable[[str], Path]]:
    """Yield a function that claims a file name in a hidden folder, whose files move up to `out` when all is done."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    folder = out / f".preprocess.{os.getpid()}"
    folder.mkdir(parents=True)
    claimed: list[str] = []

    def claim(name: str) -> Path:
        check_output(out / name, overwrite)
        claimed.append(name)
        return folder / name

    try:
        yield claim
        for name in claimed:
            (folder / name).replace(out / name)
        missing = []
    finally:
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            for made in missing:
                made.rmdir()


def _questions(job: _Job, path: Path) -> dict[str, Any]:
    """Write questions and prompts of one file and return its report."""
    told: list[RowReport] = []
    kept, stem = 0, path.stem
    written, skipped = Counter[str](), {style: Counter[str]() for style in job.styles}
    targets = {part: job.claim(f"{path.stem}.{part}.jsonl") for part in ("questions", *job.styles)}
    with contextlib.ExitStack() as stack:
        handles: dict[str, IO[str]] = {
            part: stack.enter_context(target.open("w", encoding="utf-8", newline="\n"))
            for part, target in targets.items()
        }
        for question in _progress(job.module.read([path], job.answers, told.append), path):
            handles["questions"].write(jsonl.dumps(question) + "\n")
            job.duplicates.add(stem, question)
            kept += 1
            for style in job.styles:
                reason = _write_example(handles[style], question, style, job.shape)
                written[style] += not reason
                skipped[style].update([reason] if reason else [])
    report = _report(path, kept, told)
    report["questions_sha256"] = sha256(targets["questions"])
    report["styles"] = {style: {"written": written[style], "skipped": dict(skipped[style])} for style in job.styles}
    return report


def _write_example(handle: IO[str], question: Question, style: str, shape: Callable[[Example], object]) -> str | None:
    """Write the question in a style; return the reason where that cannot be."""
    if question.answer is None:
        return NO_PUBLISHED_ANSWER
    try:
        example = prompts.render(question, style)
    except prompts.Unrenderable as error:
        return error.reason
    handle.write(jsonl.dumps(shape(example)) + "\n")
    return None


def _cases(job: _Job, path: Path) -> dict[str, Any]:
    cases = questions = 0
    with job.claim(f"{path.stem}.cases.jsonl").open("w", encoding="utf-8", newline="\n") as handle:
        for case in _progress(cmb.read_clin(path), path):
            handle.write(jsonl.dumps(case) + "\n")
            cases += 1
            questions += len(case.turns)
    return {**_report(path, cases, []), "questions": questions}


def _report(path: Path, kept: int, told: Sequence[RowReport]) -> dict[str, Any]:
    dropped = [report for report in told if report.action == "dropped"]
    return {
        "rows": kept + len(dropped),
        "kept": kept,
        "dropped": dict(Counter(report.reason for report in dropped)),
        "repaired": dict(Counter(report.reason for report in told if report.action == "repaired")),
        "rows_dropped": [{"row": report.row, "reason": report.reason} for report in dropped],
        "rows_repaired": [{"row": r.row, "reason": r.reason} for r in told if r.action == "repaired"],
        "dropped_items": [{"row": report.row, **(report.item or {})} for report in dropped],
        "input": str(path),
        "input_sha256": sha256(path),
    }


def _progress(records: Iterator[Any], path: Path) -> Iterator[Any]:
    from tqdm import tqdm

    yield from tqdm(records, desc=path.name, unit=" rows", delay=1, leave=False, disable=None)


def summary(report: Mapping[str, Any]) -> str:
    """Return a report as a few lines for people."""
    what = f"cases, {report['questions']:,} questions" if "questions" in report else "rows"
    lines = [f"{report['input']}: kept {report['kept']:,} of {report['rows']:,} {what}"]
    lines += [f"  dropped: {reason} {count:,}" for reason, count in report["dropped"].items()]
    lines += [f"  repaired: {reason} {count:,}" for reason, count in report["repaired"].items()]
    for style, counts in report.get("styles", {}).items():
        skipped = "".join(f", skipped {count:,} ({reason})" for reason, count in counts["skipped"].items())
        lines.append(f"  style {style}: {counts['written']:,} written{skipped}")
    if groups := report["duplicates"]:
        between = sum(len(group["files"]) > 1 for group in groups)
        conflicts = sum(group["conflicting_answers"] for group in groups)
        lines.append(
            f"  duplicates (kept): {len(groups):,} questions occur more than once, {between:,} of them in several "
            f"of these files, {conflicts:,} with different answers"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int | None:
    """Run `cmexam-tune preprocess`."""
    parser = cli.Parser("preprocess", "Turn raw exam files into questions, and into prompts where asked.", EPILOG)
    known = ", ".join(variants.names("exams"))
    parser.add_argument("exam", metavar="EXAM", help=f"format of the input files: {known}, or a module (my_lab.exam)")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=".csv, .xlsx, .jsonl or .json")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--answers", metavar="FILE", help="cmb: second file that holds the answers, joined by id")
    parser.add_argument(
        "--styles", default="", metavar="1,4", help=f"also write prompts in these styles: {', '.join(prompts.STYLES)}"
    )
    parser.add_argument("--format", choices=list(FORMATS), default="prompt", help="keys of the prompts (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output files")
    args = parser.parse_args(argv)
    reports = preprocess(
        args.exam,
        args.input,
        args.out,
        answers=args.answers,
        styles=[style.strip() for style in args.styles.split(",") if style.strip()],
        format=args.format,
        overwrite=args.overwrite,
    )
    for report in reports:
        cli.say(summary(report))
    cli.say(f"written to {args.out}")
    return None


if __name__ == "__main__":
    cli.run(main)
