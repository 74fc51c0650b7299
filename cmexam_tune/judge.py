"""`cmexam-tune judge`: score answers to CMB-Clin's cases by models or people, and say how far the judges agree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cmexam_tune.cmb_clin import human_scores
from cmexam_tune.cmb_clin.judging_folder import Again, JudgingFolder, names_of
from cmexam_tune.cmb_clin.rubric import Variant
from cmexam_tune.core import cli
from cmexam_tune.core.cli import File, Flag, Folder, Override
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.own_files import OwnFiles

Sheet = Annotated[str | Path, Flag("SHEET.xlsx")]
EPILOG = """Each judge is a recipe: a model behind an API (model.family: endpoint) or a local one. OUT/judgements/
grows line by line, and a killed run continues where it stopped. OUT/judge.json, .md, .tex and .html are made
of all of it; they are replaced by the next run unless somebody else has written or changed them (--overwrite).

examples:
  cmexam-tune judge --predictions chatglm.jsonl qwen.jsonl --cases CMB-Clin-qa.cases.jsonl \\
      --config zeroshot_gpt4_cmb.yaml zeroshot_qwen_cmb.yaml --out runs/judged
  cmexam-tune judge --predictions chatglm.jsonl --cases C.cases.jsonl --export sheet.xlsx --sample 320
  cmexam-tune judge --predictions chatglm.jsonl --cases C.cases.jsonl --import sheet.xlsx --out runs/judged
  cmexam-tune judge --predictions a.jsonl --cases test.questions.jsonl --config zeroshot_gpt4_cmb.yaml --out judged
  cmexam-tune judge ... --also reversed no_reference     how far the order of the axes and the reference move scores"""


def judge(
    predictions: Sequence[str | Path],
    cases: str | Path,
    judges: Sequence[str | Path] = (),
    out: str | Path = "judged",
    overrides: Sequence[str] = (),
    *,
    also: Sequence[Again] = (),
    imported: Annotated[Sequence[Sheet], Flag(names=("--import",))] = (),
    rubric_file: Annotated[File | None, Flag(names=("--rubric",))] = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Judge predictions and return what `judge.json` holds; judgements that are there already are kept.

    Args:
        predictions: files that `predict --questions X.cases.jsonl` wrote; their names must differ.
        cases: the cases that were answered; or an exam's questions, whose explanations are judged then.
        judges: recipes of the judges, by path or name; the file's name is the judge's.
        out: folder for judgements and tables.
        overrides: changes to every judge: `section.key=value`; `cmexam-tune train --help` lists them.
        also: judge every answer once more in these variants.
        imported: sheets that people filled in.
        rubric_file: another rubric; shipped are cmb_clin/rubric.yaml and, for questions, cmb_clin/explanations.yaml.
        overwrite: replace reports in `out` that judge has not written, or that were changed since.

    Raises:
        UserError: files that cannot be used, judgements in `out` that are of something else, or reports that may not be
            replaced.
    """
    folder, names = JudgingFolder.of(predictions, cases, rubric_file, out), names_of(judges, "judge")
    people = folder.judged_by_people(imported)
    own_files = OwnFiles(folder.path / "judge.meta.json", "judge", overwrite)
    own_files.check(*folder.reports)
    # What lies there is checked before anybody is asked.
    models = {*names, *(judged.judge for judged in folder.judged())}
    if double := models & {judged.judge for judged in people}:
        raise UserError(f"--import: {double.pop()} is also the name of a judge in {folder.path}. Rename the sheet.")
    variants: list[Variant] = ["plain", *also]
    for name, recipe in names.items():
        folder.ask(name, recipe, overrides, variants)
    judged = [*folder.judged(), *people]
    if not judged and not any(answer.text.strip() for answers in folder.answers.values() for answer in answers):
        raise UserError("judge: nothing was judged, because every answer in --predictions is empty.")
    if not judged:
        raise UserError("judge: nothing was judged. Name a judge with --config, or a sheet with --import.")
    summary = folder.summary(judged)
    texts = zip(folder.reports, folder.texts(summary, judged), strict=True)
    own_files.write({path: text.encode() for path, text in texts})
    cli.say("\n\n".join(table.text() for table in folder.tables(summary)))
    return summary


@cli.program(judge, EPILOG)
def main(
    *overrides: Override,
    predictions: Sequence[File],
    cases: File,
    judges: Annotated[Sequence[str], Flag("JUDGE", names=("--config",))] = (),
    out: Folder | None = None,
    rubric_file: Annotated[File | None, Flag(names=("--rubric",))] = None,
    export: Sheet | None = None,
    sample: int | None = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Score answers to CMB-Clin's cases by models or by people.

    Args:
        export: write a sheet for a person to fill in, and nothing else.
        sample: with --export: so many answers (default: all).
        seed: with --export: of drawing and shuffling.
    """
    if sample is not None and sample < 1:
        raise UserError(f"--sample {sample}: at least 1 is needed.")
    if export:
        folder = JudgingFolder.of(predictions, cases, rubric_file)
        count = human_scores.export(export, folder.cases, folder.answers, folder.rubric, sample=sample, seed=seed)
        cli.say(f"{export}: {count} answers; {human_scores.key_path(export)} says which model wrote which")
        return
    if not out:
        raise UserError("judge: --out names the folder for judgements and tables (or --export a sheet).")
    judge(predictions, cases, judges, out, overrides, rubric_file=rubric_file, **options)


if __name__ == "__main__":
    cli.run(main)
