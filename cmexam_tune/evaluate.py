"""Score predictions by a profile's rules and write the report."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import (
    bridge,
    comparison,
    cut,
    grading,
    notes,
    scorers,
    selection,
)
from cmexam_tune.evaluation.scorers import Profile
from cmexam_tune.interop import predictions as others
from cmexam_tune.quality import contamination
from cmexam_tune.report import (
    building,
    identity,
    plots,
    provenance,
    sections,
    writing,
)
from cmexam_tune.report.papers import published_tables as paper
from cmexam_tune.training.run_directory import log

T = TypeVar("T")
Predictions = str | Path | Sequence[Prediction]
Questions = str | Path | Sequence[Question]
Runs = dict[str, list[grading.Graded]]
Sources = dict[str, list[str | Path]]

ALL, THIS = "all", "this run"
EPILOG = """writes DIR/report.json, DIR/report.md and DIR/report.html (one file, no network needed).

In report.json accuracy, its Wilson 95% interval accuracy_ci, BLEU and ROUGE are percentages; precision, recall and
weighted_f1 are fractions from 0 to 1, as scikit-learn gives them. Only `question_id` and `text` of a prediction are
read: the profile's parser finds answer and explanation again.

examples:
  cmexam-tune evaluate --predictions predictions.jsonl --questions test.questions.jsonl --out report
  cmexam-tune evaluate --predictions predictions.jsonl --questions test.questions.jsonl --out report --profile all
  cmexam-tune evaluate --predictions tuned.jsonl --baseline zeroshot.jsonl --questions test.questions.jsonl --out report
  cmexam-tune evaluate --predictions seed1.jsonl --predictions seed2.jsonl --questions test.questions.jsonl --out report
"""


@dataclass(frozen=True)
class Run:
    """The predictions of one run."""

    name: str
    path: str | Path | None
    predictions: Sequence[Prediction]
    note: object
    """What predict wrote beside them; None where another tool made them."""


def evaluate(
    predictions: Predictions | Sequence[str | Path],
    questions: Questions,
    out: str | Path | None = None,
    *,
    profile: str = "standard",
    baseline: Predictions | None = None,
    published: str | None = None,
    name: str | Sequence[str] = (),
    overlap: str | Path | None = None,
    latex: bool = False,
    seeds: bool | None = None,
    limit: int | None = None,
    answered_only: bool = False,
    overwrite: bool = False,
) -> building.FullReport:
    """Score predictions, write the report to the folder `out` if one is given, and return it.

    Args:
        predictions: records or a file (also another tool's, see `interop.predictions`); several: side by side.
        questions: the questions file or records that were predicted: these ids and no others.
        out: folder for report.json, report.md and report.html.
        profile: whose rules: one of `profiles.names()`, or `all` for `standard` with the scores of all of them.
        baseline: predictions of the same questions to compare with, question by question.
        published: show published numbers beside the run: one of `paper.published.names()`.
        name: what the run is called, or a name for each of several files.
        overlap: what `check` wrote about these questions: those that were also elsewhere are scored apart.
        latex: also write report.tex.
        seeds: whether several files are seeds of one experiment; default: as the notes beside them say.
        limit: score only the first so many questions.
        answered_only: score only the questions that every run has a prediction for; the report says so.
        overwrite: replace a report in `out`.

    Raises:
        UserError: a file is missing, broken or of other questions, a report exists, the profile or paper is unknown.
    """
    rules = scorers.get("standard" if profile == ALL else profile)
    _check_out(out, overwrite)
    every = _records(questions, Question)
    everyone = [*_load(predictions, name, every), *_baseline(baseline, every)]
    asked, part, (first, *more) = _selected(every, everyone, limit, answered_only)
    against = more.pop() if baseline is not None else None
    runs = {one.name: _grade(asked, one, rules) for one in (first, *more)}
    sources = {"questions": _paths(questions), "predictions": _paths(predictions), "baseline": _paths(baseline or [])}
    result = _about(first, runs, rules, sources, paper.beside(published, asked) if published else None)
    several = _several(runs, rules, [one.note for one in (first, *more)], seeds)
    result = replace(result, selection=part, **several, **_by_profile(runs[first.name], profile, first.note))
    result = replace(result, **_compared(runs, against, asked, rules), cut=cut.by_run(runs))
    result = replace(
        result, subsets=contamination.subsets(runs[first.name], result.comparison, sources["questions"], overlap)
    )
    return result if out is None else writing.write(result, runs, out, overwrite=overwrite, latex=latex)


def _selected(
    every: Sequence[Question], loaded: Sequence[Run], limit: int | None, answered_only: bool
) -> tuple[list[Question], selection.Selection | None, list[Run]]:
    """Return the questions that are scored, and the runs without the predictions for the others."""
    answered = [{prediction.question_id for prediction in run.predictions} for run in loaded]
    asked, part = selection.select(every, answered, limit, answered_only)
    left = {question.id for question in every} - {question.id for question in asked}
    kept = [replace(run, predictions=[one for one in run.predictions if one.question_id not in left]) for run in loaded]
    return asked, part, kept


def _compared(runs: Runs, against: Run | None, asked: Sequence[Question], rules: Profile) -> dict[str, Any]:
    """Return the report's section about the baseline, and put it among the runs that can be looked at."""
    if against is None:
        return {}
    graded, baseline = next(iter(runs.values())), _grade(asked, against, rules)
    runs[f"{against.name} (baseline)" if against.name in runs else against.name] = baseline
    return {"comparison": comparison.compare(baseline, graded, rules.smoothing, against.name)}


def _several(
    runs: Mapping[str, Sequence[grading.Graded]], rules: Profile, made_by: Sequence[object], seeds: bool | None
) -> dict[str, Any]:
    """Return the report's sections about several runs."""
    if len(runs) < 2:
        return {}
    if seeds is None:
        seeds = notes.seeds_of_one_experiment(made_by)
    scores = {name: grading.score(graded, rules) for name, graded in runs.items()}
    return {
        "runs": scores,
        "summary": comparison.summarise(scores) if seeds else {},
        "agreement": comparison.agreement(runs),
        "flips": comparison.flips(runs),
        "ranking": comparison.ranking(scores),
        "pairs": comparison.pairwise(runs),
    }


def _by_profile(first: Sequence[grading.Graded], profile: str, note: object) -> dict[str, Any]:
    """Return the report's sections about other profiles than ours."""
    if profile == bridge.STANDARD:
        return {}
    wanted = scorers.names() if profile == ALL else [profile]
    scores, bridges = bridge.to_profiles(
        first, wanted, notes.style(note), provenance.option_order(note), notes.asks_for_explanations(note)
    )
    return {"bridges": bridges, **({"profiles": scores} if profile == ALL else {})}


def _about(run: Run, runs: Runs, rules: Profile, sources: Sources, beside: Any) -> building.FullReport:
    """Return the report of the first run: who it is about, and the curves of its training where that is known."""
    report = building.build(runs[run.name], rules, provenance.collect(sources), run.name, beside)
    made_by, questions = run.note if isinstance(run.note, Mapping) else {}, sources["questions"]
    who = identity.identify(
        made_by,
        questions=str(questions[0]) if questions else "",
        n=len(runs[run.name]),
        profile=report.signature["profile"],
        date=date.today().isoformat(),
    )
    trained = made_by.get("run")
    curves = log.curves(Path(trained)) if isinstance(trained, str) else {}
    return replace(report, identity=who, training=curves)


def _grade(asked: Sequence[Question], run: Run, rules: Profile) -> list[grading.Graded]:
    try:
        order = provenance.option_order(run.note)
        return grading.grade(asked, run.predictions, rules, order, notes.asks_for_explanations(run.note))
    except DataError as error:
        raise DataError(f"{run.path or run.name}: {error}") from None


def _records(source: Any, cls: type[T]) -> list[T]:
    return list(jsonl.read(source, cls)) if isinstance(source, str | Path) else list(source)


def _load(predictions: Any, name: str | Sequence[str], asked: Sequence[Question]) -> list[Run]:
    """Return the predictions of each file, or of the one set of records, with their names and notes."""
    paths, given = _paths(predictions), [name] if isinstance(name, str) else list(name)
    if given and (len(given) != max(len(paths), 1) or len(set(given)) < len(given)):
        raise UserError(f"--name: {len(paths)} predictions need as many different names, got {', '.join(given)}.")
    if not paths:
        return [Run(given[0] if given else THIS, None, list(predictions), None)]
    if twice := [str(path) for i, path in enumerate(paths) if path in paths[:i]]:
        raise UserError(f"--predictions: {twice[0]} is given twice.")
    shown = given or ([THIS] if len(paths) == 1 else provenance.names(paths))
    return [
        Run(key, path, others.read(path, asked), provenance.made_by(path))
        for key, path in zip(shown, paths, strict=True)
    ]


def _baseline(predictions: Predictions | None, asked: Sequence[Question]) -> list[Run]:
    if predictions is None:
        return []
    return _load(predictions, provenance.names(_paths(predictions)) or ["the baseline"], asked)[:1]


def _paths(source: Any) -> list[str | Path]:
    return [item for item in ([source] if isinstance(source, str | Path) else source) if isinstance(item, str | Path)]


def _check_out(out: str | Path | None, overwrite: bool) -> None:
    if out is None:
        return
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    for name in writing.NAMES:
        files.check_output(Path(out) / name, overwrite)


def main(argv: Sequence[str]) -> int | None:
    """Run `cmexam-tune evaluate`."""
    parser = cli.Parser("evaluate", "Score predictions and write a report.", EPILOG)
    parser.add_argument(
        "--predictions", required=True, action="append", metavar="FILE", help="again for more runs, seeds or modes"
    )
    parser.add_argument("--questions", required=True, metavar="FILE", help="the questions that were predicted")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the report")
    parser.add_argument(
        "--profile",
        default="standard",
        metavar="NAME",
        help=f"whose rules, or {ALL}: {', '.join(scorers.names())}",
    )
    parser.add_argument("--baseline", metavar="FILE", help="predictions to compare with, question by question")
    parser.add_argument(
        "--published", metavar="EXAM", help=f"show published numbers beside the run: {', '.join(paper.names())}"
    )
    parser.add_argument(
        "--name", action="append", default=[], help="what the run is called in the report; one for each --predictions"
    )
    parser.add_argument(
        "--seeds",
        action=argparse.BooleanOptionalAction,
        help="several files are seeds of one experiment: mean and deviation (default: as the notes beside them say)",
    )
    parser.add_argument("--overlap", metavar="FILE", help="<stem>.overlap.jsonl of check: score those questions apart")
    parser.add_argument("--latex", action="store_true", help="also write report.tex")
    parser.add_argument("--plots", action="store_true", help="also write the charts as PNG and SVG to DIR/plots")
    parser.add_argument("--limit", type=int, metavar="N", help="score only the first N questions")
    parser.add_argument(
        "--answered-only", action="store_true", help="score only questions that have a prediction; the report says so"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a report in DIR")
    given = vars(parser.parse_args(argv))
    draw = given.pop("plots")
    report = evaluate(**given)
    if draw:
        plots.draw(report, Path(given["out"]))
    _say(report)
    cli.say(f"report: {Path(given['out']) / 'report.html'}")
    return None


def _say(report: building.FullReport) -> None:
    """Print the headline, and the runs or profiles beside it."""
    if report.selection:
        cli.say(report.selection.sentence)
    cli.say(sections.headline(report).text())
    count, scored = (report.overall[key] for key in ("n", "scored"))
    if scored != count:
        cli.say(f"{count} questions, {scored} of them in the accuracy")
    for name, ends in report.cut.items():
        if ends.cut:
            cli.say(f"{name}: {ends.sentence}")
    if report.runs and report.profiles:
        cli.say(f"\n{sections.by_profile(report)}")
    if report.agreement:
        cli.say(f"\n{sections.agreement(report)}")
    if report.pairs:
        cli.say(f"\n{sections.pairs(report.pairs)}")
    if report.comparison:
        cli.say(f"\n{sections.comparison(report.comparison)}")
    for one in report.subsets:
        cli.say(one.sentence)


if __name__ == "__main__":
    cli.run(main)
