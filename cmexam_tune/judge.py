"""`cmexam-tune judge`: score answers to CMB-Clin's cases by models or people, and say how far the judges agree."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cmexam_tune.cmb_clin import explanations, human_scores, judge_page, judging, results, rubric
from cmexam_tune.cmb_clin.judgements import Judged, Judgement
from cmexam_tune.cmb_clin.rubric import Rubric, Variant
from cmexam_tune.core import __version__, cli, documents, files, jsonl
from cmexam_tune.core.cli import File, Flag, Folder, Override
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.own_files import OwnFiles
from cmexam_tune.core.schema import Case, Prediction, Question
from cmexam_tune.evaluation import prediction_metadata
from cmexam_tune.inference import loading, provenance
from cmexam_tune.inference.records import ResumableFile, meta_path
from cmexam_tune.prompts import dialogue
from cmexam_tune.report.table import Text

Again = Literal["reversed", "no_reference"]
Sheet = Annotated[str | Path, Flag("SHEET.xlsx")]
ALSO: tuple[Again, ...] = get_args(Again)
VARIANTS: tuple[Variant, ...] = ("plain", *ALSO)
SUFFIXES = (".md", ".tex", ".html", ".json")
"""Of the reports, which are called judge."""
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


@dataclass(frozen=True)
class _Work:
    cases: Sequence[Case]
    answers: Mapping[str, Sequence[Prediction]]
    rubric: Rubric
    out: Path

    def task(self, model: str, variant: Variant) -> judging.JudgingTask:
        """Return what there is to judge of one predictions file."""
        answers = {answer.question_id: answer for answer in self.answers[model]}
        return judging.JudgingTask(self.cases, answers, self.rubric, variant)


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
    judged_cases = _asked(cases)
    rubric_file = rubric_file or _shipped(cases)
    rules = rubric.read(rubric_file)
    work = _Work(judged_cases, _read(predictions, cases, judged_cases), rules, Path(out))
    names, people = _names(judges, "judge"), _people(work, imported)
    own_files = OwnFiles(work.out / "judge.meta.json", "judge", overwrite)
    own_files.check(*(work.out / f"judge{suffix}" for suffix in SUFFIXES))
    # What lies there is checked before anybody is asked.
    models = {*names, *(judged.judge for judged in _judged(work))}
    if double := models & {judged.judge for judged in people}:
        raise UserError(f"--import: {double.pop()} is also the name of a judge in {work.out}. Rename the sheet.")
    variants: list[Variant] = ["plain", *also]
    for name, source in names.items():
        _judge(work, name, loading.open_source(source, overrides), variants)
    judged = [*_judged(work), *people]
    if not judged and not any(answer.text.strip() for answers in work.answers.values() for answer in answers):
        raise UserError("judge: nothing was judged, because every answer in --predictions is empty.")
    if not judged:
        raise UserError("judge: nothing was judged. Name a judge with --config, or a sheet with --import.")
    axes = [Text(key, axis.name) for key, axis in rules.axes.items()]
    summary = results.summary(judged, work.cases, work.answers, axes)
    notes = {name: prediction_metadata.read(path) for name, path in _names(predictions, "predictions file").items()}
    decoding = {name: note.decoding for name, note in notes.items() if note is not None and note.decoding is not None}
    summary["temperatures"] = results.temperatures(summary["models"], decoding)
    summary["provenance"] = _provenance(predictions, cases, rubric_file)
    answered = judge_page.Answered(work.cases, work.answers, judged)
    reports = _reports(summary, axes, answered)
    own_files.write({work.out / f"judge{suffix}": text.encode() for suffix, text in reports.items()})
    cli.say("\n\n".join(table.text() for table in results.tables(summary, axes)))
    return summary


def _asked(path: str | Path) -> list[Case]:
    """Return the cases of a file, or the explained questions of an exam, each a case of one turn."""
    if dialogue.is_cases(path):
        return list(jsonl.read(path, Case))
    asked = explanations.cases(jsonl.read(path, Question))
    if not asked:
        raise UserError(
            f"{path}: holds no cases (`cmexam-tune preprocess cmb --input CMB-Clin-qa.json` makes them) and no "
            "questions with explanations."
        )
    return asked


def _shipped(cases: str | Path) -> Path:
    """Return the rubric for what a file asks."""
    return rubric.SHIPPED if dialogue.is_cases(cases) else explanations.RUBRIC


def _read(predictions: Sequence[str | Path], cases: str | Path, asked: Sequence[Case]) -> dict[str, list[Prediction]]:
    turns, exam = set(dialogue.keys(asked)), not dialogue.is_cases(cases)
    outputs = {}
    for name, path in _names(predictions, "predictions file").items():
        if name.endswith(tuple(f".{variant}" for variant in ALSO)):
            raise UserError(f"{path}: the end of its name is that of judgements with --also. Rename it.")
        read = jsonl.read(path, Prediction)
        outputs[name] = explanations.answers(read, asked) if exam else list(read)
        if exam and not outputs[name]:
            raise UserError(
                f"{path}: answers no explained question of {cases}. Are these predictions of these questions?"
            )
        if strange := [output.question_id for output in outputs[name] if output.question_id not in turns]:
            raise UserError(f"{path}: {strange[0]!r} is no turn of {cases}. Are these predictions of these cases?")
    return outputs


def _names(paths: Sequence[str | Path], what: str) -> dict[str, str | Path]:
    by_name: dict[str, str | Path] = {}
    for path in paths:
        name = Path(path).name.removesuffix(".yaml").removesuffix(".jsonl").removesuffix(".predictions")
        if not name.strip("."):
            raise UserError(f"{path}: a {what} goes by its name, and {name!r} can be none. Rename it.")
        if name in by_name:
            raise UserError(f"{path}: {by_name[name]} has the same name, and a {what} goes by its name. Rename one.")
        by_name[name] = path
    return by_name


def _judge(work: _Work, name: str, source: loading.Source, variants: Sequence[Variant]) -> None:
    # One model for all predictions and variants, loaded when the first of them lacks a judgement.
    open_judge = functools.cache(lambda: loading.open_writer(source.beside(work.out / name), "judge"))
    for model in work.answers:
        for variant in variants:
            task = work.task(model, variant)
            meta = {**provenance.of_model(source.config, source.run), "judged": _fingerprint(task)}
            path = place(work.out, name, model, variant)
            path.parent.mkdir(parents=True, exist_ok=True)
            with ResumableFile(path, meta, remedy="Move it away, or choose another --out.") as file:
                if not file.done_ids.issuperset(task.keys):
                    cli.note(f"{name} judges {model}" + (f" ({variant})" if variant != "plain" else ""))
                    judging.judge_missing(file, task, open_judge, source.config.generation.prompts_at_once)


def _fingerprint(task: judging.JudgingTask) -> str:
    """Return a checksum of everything a judge reads."""
    import hashlib

    digest = hashlib.sha256()
    for case in task.cases:
        for number, _ in enumerate(case.turns, 1):
            answer = task.answers.get(dialogue.key(case, number))
            if answer is not None:
                request = task.rubric.request(case, number, answer.text, task.variant)
                digest.update(json.dumps([request.question.id, request.question.stem]).encode())
    return digest.hexdigest()


def place(out: Path, judge: str, model: str, variant: Variant) -> Path:
    """Return the file of one judge's judgements about one predictions file."""
    return out / "judgements" / judge / f"{model}{'' if variant == 'plain' else '.' + variant}.jsonl"


def _judged(work: _Work) -> list[Judged]:
    """Return the judgements about these predictions in the folder, of all judges."""
    judged = []
    for folder in sorted(path for path in (work.out / "judgements").glob("*") if path.is_dir()):
        for model in work.answers:
            for variant in VARIANTS:
                path = place(work.out, folder.name, model, variant)
                if path.is_file() and path.stat().st_size:
                    judgements = tuple(_read_back(path, work.task(model, variant)))
                    judged.append(Judged(folder.name, model, judgements, variant))
    return judged


def _read_back(path: Path, task: judging.JudgingTask) -> Iterator[Judgement]:
    """Yield the judgements in a file, each of which must be one that the task can have led to.

    Raises:
        DataError: a line that is none; names file and line.
        UserError: the file is about something else.
    """
    note = documents.read_json(meta_path(path), "note of judge")
    if note.get("judged") != _fingerprint(task):
        raise UserError(
            f"{path}: holds judgements of another experiment (other answers, cases or rubric). Move it away, or choose "
            "another --out."
        )
    answer_ids, line_of = set(task.keys), dict[str, int]()
    for line, value in jsonl.read_objects(path, unfinished=True):
        judgement = jsonl.from_object(Judgement, value, f"{path}:{line}")
        key, scores = judgement.question_id, judgement.scores
        problem = None if scores is None else task.rubric.problem(scores)
        if key not in answer_ids:
            problem = f"{key!r} is no answer that is judged here"
        elif (first := line_of.setdefault(key, line)) != line:
            problem = f"{key!r} is judged on line {first} already"
        if problem:
            raise DataError(f"{path}:{line}: {problem}. Delete the line; an answer that has none is judged again.")
        yield judgement


def _people(work: _Work, imported: Sequence[str | Path]) -> list[Judged]:
    """Return the judgements in the sheets that people filled in."""
    answered = {model: {answer.question_id for answer in answers} for model, answers in work.answers.items()}
    names = [Path(path).stem for path in imported]
    if double := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--import: two sheets are called {double[0]}, and a judge goes by the sheet's name. Rename one."
        )
    return [judged for path in imported for judged in human_scores.read(path, work.rubric, answered)]


def _provenance(predictions: Sequence[str | Path], cases: str | Path, words: str | Path) -> dict[str, object]:
    return {
        "cases": {"file": str(cases), "sha256": files.sha256(cases)},
        "predictions": [{"file": str(path), "sha256": files.sha256(path)} for path in predictions],
        "rubric_sha256": files.sha256(words),
        "cmexam_tune": __version__,
    }


def _reports(summary: Mapping[str, object], axes: Sequence[str], answered: judge_page.Answered) -> dict[str, str]:
    """Return suffix -> text of every file that is made of a summary."""
    tables = results.tables(summary, axes)
    texts = (
        "\n".join(table.markdown() for table in tables),
        "\n".join(table.latex() for table in tables),
        judge_page.page(tables, answered, axes),
        json.dumps(summary, ensure_ascii=False, indent=1) + "\n",
    )
    return dict(zip(SUFFIXES, texts, strict=True))


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
        asked = _asked(cases)
        answers, rules = _read(predictions, cases, asked), rubric.read(rubric_file or _shipped(cases))
        count = human_scores.export(export, asked, answers, rules, sample=sample, seed=seed)
        cli.say(f"{export}: {count} answers; {human_scores.key_path(export)} says which model wrote which")
        return
    if not out:
        raise UserError("judge: --out names the folder for judgements and tables (or --export a sheet).")
    judge(predictions, cases, judges, out, overrides, rubric_file=rubric_file, **options)


if __name__ == "__main__":
    cli.run(main)
