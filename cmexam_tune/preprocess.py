"""Raw exam files into question records, and into prompts for other training tools."""

import contextlib
import itertools
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from cmexam_tune import exams, prompts
from cmexam_tune.core import cli, jsonl, variants
from cmexam_tune.core.cli import File, Flag, Folder
from cmexam_tune.core.errors import ConfigError, DataError
from cmexam_tune.core.files import check_input, sha256, write_together
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import GROUP, Example, Question
from cmexam_tune.exams import AUTO, RawFile, RowReport, cmb
from cmexam_tune.prompts.formats import FORMATS, Format
from cmexam_tune.quality.duplicates import Repeated
from cmexam_tune.quality.splits import Cases, assign, parse_shares

PREVIEWED, SHOWN = 3, 100
"""Questions of each file that a preview shows, and characters of each text."""
NO_PUBLISHED_ANSWER = "no published answer"

EPILOG = """writes, for an input file val.csv:
  DIR/val.questions.jsonl   one question a line: what train, predict, evaluate and stats read
  DIR/val.<style>.jsonl     for each of --styles; rows that a style cannot render are counted and skipped
  DIR/val.<part>.questions.jsonl   for each part of --split
  DIR/val.report.json       rows, kept, dropped and repaired with reasons and row numbers, duplicates, unread columns
CMB-Clin files give DIR/<stem>.cases.jsonl in place of questions. Nothing is written if any file cannot be used.

An input is a file (.csv, .tsv, .xlsx, .jsonl, .json, .parquet), a folder or zip as it was downloaded (what has the
exam's columns is read, the rest named), or a data set on a hub: hf://OWNER/NAME[@REVISION][/FOLDER], ms:// likewise for
ModelScope; the report names the revision. CMB's test questions are joined with the file of answers beside them.

--map auto finds columns by the names that they usually have and prints the map that it has found, to be corrected:
`--map auto,stem=内容`. --dry-run shows the first questions as they are read, and writes nothing.

--map names columns: fields stem, options (A..E: one column each), answer, explanation, id, kind, case, group, answer_as
(letters, number, index, text) and facet:NAME; other names of a column follow after |. It amends the exam's own map; a
YAML file of such fields is an exam as well: `preprocess my_exam.yaml`.

exams: {exams}
styles: {styles}

examples:
  cmexam-tune preprocess cmexam --input data/train.csv data/val.csv --out data/cmexam
  cmexam-tune preprocess cmexam --input data/val.csv --out prompts --styles 1,4 --format alpaca
  cmexam-tune preprocess cmb --input CMB.zip --out cmb
  cmexam-tune preprocess table --map auto --input bank.xlsx --dry-run
  cmexam-tune preprocess table --map stem=题干,options=A..E,answer=答案,facet:科室=科室 --input bank.xlsx --out bank
  cmexam-tune preprocess cmmlu --input cmmlu/test/anatomy.csv --split train=0.8,val=0.1,test=0.1 --out anatomy
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """How `<stem>.questions.jsonl` is divided as well: shares by part, and the facet that each part shares alike."""

    shares: Mapping[str, float]
    seed: int = 0
    stratify: str | None = None


def preprocess(
    exam: str,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    answers: File | None = None,
    columns: Annotated[str | None, Flag("FIELD=COLUMN,...", names=("--map",))] = None,
    styles: Annotated[Sequence[str], Flag("1,4", separator=",")] = (),
    format: Format = "prompt",
    split: Split | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Write the questions of raw exam files, and what was kept, repaired and dropped, to the folder `out`.

    Args:
        exam: its format: a name (cmexam, cmb, table, ...), a YAML file of columns, or a module (my_lab.exam).
        inputs: files, folders, zips, hf:// or ms:// names; the files' stems name what is written.
        out: folder to write to, made where needed.
        answers: cmb: second file that holds the answers, joined by id.
        columns: which columns to read: `stem=题干,facet:科室=科室`, or `auto`.
        styles: also write prompts in these styles: names, numbers, or files with words of your own (own.yaml).
        format: keys of the prompts.
        split: also write parts.
        overwrite: replace existing output files.

    Returns:
        The content of each `<stem>.report.json`, in the order of the files.

    Raises:
        UserError: a file cannot be used, an output exists, a name is unknown; then nothing is written.
    """
    guesses = columns is not None and columns.partition(",")[0].strip() == AUTO
    module, fields = exams.load(exam, None if guesses else columns)
    styles_by_name = {Path(style).stem: prompts.resolve_style(style) for style in styles}
    if format not in FORMATS:
        raise ConfigError(f"--format: {format!r} is unknown; known: {', '.join(FORMATS)}.")
    second = check_input(answers, "file of answers") if answers is not None else None
    with tempfile.TemporaryDirectory(prefix="cmexam_tune.") as unpacked:
        raw_files = exams.find_sources(inputs, Path(unpacked))
        if guesses:
            columns = exams.with_guesses(str(columns), raw_files[0].path)
            module, fields = exams.load(exam, columns)
        sources, known, others = exams.sort_out(raw_files, fields)
        protected = [source.path for source in raw_files] + ([second] if second else [])
        # All outputs or none: what fails half way must not leave new questions beside the prompts of old ones.
        with write_together(Path(out), "preprocess", overwrite, protected) as claim:
            job = _Job(module, styles_by_name, FORMATS[format], claim, split)
            reports = {}
            for source in sources:
                with _named_by_origin(source):
                    joined = second or exams.find_answers(source, fields, known)
                    clinic = exam == "cmb" and cmb.is_clin(source.path)
                    reports[source.name] = _cases(job, source) if clinic else _questions(job, source, joined)
            for report in reports.values() if columns else ():
                report["map"] = columns
            _write_reports(job, reports, [other.origin for other in others])
    return list(reports.values())


@contextlib.contextmanager
def _named_by_origin(source: RawFile) -> Iterator[None]:
    """Name the file in messages as its user knows it: where a zip was unpacked to is gone by then."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace(str(source.path), source.origin)) from None


@dataclass(frozen=True)
class _Job:
    """What is the same for every input file."""

    exam: exams.Exam
    styles: Mapping[str, prompts.Style]
    shape: Callable[[Example], object]
    claim: Callable[[str], Path]
    """Returns where to write the output file of that name."""
    split: Split | None
    repeated: Repeated = field(default_factory=Repeated)


def _questions(job: _Job, source: RawFile, answers: Path | None) -> dict[str, object]:
    """Write questions and prompts of one file and return its report."""
    rows: list[RowReport] = []
    kept, cases = 0, Cases()
    written, skipped = Counter[str](), {style: Counter[str]() for style in job.styles}
    targets = {part: job.claim(f"{source.name}.{part}.jsonl") for part in ("questions", *job.styles)}
    with contextlib.ExitStack() as stack:
        handles: dict[str, IO[str]] = {part: stack.enter_context(_open(target)) for part, target in targets.items()}
        for question in _progress(job.exam.read([source.path], answers, rows.append), source.path):
            handles["questions"].write(jsonl.dumps(question) + "\n")
            job.repeated.add(source.name, question)
            cases.add(kept, question)
            kept += 1
            for name, style in job.styles.items():
                reason = _write_example(handles[name], question, style, job.shape)
                written[name] += not reason
                skipped[name].update([reason] if reason else [])
    _mark_groups(targets["questions"], source.name, cases)
    report = _report(source, kept, rows)
    report["questions_sha256"] = sha256(targets["questions"])
    report["styles"] = {style: {"written": written[style], "skipped": dict(skipped[style])} for style in job.styles}
    if answers is not None:
        report["answers"], report["answers_sha256"] = str(answers), sha256(answers)
    if job.split:
        report["split"] = _write_parts(job, source.name, targets["questions"], job.split)
    return report


def _write_reports(job: _Job, reports: Mapping[str, dict[str, Any]], left_out: Sequence[str]) -> None:
    groups = job.repeated.groups()
    for name, report in reports.items():
        report["duplicates"] = [group for group in groups if name in group["files"]]
        report["left_out"] = left_out
        text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
        job.claim(f"{name}.report.json").write_text(text, encoding="utf-8")


def _mark_groups(path: Path, name: str, cases: Cases) -> None:
    """Give the questions of one case the same facet `group`."""
    if not (shared := cases.shared()):
        return
    # Which questions share a case is known only after the last of them, when all lines are written.
    marked = path.with_name(path.name + ".marked")
    with path.open(encoding="utf-8") as lines, _open(marked) as handle:
        for place, line in enumerate(lines):
            if place in shared:
                value = json.loads(line)
                value["facets"][GROUP] = f"{name}:case{shared[place] + 1}"
                line = jsonl.dumps(value) + "\n"
            handle.write(line)
    marked.replace(path)


def _write_parts(job: _Job, name: str, path: Path, split: Split) -> dict[str, int]:
    parts = assign(jsonl.read(path, Question), split.shares, split.seed, split.stratify)
    with contextlib.ExitStack() as stack:
        handles = {
            part: stack.enter_context(_open(job.claim(f"{name}.{part}.questions.jsonl"))) for part in split.shares
        }
        # Lines and not records: whatever a later version adds to a question stays in its part.
        for part, line in zip(parts, stack.enter_context(path.open(encoding="utf-8")), strict=True):
            handles[part].write(line)
    return {part: parts.count(part) for part in split.shares}


def _write_example(
    handle: IO[str], question: Question, style: prompts.Style, shape: Callable[[Example], object]
) -> str | None:
    """Write the question in a style; return the reason where that cannot be."""
    if question.answer is None:
        return NO_PUBLISHED_ANSWER
    try:
        example = prompts.render(question, style)
    except prompts.Unrenderable as error:
        return error.reason
    handle.write(jsonl.dumps(shape(example)) + "\n")
    return None


def _cases(job: _Job, source: RawFile) -> dict[str, object]:
    cases = questions = 0
    with _open(job.claim(f"{source.name}.cases.jsonl")) as handle:
        for case in _progress(cmb.read_clin(source.path), source.path):
            handle.write(jsonl.dumps(case) + "\n")
            cases += 1
            questions += len(case.turns)
    return {**_report(source, cases, []), "questions": questions}


def _report(source: RawFile, kept: int, rows: Sequence[RowReport]) -> dict[str, object]:
    dropped = [report for report in rows if report.action == "dropped"]
    repaired = [report for report in rows if report.action == "repaired"]
    return {
        "name": source.name,
        "rows": kept + len(dropped),
        "kept": kept,
        "dropped": dict(Counter(report.reason for report in dropped)),
        "repaired": dict(Counter(report.reason for report in repaired)),
        "rows_dropped": [{"row": report.row, "reason": report.reason} for report in dropped],
        "rows_repaired": [{"row": report.row, "reason": report.reason} for report in repaired],
        "dropped_items": [{"row": report.row, **(report.item or {})} for report in dropped],
        "columns_unread": [report.reason for report in rows if report.action == "unread"],
        "input": source.origin,
        "input_sha256": sha256(source.path),
    }


def _open(path: Path) -> IO[str]:
    return path.open("w", encoding="utf-8", newline="\n")


def _progress(records: Iterator[T], path: Path) -> Iterator[T]:
    return Progress(path.name, "rows", patience=1).each(records)


def summary(report: Mapping[str, Any]) -> str:
    """Return a report as a few lines for people."""
    what = f"cases, {report['questions']:,} questions" if "questions" in report else "rows"
    lines = [f"{report['input']}: kept {report['kept']:,} of {report['rows']:,} {what}"]
    if "answers" in report:
        lines.append(f"  answers joined from {report['answers']}")
    lines += [f"  dropped: {reason}: {count:,}" for reason, count in report["dropped"].items()]
    lines += [f"  repaired: {reason}: {count:,}" for reason, count in report["repaired"].items()]
    if names := report["columns_unread"]:
        lines.append(f"  columns ignored: {', '.join(names)} (keep one with --map facet:{names[0]}={names[0]})")
    for style, counts in report.get("styles", {}).items():
        skipped = "".join(f", skipped {count:,} ({reason})" for reason, count in counts["skipped"].items())
        lines.append(f"  style {style}: {counts['written']:,} written{skipped}")
    lines += [f"  part {part}: {count:,}" for part, count in report.get("split", {}).items()]
    if groups := report["duplicates"]:
        between = sum(len(group["files"]) > 1 for group in groups)
        conflicts = sum(group["conflicting_answers"] for group in groups)
        lines.append(
            f"  duplicates (kept): {len(groups):,} questions occur more than once, {between:,} of them in several "
            f"of these files, {conflicts:,} with different answers"
        )
    return "\n".join(lines)


def _epilog() -> str:
    names = {"exams": ", ".join(variants.names("exams")), "styles": ", ".join(prompts.STYLES)}
    return EPILOG.format(**names)


@cli.program(preprocess, _epilog)
def main(
    exam: str,
    /,
    *,
    inputs: Annotated[Sequence[File], Flag("FILE", names=("--input",))],
    out: Folder | None = None,
    dry_run: bool = False,
    split: Annotated[str | None, Flag("train=0.8,val=0.2")] = None,
    seed: int = 0,
    stratify: Annotated[str | None, Flag("FACET")] = None,
    **options: Any,
) -> None:
    """Turn raw exam files into questions, and into prompts where asked.

    Args:
        dry_run: show the map and the first questions as they are read, and what is dropped and why; write nothing.
        split: also write these parts; cases stay whole.
        seed: of the parts.
        stratify: each part gets its share of every value of this facet.
    """
    if out is None and not dry_run:
        raise cli.WrongUsage("--out names the folder to write to (or --dry-run shows what would be written).")
    parts = Split(parse_shares(split), seed, stratify) if split else None
    with tempfile.TemporaryDirectory(prefix="cmexam_tune.") as nowhere:
        folder = nowhere if dry_run or out is None else out
        reports = preprocess(exam, inputs, folder, split=parts, **options)
        for report in reports:
            if dry_run or AUTO in str(options.get("columns")):
                cli.say("\n".join(_preview(report, Path(folder))))
            cli.say(summary(report))
    if left_out := reports[0]["left_out"]:
        cli.say(f"left out, no columns of this exam: {', '.join(left_out)}")
    cli.say("nothing is written (--dry-run)" if dry_run else f"written to {out}")


def _preview(report: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the map that was used and the first questions as they were read, line by line."""
    if "map" in report:
        yield f"--map {shlex.quote(report['map'])}"
    path = folder / f"{report['name']}.questions.jsonl"
    for question in itertools.islice(jsonl.read(path, Question), PREVIEWED) if path.is_file() else ():
        kind = f" ({question.kind})" if question.kind else ""
        yield f"\n{question.id}{kind}\n  {_shortened(question.stem)}"
        for letter, text in question.options.items():
            mark = "*" if letter in (question.answer or "") else " "
            yield f" {mark}{letter} {_shortened(text)}"
        if question.answer is None:
            yield "  answer: not published"
        if question.explanation:
            yield f"  explanation: {_shortened(question.explanation)}"
        if question.facets:
            yield f"  {', '.join(f'{name}: {value}' for name, value in question.facets.items())}"
    yield ""


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else f"{flat[: SHOWN - 1]}…"


if __name__ == "__main__":
    cli.run(main)
