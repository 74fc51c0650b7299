"""What is judged, and the folder that holds its judgements: OUT/judgements/<judge>/<predictions>[.<variant>].jsonl."""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cmexam_tune.cmb_clin import explanations, human_scores, judge_page, judging, results, rubric
from cmexam_tune.cmb_clin.judgements import Judged, Judgement
from cmexam_tune.cmb_clin.rubric import Rubric, Variant
from cmexam_tune.core import __version__, cli, documents, files, jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Case, Prediction, Question
from cmexam_tune.evaluation import prediction_metadata
from cmexam_tune.inference import loading, provenance
from cmexam_tune.inference.records import ResumableFile, meta_path
from cmexam_tune.prompts import dialogue
from cmexam_tune.report.table import Table, Text

Again = Literal["reversed", "no_reference"]
ALSO: tuple[Again, ...] = get_args(Again)
VARIANTS: tuple[Variant, ...] = ("plain", *ALSO)
SUFFIXES = (".md", ".tex", ".html", ".json")
"""Of the reports, which are called judge."""


@dataclass(frozen=True)
class JudgingFolder:
    """Answers of models to cases, and the judgements about them in a folder."""

    path: Path
    predictions: Mapping[str, str | Path]
    """Name -> file."""
    cases_file: str | Path
    rubric_file: str | Path
    cases: Sequence[Case]
    answers: Mapping[str, Sequence[Prediction]]
    """Name of the predictions -> answers."""
    rubric: Rubric

    @classmethod
    def of(
        cls,
        predictions: Sequence[str | Path],
        cases: str | Path,
        rubric_file: str | Path | None = None,
        path: str | Path = "",
    ) -> "JudgingFolder":
        """Read what is judged, all of it; nothing is written.

        Args:
            predictions: files whose names differ.
            cases: the cases that were answered; or an exam's questions, whose explanations are judged then.
            rubric_file: None: the shipped one for what `cases` asks.
            path: the folder.

        Raises:
            UserError: files that cannot be used.
        """
        rubric_file = rubric_file or (rubric.SHIPPED if dialogue.is_cases(cases) else explanations.RUBRIC)
        rules, judged_cases, paths = (
            rubric.read(rubric_file),
            read_cases(cases),
            names_of(predictions, "predictions file"),
        )
        turns, exam = set(dialogue.keys(judged_cases)), not dialogue.is_cases(cases)
        answers = {}
        for name, file in paths.items():
            if name.endswith(tuple(f".{variant}" for variant in ALSO)):
                raise UserError(f"{file}: the end of its name is that of judgements with --also. Rename it.")
            outputs = jsonl.read(file, Prediction)
            answers[name] = explanations.answers(outputs, judged_cases) if exam else list(outputs)
            if exam and not answers[name]:
                raise UserError(
                    f"{file}: answers no explained question of {cases}. Are these predictions of these questions?"
                )
            if strange := [answer.question_id for answer in answers[name] if answer.question_id not in turns]:
                raise UserError(f"{file}: {strange[0]!r} is no turn of {cases}. Are these predictions of these cases?")
        return cls(Path(path), paths, cases, rubric_file, judged_cases, answers, rules)

    @property
    def axes(self) -> list[Text]:
        """The rubric's axes as tables name them."""
        return [Text(key, axis.name) for key, axis in self.rubric.axes.items()]

    @property
    def reports(self) -> list[Path]:
        """The files that are made of all judgements."""
        return [self.path / f"judge{suffix}" for suffix in SUFFIXES]

    def task(self, model: str, variant: Variant) -> judging.JudgingTask:
        """Return what there is to judge of one predictions file."""
        answers = {answer.question_id: answer for answer in self.answers[model]}
        return judging.JudgingTask(self.cases, answers, self.rubric, variant)

    def file_of(self, judge: str, model: str, variant: Variant) -> Path:
        """Return the file of one judge's judgements about one predictions file."""
        return self.path / "judgements" / judge / f"{model}{'' if variant == 'plain' else '.' + variant}.jsonl"

    def ask(self, judge: str, recipe: str | Path, overrides: Sequence[str], variants: Sequence[Variant]) -> None:
        """Let the model of a recipe judge what it has not judged yet.

        Raises:
            UserError: a recipe that cannot be used, or its file in the folder is of another experiment.
        """
        source = loading.open_source(recipe, overrides)
        # One model for all predictions and variants, loaded when the first of them lacks a judgement.
        open_judge = functools.cache(lambda: loading.open_writer(source.beside(self.path / judge), "judge"))
        for model in self.answers:
            for variant in variants:
                task = self.task(model, variant)
                meta = {**provenance.of_model(source.config, source.run), "judged": fingerprint(task)}
                path = self.file_of(judge, model, variant)
                path.parent.mkdir(parents=True, exist_ok=True)
                with ResumableFile(path, meta, remedy="Move it away, or choose another --out.") as file:
                    if not file.done_ids.issuperset(task.keys):
                        cli.note(f"{judge} judges {model}" + (f" ({variant})" if variant != "plain" else ""))
                        judging.judge_missing(file, task, open_judge, source.config.generation.prompts_at_once)

    def judged(self) -> list[Judged]:
        """Return the judgements about these answers in the folder, of all judges.

        Raises:
            UserError: a file that is about something else, or holds a line that is no judgement.
        """
        judged = []
        for folder in sorted(path for path in (self.path / "judgements").glob("*") if path.is_dir()):
            for model in self.answers:
                for variant in VARIANTS:
                    path = self.file_of(folder.name, model, variant)
                    if path.is_file() and path.stat().st_size:
                        judgements = tuple(_read_back(path, self.task(model, variant)))
                        judged.append(Judged(folder.name, model, judgements, variant))
        return judged

    def judged_by_people(self, sheets: Sequence[str | Path]) -> list[Judged]:
        """Return the judgements in the sheets that people filled in."""
        answered = {model: {answer.question_id for answer in answers} for model, answers in self.answers.items()}
        names = [Path(path).stem for path in sheets]
        if double := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"--import: two sheets are called {double[0]}, and a judge goes by the sheet's name. Rename one."
            )
        return [judged for path in sheets for judged in human_scores.read(path, self.rubric, answered)]

    def summary(self, judged: Sequence[Judged]) -> dict[str, Any]:
        """Return what judge.json holds."""
        summary = results.summary(judged, self.cases, self.answers, self.axes)
        notes = {name: prediction_metadata.read(path) for name, path in self.predictions.items()}
        decoding = {
            name: note.decoding for name, note in notes.items() if note is not None and note.decoding is not None
        }
        summary["temperatures"] = results.temperatures(summary["models"], decoding)
        summary["provenance"] = {
            "cases": {"file": str(self.cases_file), "sha256": files.sha256(self.cases_file)},
            "predictions": [{"file": str(path), "sha256": files.sha256(path)} for path in self.predictions.values()],
            "rubric_sha256": files.sha256(self.rubric_file),
            "cmexam_tune": __version__,
        }
        return summary

    def tables(self, summary: Mapping[str, Any]) -> list[Table]:
        """Return the tables of a summary."""
        return results.tables(summary, self.axes)

    def texts(self, summary: Mapping[str, Any], judged: Sequence[Judged]) -> list[str]:
        """Return the texts of `reports`."""
        tables = self.tables(summary)
        return [
            "\n".join(table.markdown() for table in tables),
            "\n".join(table.latex() for table in tables),
            judge_page.page(tables, judge_page.Answered(self.cases, self.answers, judged), self.axes),
            json.dumps(summary, ensure_ascii=False, indent=1) + "\n",
        ]


def read_cases(path: str | Path) -> list[Case]:
    """Return the cases of a file, or the explained questions of an exam, each a case of one turn.

    Raises:
        UserError: there is nothing to judge answers to.
    """
    if dialogue.is_cases(path):
        return list(jsonl.read(path, Case))
    cases = explanations.cases(jsonl.read(path, Question))
    if not cases:
        raise UserError(
            f"{path}: holds no cases (`cmexam-tune preprocess cmb --input CMB-Clin-qa.json` makes them) and no "
            "questions with explanations."
        )
    return cases


def names_of(paths: Sequence[str | Path], what: str) -> dict[str, str | Path]:
    """Return name -> file, for what goes by its file's name.

    Raises:
        UserError: two have the same name, or a file's name can be none.
    """
    by_name: dict[str, str | Path] = {}
    for path in paths:
        name = Path(path).name.removesuffix(".yaml").removesuffix(".jsonl").removesuffix(".predictions")
        if not name.strip("."):
            raise UserError(f"{path}: a {what} goes by its name, and {name!r} can be none. Rename it.")
        if name in by_name:
            raise UserError(f"{path}: {by_name[name]} has the same name, and a {what} goes by its name. Rename one.")
        by_name[name] = path
    return by_name


def fingerprint(task: judging.JudgingTask) -> str:
    """Return a checksum of everything a judge reads."""
    digest = hashlib.sha256()
    for case in task.cases:
        for number, _ in enumerate(case.turns, 1):
            answer = task.answers.get(dialogue.key(case, number))
            if answer is not None:
                request = task.rubric.request(case, number, answer.text, task.variant)
                digest.update(json.dumps([request.question.id, request.question.stem]).encode())
    return digest.hexdigest()


def _read_back(path: Path, task: judging.JudgingTask) -> Iterator[Judgement]:
    """Yield the judgements in a file, each of which must be one that the task can have led to.

    Raises:
        DataError: a line that is none; names file and line.
        UserError: the file is about something else.
    """
    note = documents.read_json(meta_path(path), "note of judge")
    if note.get("judged") != fingerprint(task):
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
