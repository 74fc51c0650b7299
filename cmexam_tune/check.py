"""Duplicates, overlap with tests and suspicious answers in question files, and files without them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import yaml

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.cli import File, Flag, Folder
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.review_sheet import ReviewSheet
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import grading, prediction_metadata
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.interop import predictions as other_tools
from cmexam_tune.quality import passages as passages_of
from cmexam_tune.quality import wrong_keys
from cmexam_tune.quality.findings import (
    DEFAULT_DROP,
    REASONS,
    Checked,
    check_files,
    check_reasons,
    names_of,
)
from cmexam_tune.quality.passages import Leak
from cmexam_tune.quality.wrong_keys import Suspect

SHEET, ERRATA = "keys.review.xlsx", "errata.yaml"
EPILOG = f"""writes to DIR, and changes nothing else:
  check.json, check.md, check.html     counts, every finding, the pairs side by side with their differences marked
  <stem>.clean.questions.jsonl         for each of --questions: the questions that are safe to train on
  <stem>.overlap.jsonl                 each pair with its score and reason; `evaluate --overlap` reads it
  keys.review.xlsx                     with --predictions: questions whose key may be wrong, for a doctor, whose columns
                                       are verdict ({", ".join(wrong_keys.VERDICTS)}), answer, reviewer, reason
  <stem>.clean.passages.jsonl          with --passages: those without a question or its explanation; check.json lists
                                       the others
  errata.yaml                          with --reviewed: what they found; `evaluate --errata` scores with and without

--questions is what you train on; --against are the tests and whatever else must not be in it. Near duplicates are
found by MinHash over character 5-grams of stem and sorted options (128 permutations), then compared exactly: a
Jaccard similarity from 0.7 on is a duplicate, 0.5 to 0.7 is for a person to judge (listed as `similar`, not
dropped). Matching questions share all options and differ in a word of the stem: where their answers differ too,
they are listed as `sibling`. A question with 16 similar ones or more is listed with the most similar and with one
that it repeats, not with all.

reasons for --drop: {", ".join(REASONS)}
`exact`, `near`, `stem` and `case` drop questions that are in an --against file; `duplicate` drops repetitions within
--questions (the first stays); `contradiction` drops both of two questions that differ in the answer only.

examples:
  cmexam-tune check --questions train.questions.jsonl --against val.questions.jsonl test.questions.jsonl --out checked
  cmexam-tune check --questions cmb.questions.jsonl --against test.questions.jsonl --drop exact,near,mojibake --out c
  cmexam-tune check --questions test.questions.jsonl --predictions a.jsonl b.jsonl c.jsonl --out keys
  cmexam-tune check --questions test.questions.jsonl --reviewed keys/keys.review.xlsx --out reviewed
"""


def check(
    questions: Sequence[str | Path],
    against: Sequence[str | Path] = (),
    out: str | Path | None = None,
    *,
    drop: Annotated[Sequence[str], Flag("a,b", separator=",")] = DEFAULT_DROP,
    predictions: Sequence[File] = (),
    reviewed: File | None = None,
    passages: File | None = None,
    overwrite: bool = False,
) -> Checked:
    """Check question files, and write what was found to the folder `out` where one is given.

    Args:
        questions: files to check, for example those to train on.
        against: files whose questions must not be among them, for example the tests.
        out: folder to write to.
        drop: reasons to leave a question out of `<stem>.clean.questions.jsonl`.
        predictions: what three or more models answered to --questions (one file): where they speak against a key,
            the question goes into OUT/keys.review.xlsx, for a doctor to judge.
        passages: a file for prompt.context: passages that hold --questions or their explanations are listed, and those
            that do not go into OUT/<stem>.clean.passages.jsonl.
        reviewed: that workbook, judged: OUT/errata.yaml for `evaluate --errata`.
        overwrite: replace files of an earlier call; a workbook is never replaced, but added to.

    Raises:
        UserError: a file is missing or empty, two have one name, or an output exists and `overwrite` is false.
        ConfigError: an unknown reason.
    """
    check_reasons(drop)
    checked = [files.check_input(path) for path in questions]
    references = [files.check_input(path) for path in against]
    names = names_of([*checked, *references])
    targets = [] if out is None else _targets(Path(out), list(names)[: len(checked)], overwrite)
    if out is not None and passages:
        targets.append(files.check_output(Path(out) / _clean_passages(passages), overwrite, inputs=[passages]))
    if taken := {path.resolve() for path in targets} & {path.resolve() for path in names.values()}:
        raise UserError(f"{taken.pop()}: would be replaced by the result of its own check. Choose another --out.")
    # Whatever can be wrong with a file is found before the comparison of all pairs, which takes minutes.
    suspects = _suspects(checked, predictions)
    sheet = _sheet(out) if predictions else None
    errata = _errata(checked, reviewed)
    result = check_files(checked, references, drop)
    result.suspects = suspects
    result.leaks = _leaks(checked, passages)
    if out is not None:
        _write(result, names, Path(out))
        if passages:
            leaking = {leak.passage_id for leak in result.leaks}
            clean = [passage for passage in passages_of.read(passages) if passage.id not in leaking]
            jsonl.write(Path(out) / _clean_passages(passages), clean, overwrite)
        if sheet is not None:
            sheet.update(wrong_keys.rows(suspects, list(jsonl.read(checked[0], Question))))
            sheet.write(Path(out) / SHEET)
        if reviewed:
            with files.atomic_write(Path(out) / ERRATA) as handle:
                yaml.safe_dump(errata, handle, allow_unicode=True, sort_keys=False)
    return result


def _clean_passages(path: str | Path) -> str:
    return f"{Path(path).name.removesuffix('.jsonl').removesuffix('.passages')}.clean.passages.jsonl"


def _leaks(questions: Sequence[Path], path: str | Path | None) -> list[Leak]:
    """Return the passages that hold questions or their explanations."""
    if path is None:
        return []
    exam = [question for file in questions for question in jsonl.read(file, Question)]
    leaking = list(passages_of.leaks(passages_of.read(path), exam))
    cli.note(f"{path}: {len(leaking)} passages hold a question or its explanation")
    return leaking


def _suspects(questions: Sequence[Path], predictions: Sequence[str | Path]) -> list[Suspect]:
    """Return the questions against whose key predictions speak, none without predictions."""
    if not predictions:
        return []
    exam = _exam(questions, "--predictions")
    graded = {}
    for path in predictions:
        metadata = prediction_metadata.read(path) or PredictionMetadata()
        outputs = other_tools.read(path, exam)
        graded[str(path)] = grading.grade(exam, outputs, option_order=metadata.option_order, explanations=False)
    return wrong_keys.suspects(graded)


def _exam(questions: Sequence[Path], flag: str) -> list[Question]:
    if len(questions) != 1:
        raise UserError(f"{flag}: is about one file of --questions, and {len(questions)} are given.")
    return list(jsonl.read(questions[0], Question))


def _errata(questions: Sequence[Path], sheet: str | Path | None) -> list[dict[str, object]]:
    if sheet is None:
        return []
    path = files.check_input(sheet, "sheet")
    return wrong_keys.reviewed(ReviewSheet(wrong_keys.SHEET, path), path.name, _exam(questions, "--reviewed"))


def _sheet(out: str | Path | None) -> ReviewSheet:
    """Return the workbook in a folder, a new one where there is none yet."""
    path = None if out is None else Path(out) / SHEET
    return ReviewSheet(wrong_keys.SHEET, path if path and path.exists() else None)


def _targets(out: Path, names: Sequence[str], overwrite: bool) -> list[Path]:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    of_files = [f"{name}.{part}" for name in names for part in ("clean.questions.jsonl", "overlap.jsonl")]
    return [
        files.check_output(out / name, overwrite)
        for name in (*of_files, "check.json", "check.md", "check.html", ERRATA)
    ]


def _write(result: Checked, paths: dict[str, Path], out: Path) -> None:
    from cmexam_tune.quality import check_page

    for name in result.questions:
        with files.atomic_write(out / f"{name}.clean.questions.jsonl") as handle:
            dropped = result.dropped[name]
            for line, value in jsonl.read_objects(paths[name]):
                if line not in dropped:
                    handle.write(jsonl.dumps(value) + "\n")
        with files.atomic_write(out / f"{name}.overlap.jsonl") as handle:
            for pair in result.overlaps:
                if pair.file == name:
                    handle.write(jsonl.dumps(asdict(pair)) + "\n")
    texts = {
        "check.json": json.dumps(result.to_dict(), ensure_ascii=False, indent=1) + "\n",
        "check.md": check_page.markdown(result),
        "check.html": check_page.page(result, paths),
    }
    for name, text in texts.items():
        with files.atomic_write(out / name) as handle:
            handle.write(text)


@cli.program(check, EPILOG)
def main(*, questions: Sequence[File], against: Sequence[File] = (), out: Folder, **options: Any) -> None:
    """Find duplicates, overlap with tests, and suspicious questions."""
    result = check(questions, against, out, **options)
    from cmexam_tune.quality import check_page

    for table in check_page.tables(result):
        cli.say(table.text() + "\n")
    cli.say(f"written to {out}")


if __name__ == "__main__":
    cli.run(main)
