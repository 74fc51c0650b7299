"""`cmexam-tune annotate`: models propose CMExam's five annotations for questions, for people to review."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.cli import File, Flag, Override
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.own_files import OwnFiles
from cmexam_tune.core.review_sheet import QUESTION, ReviewSheet, SheetColumns, question_cells
from cmexam_tune.core.schema import Question
from cmexam_tune.inference import annotations, loading
from cmexam_tune.inference.annotations import FACETS, Proposal
from cmexam_tune.report.table import Table

SHEET = SheetColumns(
    "annotate",
    keys=("question_id", "facet"),
    before=(*QUESTION, "facet", "before"),
    after=("vote",),
    review=("review",),
)
"""The workbook for people, beside one column for each model."""
EPILOG = """The instruction is the paper's (appendix A.2); only the listed categories and 不符合 are accepted. Several
models vote. OUT is the questions with what they lacked; beside it: OUT.review.xlsx for people, OUT.report.json, and
what each model wrote, OUT.MODEL.outputs.jsonl, which grows line by line: a killed run continues. Reviews are kept by
later runs; a row that has changed since is flagged.

examples:
  cmexam-tune annotate --questions mine.questions.jsonl --config zeroshot_vllm.yaml --out mine.annotated.jsonl
  cmexam-tune annotate --questions Q.jsonl --config zeroshot_gpt4.yaml zeroshot_vllm.yaml --out Q.annotated.jsonl"""


def annotate(
    questions: str | Path,
    models: Sequence[str | Path],
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Fill the annotations that questions lack, and return the report: what was proposed, refused and agreed upon.

    Args:
        questions: as `cmexam-tune preprocess` writes them; annotations that are there stay, and are compared.
        models: recipes of the models that vote, by path or name.
        out: the annotated questions; must not be `questions`.
        overrides: changes to every recipe: `section.key=value`; `cmexam-tune train --help` lists them.
        overwrite: replace files that annotate has not written, or that were changed since. Reviews are always kept.

    Raises:
        UserError: files or models that cannot be used, or files at `out` and beside it that may not be replaced.
    """
    questions = files.check_input(questions)
    out, report, review = Path(out), Path(f"{out}.report.json"), Path(f"{out}.review.xlsx")
    for path in (out, report, review):
        files.check_output(path, overwrite=True, inputs=[questions])
    names = _names(models)
    own_files = OwnFiles(f"{out}.meta.json", "annotate", overwrite)
    own_files.check(out, report)
    _open_review(review, overwrite)  # before anybody is asked
    asked = list(jsonl.read(questions, Question))
    texts = {}
    for name, model in zip(names, models, strict=True):
        source = loading.open_source(model, overrides)
        cli.note(f"{name}: {len(asked)} questions, {len(FACETS)} annotations each")
        texts[name] = annotations.outputs(source, asked, questions, Path(f"{out}.{name}.outputs.jsonl"))
    proposed = annotations.proposals(asked, texts)
    summary = annotations.report(proposed)
    sheet = _open_review(review, overwrite)  # as it is now: somebody may have gone on with it
    sheet.update(_rows(asked, proposed), names)
    if sheet.changed:
        cli.note(f"{review}: {sheet.changed} rows are not what they were; the column `changed` says what they held.")
    sheet.write(review)
    lines = "".join(f"{jsonl.dumps(question)}\n" for question in annotations.filled(asked, proposed))
    own_files.write({report: (json.dumps(summary, ensure_ascii=False, indent=1) + "\n").encode(), out: lines.encode()})
    return summary


def _rows(questions: Sequence[Question], proposals: Sequence[Proposal]) -> list[dict[str, str]]:
    by_id = {question.id: question for question in questions}
    return [
        {
            **question_cells(by_id[proposal.question_id]),
            "facet": proposal.facet,
            "before": proposal.before or "",
            **{model: answer or "" for model, answer in proposal.by_model.items()},
            "vote": proposal.vote or "",
        }
        for proposal in proposals
    ]


def _names(models: Sequence[str | Path]) -> list[str]:
    """Return the names that models go by, each of which is a column and part of a file's name."""
    names = [Path(model).name.removesuffix(".yaml") for model in models]
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--config: two models are called {double[0]}, and a model goes by its recipe's name. Rename one."
        )
    if unusable := [name for name in names if name in SHEET.columns or not name.strip(".")]:
        raise UserError(
            f"--config: a model cannot be called {unusable[0]!r}, and goes by its recipe's name. Rename it."
        )
    return names


def _open_review(path: Path, overwrite: bool) -> ReviewSheet:
    """Return the reviews at `path`, or an empty sheet.

    Raises:
        DataError: something else is there, and `overwrite` is false.
    """
    if not path.exists():
        return ReviewSheet(SHEET)
    try:
        return ReviewSheet(SHEET, path)
    except DataError as error:
        if overwrite:
            return ReviewSheet(SHEET)
        raise DataError(
            f"{error} Mend it, move it away, choose another --out, or add --overwrite to replace it."
        ) from None


def table(summary: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    lines = []
    for facet, values in summary.items():
        for name, measures in values["agreement"].items():
            refused = values["refused"].get(name)
            cells = ["-"] * 3
            if measures is not None:
                kappa = measures["kappa"]
                cells = [
                    str(measures["n"]),
                    f"{100 * measures['accuracy']:.1f}",
                    "-" if kappa is None else f"{kappa:.2f}",
                ]
            counts = (str(values["proposed"]), str(values["none_fits"])) if refused is None else ("", "")
            lines.append((facet, name, *counts, "" if refused is None else str(refused), *cells))
    note = (
        "n, accuracy (%), kappa: against the annotations that the file had; an output that names no category is wrong."
    )
    head = ("annotation", "model", "proposed", "不符合", "refused", "n", "accuracy", "kappa")
    return Table(head, tuple(lines), note=note)


@cli.program(annotate, EPILOG)
def main(
    *overrides: Override,
    questions: File,
    models: Annotated[Sequence[str], Flag("MODEL", names=("--config",))],
    out: File,
    **options: Any,
) -> None:
    """Let models propose CMExam's five annotations, for people to review."""
    cli.say(str(table(annotate(questions, models, out, overrides, **options))))
    cli.say(f"\n{out}; to review: {out}.review.xlsx")


if __name__ == "__main__":
    cli.run(main)
