"""Score predictions by a profile's rules and write the report."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cmexam_tune import __version__, profiles
from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.config.words import check_order
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question, Scores
from cmexam_tune.paper import published as paper
from cmexam_tune.profiles import Profile
from cmexam_tune.report import building, sections, writing
from cmexam_tune.scoring import comparison, grading

T = TypeVar("T")
Predictions = str | Path | Sequence[Prediction]
Questions = str | Path | Sequence[Question]

ALL = "all"
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


def evaluate(  # noqa: PLR0913 - one argument for each flag of the program
    predictions: Predictions | Sequence[str | Path],
    questions: Questions,
    out: str | Path | None = None,
    *,
    profile: str = "standard",
    baseline: Predictions | None = None,
    published: str | None = None,
    latex: bool = False,
    overwrite: bool = False,
) -> building.FullReport:
    """Score predictions, and write the report to the folder `out` where one is given.

    Args:
        predictions: a predictions file or records; several files are runs or modes that are reported side by side.
        questions: the questions file or records that were predicted: exactly these ids.
        out: folder for report.json, report.md and report.html.
        profile: whose rules: one of `profiles.names()`, or `all` for `standard` with the scores of all of them.
        baseline: predictions of the same questions to compare with, question by question.
        published: show published numbers beside the run: one of `paper.published.names()`.
        latex: also write report.tex.
        overwrite: replace a report in `out`.

    Returns:
        The report; where there are several files, of the first.

    Raises:
        UserError: a file is missing or empty, or a report exists and `overwrite` is false.
        DataError: broken records, or predictions and questions do not match.
        ConfigError: an unknown profile.
    """
    rules = profiles.get("standard" if profile == ALL else profile)
    if out is not None:
        _check_out(Path(out), overwrite)
    asked = _records(questions, Question)
    runs = {name: _grade(asked, one, rules, name) for name, one in _runs(predictions).items()}
    first = next(iter(runs.values()))
    against = None if baseline is None else _against(first, asked, rules, baseline)
    numbers = paper.beside(published, asked) if published else None
    result = building.build(first, rules, _provenance(questions, predictions, baseline), published=numbers)
    result = replace(result, comparison=against)
    if len(runs) > 1:
        result = _with_runs(result, runs, rules)
    if profile == ALL:
        said = [one.prediction for one in first]
        result = replace(result, profiles=all_profiles(said, asked, _option_order(next(iter(runs)))))
    if out is not None:
        writing.write(result, first, out, overwrite, latex)
    return result


def all_profiles(predictions: Predictions, questions: Questions, option_order: str | None = None) -> dict[str, Scores]:
    """Return the scores of the same outputs by every profile, so that a gap between two papers can be explained."""
    asked, said = _records(questions, Question), _records(predictions, Prediction)
    graded = {name: grading.grade(asked, said, name, option_order) for name in profiles.names()}
    return {name: grading.score(some, name) for name, some in graded.items()}


def _with_runs(
    report: building.FullReport, runs: Mapping[str, Sequence[grading.Graded]], rules: Profile
) -> building.FullReport:
    scores = {name: grading.score(graded, rules) for name, graded in runs.items()}
    spread, agreement = comparison.summarise(scores), comparison.agreement(runs)
    return replace(report, runs=scores, summary=spread, agreement=agreement, flips=comparison.flips(runs))


def _against(
    first: Sequence[grading.Graded], asked: Sequence[Question], rules: Profile, baseline: Predictions
) -> comparison.Comparison:
    name = str(baseline) if isinstance(baseline, str | Path) else "the baseline"
    other = _grade(asked, _records(baseline, Prediction), rules, name)
    return comparison.compare(other, first, rules.smoothing, name)


def _grade(asked: Sequence[Question], said: Sequence[Prediction], rules: Profile, name: str) -> list[grading.Graded]:
    try:
        return grading.grade(asked, said, rules, _option_order(name))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _option_order(path: str) -> str | None:
    """Return the order in which predict showed the options, by the note beside its predictions."""
    try:
        found = _made_by(path)["config"]["prompt"]["option_order"]
        if found is not None:
            check_order(found)
    except (KeyError, TypeError):
        return None
    except ValueError as error:
        raise DataError(f"{path}.meta.json: {error}.") from None
    return None if found is None else str(found)


def _records(source: Any, cls: type[T]) -> list[T]:
    return list(jsonl.read(source, cls)) if isinstance(source, str | Path) else list(source)


def _runs(predictions: Any) -> dict[str, list[Prediction]]:
    """Return the predictions of each file, or of the one set of records, by name."""
    paths = _paths(predictions)
    if not paths:
        return {"predictions": _records(predictions, Prediction)}
    if twice := [str(path) for i, path in enumerate(paths) if path in paths[:i]]:
        raise UserError(f"--predictions: {twice[0]} is given twice.")
    return {str(path): _records(path, Prediction) for path in paths}


def _paths(source: Any) -> list[str | Path]:
    return [item for item in ([source] if isinstance(source, str | Path) else source) if isinstance(item, str | Path)]


def _check_out(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    for name in writing.NAMES:
        files.check_output(out / name, overwrite)


def _provenance(questions: Any, predictions: Any, baseline: Any) -> dict[str, Any]:
    """Return checksums of the files, how predictions were made where predict left a note, and versions."""
    from importlib.metadata import version

    libraries = {name: version(name) for name in ("rapidfuzz", "sacrebleu", "rouge-score", "jieba")}
    sources = {"questions": questions, "predictions": predictions, "baseline": baseline or []}
    return {
        **{name: [_origin(path) for path in _paths(source)] for name, source in sources.items()},
        "versions": {"cmexam_tune": __version__, "python": platform.python_version(), **libraries},
    }


def _origin(path: str | Path) -> dict[str, Any]:
    made_by = _made_by(path)
    return {"path": str(path), "sha256": files.sha256(path), **({} if made_by is None else {"made_by": made_by})}


def _made_by(path: str | Path) -> Any:
    """Return the note that predict left beside its file, or None."""
    note = Path(f"{path}.meta.json")
    if not note.is_file():
        return None
    try:
        return json.loads(note.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{note}: broken JSON, {error}. Predict writes this file; scoring needs none.") from None


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
        help=f"whose rules, or {ALL}: {', '.join(profiles.names())}",
    )
    parser.add_argument("--baseline", metavar="FILE", help="predictions to compare with, question by question")
    parser.add_argument(
        "--published", metavar="EXAM", help=f"show published numbers beside the run: {', '.join(paper.names())}"
    )
    parser.add_argument("--latex", action="store_true", help="also write report.tex")
    parser.add_argument("--overwrite", action="store_true", help="replace a report in DIR")
    args = parser.parse_args(argv)
    report = evaluate(
        args.predictions,
        args.questions,
        args.out,
        profile=args.profile,
        baseline=args.baseline,
        published=args.published,
        latex=args.latex,
        overwrite=args.overwrite,
    )
    _say(report)
    cli.say(f"report: {Path(args.out) / 'report.html'}")
    return None


def _say(report: building.FullReport) -> None:
    """Print the headline, and the runs or profiles beside it."""
    cli.say(sections.headline(report).text())
    count, scored = (report.overall[key] for key in ("n", "scored"))
    if scored != count:
        cli.say(f"{count} questions, {scored} of them in the accuracy")
    if report.agreement:
        cli.say(f"\n{sections.agreement(report)}")
    if report.comparison:
        cli.say(f"\n{sections.comparison(report.comparison)}")


if __name__ == "__main__":
    cli.run(main)
