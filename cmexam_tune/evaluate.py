"""Score predictions by a scorer's rules and write the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.cli import File, Flag, Folder
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import comparison, grading, prediction_metadata, scorers
from cmexam_tune.evaluation import metrics as metrics_by_name
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.evaluation.scorers import STANDARD, Scorer
from cmexam_tune.interop import predictions as other_tools
from cmexam_tune.interop.sealing import verifying
from cmexam_tune.quality import contamination
from cmexam_tune.quality import errata as known_errors
from cmexam_tune.report import building, identity, result_tables, table, writing
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.papers import published_tables
from cmexam_tune.training.run_directory import log

T = TypeVar("T")
Predictions = str | Path | Sequence[Prediction]
Questions = str | Path | Sequence[Question]

ALL, THIS = "all", "this run"
EPILOG = """writes DIR/report.json, DIR/report.md and DIR/report.html (one file, no network needed).

In report.json accuracy, its Wilson 95% interval accuracy_ci, BLEU and ROUGE are percentages; precision, recall and
weighted_f1 are fractions from 0 to 1, as scikit-learn gives them. Only `question_id` and `text` of a prediction are
read: the profile's parser finds answer and explanation again.

{names}

examples:
  cmexam-tune evaluate --predictions predictions.jsonl --questions test.questions.jsonl --out report
  cmexam-tune evaluate --predictions predictions.jsonl --questions test.questions.jsonl --out report --profile all
  cmexam-tune evaluate --predictions tuned.jsonl --baseline zeroshot.jsonl --questions test.questions.jsonl --out report
  cmexam-tune evaluate --verify sealed/lora_llama --questions test.questions.jsonl
  cmexam-tune evaluate --predictions seed1.jsonl --predictions seed2.jsonl --questions test.questions.jsonl --out report
"""


@dataclass(frozen=True)
class RunPredictions:
    """The predictions of one run."""

    name: str
    path: str | Path | None
    predictions: Sequence[Prediction]
    metadata: PredictionMetadata
    """What predict recorded beside them; empty where another tool made them."""

    @property
    def answered(self) -> set[str]:
        """Ids of the questions that it has a prediction for."""
        return {prediction.question_id for prediction in self.predictions}

    def grade(self, exam: Sequence[Question], scored: Sequence[Question], scorer: Scorer) -> list[Graded]:
        """Return the questions of `exam` that are scored, graded; predictions for the others are let go."""
        left_out = {question.id for question in exam} - {question.id for question in scored}
        predictions = [prediction for prediction in self.predictions if prediction.question_id not in left_out]
        try:
            order, explanations = self.metadata.option_order, self.metadata.asks_for_explanations
            return grading.grade(scored, predictions, scorer, order, explanations)
        except DataError as error:
            raise DataError(f"{self.path or self.name}: {error}") from None


def evaluate(
    predictions: Predictions | Sequence[str | Path],
    questions: Questions,
    out: str | Path | None = None,
    *,
    profile: str = STANDARD,
    baseline: Predictions | None = None,
    published: str | None = None,
    name: str | Sequence[str] = (),
    overlap: File | None = None,
    metrics: Annotated[Sequence[str], Flag("NAME,...", names=("--metric",), separator=",")] = (),
    errata: File | None = None,
    latex: bool = False,
    seeds: bool | None = None,
    limit: int | None = None,
    answered_only: bool = False,
    subset: int | None = None,
    overwrite: bool = False,
) -> FullReport:
    """Score predictions, write the report to the folder `out` if one is given, and return it.

    Args:
        predictions: what models wrote, also by another tool; several files (runs, seeds, modes) are shown side by side.
        questions: the questions that were predicted: these ids and no others.
        out: folder for report.json, report.md and report.html.
        profile: whose rules: a name in `evaluation/scorers`, or `all`: `standard`, and beside it the scores of all.
        baseline: predictions of the same questions to compare with, question by question.
        published: show published numbers beside the run: cmexam, cmb, or another of `published_tables.names()`.
        name: what the run is called in the report; one name for each of several files, and one more for the baseline.
        overlap: <stem>.overlap.jsonl of `check`: questions that were also elsewhere are scored apart.
        metrics: more numbers: names in `evaluation/metrics`, or modules of your own (my_lab.partly_right).
        errata: errata.yaml of `check --reviewed`: questions that people found to be wrong are scored apart.
        latex: also write report.tex.
        seeds: whether several files are seeds of one experiment: mean and deviation; default: as the metadata beside
            them say.
        limit: score only the first so many questions.
        answered_only: score only the questions that every run has a prediction for; the report says so.
        subset: choose so many questions whose accuracy stands for that of all, by three runs or more; they go to
            subset.questions.jsonl, and the report says how far they are off.
        overwrite: replace a report in `out`.

    Raises:
        UserError: a file is missing, broken or of other questions, a report exists, the profile or paper is unknown.
    """
    scorer = _scorer(profile, metrics)
    _check_out(out, overwrite)
    exam = _records(questions, Question)
    runs, baseline_run = _load(predictions, baseline, name, exam)
    first = runs[0]

    answered = [run.answered for run in (*runs, *([] if baseline_run is None else [baseline_run]))]
    scored, selection = grading.select(exam, answered, limit=limit, answered_only=answered_only)
    graded = {run.name: run.grade(exam, scored, scorer) for run in runs}

    # The baseline is no run of the report; it is only compared with, and shown question by question.
    shown, compared = dict(graded), None
    if baseline_run is not None:
        reference = baseline_run.grade(exam, scored, scorer)
        clash = baseline_run.name in graded
        shown[f"{baseline_run.name} (baseline)" if clash else baseline_run.name] = reference
        compared = comparison.compare(reference, graded[first.name], scorer.smoothing, baseline_run.name)
        computed = prediction_metadata.computed_differently(baseline_run.metadata, first.metadata)
        compared = replace(compared, scores=grading.score(reference, scorer), computed=computed)

    inputs = {"questions": _paths(questions), "predictions": _paths(predictions), "baseline": _paths(baseline or [])}
    report = building.build(
        graded[first.name],
        scorer,
        identity.provenance(inputs),
        first.name,
        published_tables.beside(published, scored) if published else None,
        runs=graded,
        subset=subset,
        explained={run.name: run.metadata.asks_for_explanations for run in runs},
    )
    report = replace(
        report,
        identity=_identity(first, inputs["questions"], len(scored), scorer),
        training=_training_curves(first),
        metrics=scorer.metrics,
        selection=selection,
        comparison=compared,
        cut={key: cut for key, items in shown.items() if (cut := grading.truncation(items))},
        subsets=contamination.subsets(
            graded[first.name], compared, inputs["questions"], overlap, known_errors.read(errata) if errata else ()
        ),
        **_several_runs(graded, scorer, runs, seeds),
        **_other_scorers(graded[first.name], profile, first.metadata),
    )
    if out is None:
        return report
    ids = set() if subset is None else set(report.computed["item_response"].subset.ids)
    chosen = [question for question in scored if question.id in ids]
    return writing.write(report, shown, out, overwrite=overwrite, latex=latex, subset=chosen)


def _scorer(profile: str, metrics: Sequence[str]) -> Scorer:
    """Return the scorer whose rules decide, with the metrics that users added to its own."""
    # With `all`, ours decides; the others' scores stand beside it (`_other_scorers`).
    scorer = scorers.get(STANDARD if profile == ALL else profile)
    return replace(scorer, metrics={**scorer.metrics, **dict(map(metrics_by_name.get, metrics))})


def _several_runs(
    graded: Mapping[str, Sequence[Graded]], scorer: Scorer, runs: Sequence[RunPredictions], seeds: bool | None
) -> dict[str, Any]:
    """Return the report's sections about several runs, none of a single one."""
    if len(graded) < 2:
        return {}
    if seeds is None:
        seeds = prediction_metadata.are_seeds_of_one_experiment([run.metadata for run in runs])
    scores = {name: grading.score(items, scorer) for name, items in graded.items()}
    return {
        "runs": scores,
        "summary": comparison.summarise(scores) if seeds else {},
        "agreement": comparison.agreement(graded),
        "flips": comparison.flips(graded),
        "ranking": comparison.ranking(scores),
        "pairs": comparison.pairwise(graded),
    }


def _other_scorers(graded: Sequence[Graded], profile: str, metadata: PredictionMetadata) -> dict[str, Any]:
    """Return the report's sections about other scorers than ours, none where only ours was asked for."""
    if profile == STANDARD:
        return {}
    scores, decompositions = comparison.by_scorers(
        graded,
        scorers.names() if profile == ALL else [profile],
        style=metadata.style,
        option_order=metadata.option_order,
        explanations=metadata.asks_for_explanations,
    )
    return {"bridges": decompositions, "profiles": scores if profile == ALL else {}}


def _identity(run: RunPredictions, questions: Sequence[str | Path], n: int, scorer: Scorer) -> identity.Identity:
    file = str(questions[0]) if questions else ""
    return identity.identify(run.metadata, file, n, scorer.name, date.today().isoformat())


def _training_curves(run: RunPredictions) -> Mapping[str, list[tuple[int, float]]]:
    """Return the curves of the training that made the predictions, none where it is unknown."""
    folder = run.metadata.values.get("run")
    return log.curves(Path(folder)) if isinstance(folder, str) else {}


def _records(source: str | Path | Sequence[T], cls: type[T]) -> list[T]:
    return list(jsonl.read(source, cls)) if isinstance(source, str | Path) else list(source)


def _load(
    predictions: Predictions | Sequence[str | Path],
    baseline: Predictions | None,
    name: str | Sequence[str],
    exam: Sequence[Question],
) -> tuple[list[RunPredictions], RunPredictions | None]:
    """Return the runs of the report, and the one that they are compared with."""
    names = [name] if isinstance(name, str) and name else list(name)
    # A name more than there are runs is the baseline's.
    named = baseline is not None and len(names) == max(len(_paths(predictions)), 1) + 1
    baseline_names = [names.pop()] if named else []
    runs = _load_runs(predictions, names, exam)
    if baseline is None:
        return runs, None
    baseline_names = baseline_names or identity.names(_paths(baseline)) or ["the baseline"]
    return runs, _load_runs(baseline, baseline_names, exam)[0]


def _load_runs(
    predictions: Predictions | Sequence[str | Path], names: Sequence[str], exam: Sequence[Question]
) -> list[RunPredictions]:
    """Return the predictions of each file, or of the one set of records, with their names and metadata."""
    paths = _paths(predictions)
    if names and (len(names) != max(len(paths), 1) or len(set(names)) < len(names)):
        raise UserError(f"--name: {len(paths)} predictions need as many different names, got {', '.join(names)}.")
    if not paths and not isinstance(predictions, str | Path):
        records = [item for item in predictions if isinstance(item, Prediction)]
        return [RunPredictions(names[0] if names else THIS, None, records, PredictionMetadata())]
    if twice := [str(path) for i, path in enumerate(paths) if path in paths[:i]]:
        raise UserError(f"--predictions: {twice[0]} is given twice.")
    names = names or ([THIS] if len(paths) == 1 else identity.names(paths))
    return [
        RunPredictions(key, path, other_tools.read(path, exam), prediction_metadata.read(path) or PredictionMetadata())
        for key, path in zip(names, paths, strict=True)
    ]


def _paths(source: str | Path | Sequence[object]) -> list[str | Path]:
    """Return the files among what was given: one, several, or none where records themselves were."""
    items = [source] if isinstance(source, str | Path) else source
    return [item for item in items if isinstance(item, str | Path)]


def _check_out(out: str | Path | None, overwrite: bool) -> None:
    if out is None:
        return
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    for name in writing.NAMES:
        files.check_output(Path(out) / name, overwrite)


def _epilog() -> str:
    names = {
        "profiles": scorers.names(),
        "metrics": metrics_by_name.names(),
        "published numbers": published_tables.names(),
    }
    return EPILOG.format(names="\n".join(f"{kind}: {', '.join(known)}" for kind, known in names.items()))


@cli.program(evaluate, _epilog)
def main(
    *,
    predictions: Sequence[File] = (),
    questions: File | None = None,
    out: Folder = "",
    verify: Folder = "",
    baseline: File | None = None,
    plots: bool = False,
    **options: Any,
) -> int:
    """Score predictions and write a report, or recompute a sealed folder.

    Args:
        verify: recompute a folder of `export --results` and name what does not reproduce (exit status 1); with
            --questions also what follows from the questions' texts.
        plots: also write the charts as PNG and SVG to DIR/plots.
    """
    if verify:
        if predictions or out or baseline or plots or options:
            raise cli.WrongUsage("--verify takes --questions and nothing else.")
        return _verify(verify, questions)
    if questions is None or not (predictions and out):
        raise cli.WrongUsage("--predictions, --questions and --out are needed (or --verify DIR).")
    report = evaluate(predictions, questions, out, baseline=baseline, **options)
    if plots:
        from cmexam_tune.report.plots import draw

        draw(report, Path(out))
    show(report)
    cli.say(f"report: {Path(out) / 'report.html'}")
    return 0


def _verify(folder: str | Path, questions: str | Path | None) -> int:
    """Print what of a sealed folder does not reproduce, and return the exit status."""
    verified = verifying.verify(folder, questions)
    for problem in verified.problems:
        cli.say(f"does not reproduce: {problem}")
    for remark in verified.remarks:
        cli.say(f"note: {remark}")
    if verified.problems or verified.derived is None:
        return 1
    accuracy = verified.derived.scores[STANDARD]["accuracy"]
    cli.say(
        f"{folder}: reproduces ({len(verified.questions):,} questions, {len(verified.derived.scores)} profiles, "
        f"accuracy {table.cell('accuracy', accuracy)}%)\nseal: {verified.seal}"
    )
    return 0


def show(report: FullReport) -> None:
    """Print the headline, and the runs or scorers beside it."""
    if report.selection:
        cli.say(report.selection.sentence)
    cli.say(result_tables.headline(report).text())
    count, scored = (report.overall[key] for key in ("n", "scored"))
    if scored != count:
        cli.say(f"{count} questions, {scored} of them in the accuracy")
    for name, truncation in report.cut.items():
        if truncation.cut:
            cli.say(f"{name}: {truncation.sentence}")
    if report.runs and report.profiles:
        cli.say(f"\n{result_tables.by_scorer(report)}")
    if report.agreement:
        cli.say(f"\n{result_tables.agreement(report)}")
    if report.pairs:
        cli.say(f"\n{result_tables.pairs(report.pairs)}")
    if report.comparison:
        cli.say(f"\n{result_tables.comparison(report.comparison, report.name)}")
    for subset in report.subsets:
        cli.say(subset.sentence)


if __name__ == "__main__":
    cli.run(main)
