"""`cmexam-tune annotate`: models propose CMExam's five annotations for questions, for people to review."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.inference import annotations, loading
from cmexam_tune.inference.annotations import FACETS, Proposal
from cmexam_tune.report.table import Table

EPILOG = """The instruction is the paper's (appendix A.2); only the listed categories and 不符合 are accepted. Several
models vote. OUT is the questions with what they lacked; beside it: OUT.review.xlsx for people, OUT.report.json, and
what each model wrote, OUT.MODEL.outputs.jsonl, which grows line by line: a killed run continues.

examples:
  cmexam-tune annotate --questions mine.questions.jsonl --config zeroshot_vllm.yaml --out mine.annotated.jsonl
  cmexam-tune annotate --questions Q.jsonl --config zeroshot_gpt4.yaml zeroshot_vllm.yaml --out Q.annotated.jsonl"""


def annotate(
    questions: str | Path, models: Sequence[str | Path], out: str | Path, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Fill the annotations that questions lack, and return the report: what was proposed, refused and agreed upon.

    Args:
        questions: as `preprocess` writes them; annotations that are there stay, and are compared.
        models: recipes, by path or name.
        out: the annotated questions; must not be `questions`.
        overrides: `section.key=value` changes to every recipe.

    Raises:
        UserError: files or models that cannot be used, or an `out` that was not written by annotate.
    """
    out = files.check_output(out, overwrite=True, inputs=[files.check_input(questions)])
    report = Path(f"{out}.report.json")
    if out.exists() and not report.is_file():
        raise UserError(f"{out}: exists and was not written by annotate. Choose another --out.")
    asked = list(jsonl.read(questions, Question))
    names = [Path(model).name.removesuffix(".yaml") for model in models]
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--config: two models are called {double[0]}, and a model goes by its recipe's name. Rename one."
        )
    from cmexam_tune.inference import annotating

    written = {}
    for name, model in zip(names, models, strict=True):
        source = loading.open_source(model, overrides)
        cli.note(f"{name}: {len(asked)} questions, {len(FACETS)} annotations each")
        written[name] = annotating.outputs(source, asked, Path(questions), Path(f"{out}.{name}.outputs.jsonl"))
    proposed = annotations.proposals(asked, written)
    found = annotations.report(proposed)
    with files.atomic_write(report) as handle:
        json.dump(found, handle, ensure_ascii=False, indent=1)
        handle.write("\n")
    with files.atomic_write(f"{out}.review.xlsx", binary=True) as handle:
        _review(asked, proposed, names).save(handle)
    jsonl.write(out, annotations.filled(asked, proposed), overwrite=True)
    return found


def _review(questions: Sequence[Question], proposed: Sequence[Proposal], models: Sequence[str]) -> Any:
    """Return a sheet with a row for each question and facet: what it is, what the file and the models say, the vote."""
    from openpyxl import Workbook
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    book = Workbook()
    sheet = book.active
    sheet.title = "review"
    sheet.append(["question_id", "stem", "options", "facet", "before", *models, "vote", "review"])
    known = {question.id: question for question in questions}
    for one in proposed:
        question = known[one.question_id]
        options = "\n".join(f"{letter} {text}" for letter, text in question.options.items())
        cells = [question.id, question.stem, options, one.facet, one.before or ""]
        cells += [one.by_model[model] or "" for model in models]
        sheet.append([ILLEGAL_CHARACTERS_RE.sub("", cell) for cell in (*cells, one.vote or "", "")])
    for line in sheet.iter_rows(min_row=2):
        for cell in line:
            cell.data_type = "s" if isinstance(cell.value, str) else cell.data_type  # = starts no formula
    sheet.freeze_panes = "A2"
    return book


def table(found: Mapping[str, Any]) -> Table:
    """Return the report as a table."""
    lines = []
    for facet, one in found.items():
        for name, measures in one["agreement"].items():
            refused = one["refused"].get(name)
            cells = ["-"] * 3
            if measures is not None:
                kappa = measures["kappa"]
                cells = [
                    str(measures["n"]),
                    f"{100 * measures['accuracy']:.1f}",
                    "-" if kappa is None else f"{kappa:.2f}",
                ]
            counts = (str(one["proposed"]), str(one["none_fits"])) if refused is None else ("", "")
            lines.append((facet, name, *counts, "" if refused is None else str(refused), *cells))
    note = (
        "n, accuracy (%), kappa: against the annotations that the file had; an output that names no category is wrong."
    )
    head = ("annotation", "model", "proposed", "不符合", "refused", "n", "accuracy", "kappa")
    return Table(head, tuple(lines), note=note)


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and annotate."""
    parser = cli.Parser("annotate", "Let models propose CMExam's five annotations, for people to review.", EPILOG)
    cli.add_overrides(parser)
    parser.add_argument("--questions", required=True, metavar="FILE", help="as `cmexam-tune preprocess` writes them")
    parser.add_argument("--config", required=True, nargs="+", metavar="MODEL", help="recipes of the models that vote")
    parser.add_argument("--out", required=True, metavar="FILE", help="the questions with their annotations")
    got = parser.parse_intermixed_args(list(argv))
    models, more = cli.without_overrides(got.config)
    cli.say(str(table(annotate(got.questions, models, got.out, [*more, *got.overrides]))))
    cli.say(f"\n{got.out}; to review: {got.out}.review.xlsx")
    return None


if __name__ == "__main__":
    cli.run(main)
