"""Score predictions by a profile's rules and write the report."""

import argparse
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cmexam_tune import __version__, profiles
from cmexam_tune.core import cli, documents, files, jsonl
from cmexam_tune.core.config.words import check_order
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.interop import predictions as others
from cmexam_tune.paper import published as paper
from cmexam_tune.profiles import Profile
from cmexam_tune.report import building, sections, writing
from cmexam_tune.scoring import bridge, comparison, grading, notes

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
    seeds: bool | None = None,
    overwrite: bool = False,
) -> building.FullReport:
    """Score predictions, and write the report to the folder `out` if one is given.

    Args:
        predictions: records or a file (also another tool's, see `interop.predictions`); several are set side by side.
        questions: the questions file or records that were predicted: exactly these ids.
        out: folder for report.json, report.md and report.html.
        profile: whose rules: one of `profiles.names()`, or `all` for `standard` with the scores of all of them.
        baseline: predictions of the same questions to compare with, question by question.
        published: show published numbers beside the run: one of `paper.published.names()`.
        latex: also write report.tex.
        seeds: whether several files are seeds of one experiment; default: as the notes beside them say.
        overwrite: replace a report in `out`.

    Returns:
        The report; where there are several files, of the first.

    Raises:
        UserError: a file is missing, or a report exists and `overwrite` is false.
        DataError: broken records, or predictions and questions do not match.
        ConfigError: an unknown profile.
    """
    rules = profiles.get("standard" if profile == ALL else profile)
    _check_out(out, overwrite)
    asked = _records(questions, Question)
    made_by = {str(path): _note(path) for path in (*_paths(predictions), *_paths(baseline or []))}
    runs = {name: _grade(asked, one, rules, name, made_by.get(name)) for name, one in _runs(predictions, asked).items()}
    first = next(iter(runs.values()))
    numbers = paper.beside(published, asked) if published else None
    against = None if baseline is None else _against(first, asked, rules, baseline, made_by)
    result = building.build(first, rules, _provenance(questions, predictions, baseline), published=numbers)
    result = replace(result, comparison=against)
    if len(runs) > 1:
        result = replace(result, **_several(runs, rules, made_by, seeds))
    if profile != bridge.STANDARD:
        result = replace(result, **_by_profile(first, profile, made_by, next(iter(runs))))
    if out is not None:
        writing.write(result, first, out, overwrite, latex)
    return result


def _several(
    runs: Mapping[str, Sequence[grading.Graded]], rules: Profile, made_by: Mapping[str, object], seeds: bool | None
) -> dict[str, Any]:
    """Return the report's sections about several runs."""
    if seeds is None:
        seeds = notes.seeds_of_one_experiment([made_by.get(name) for name in runs])
    scores = {name: grading.score(graded, rules) for name, graded in runs.items()}
    return {
        "runs": scores,
        "summary": comparison.summarise(scores) if seeds else {},
        "agreement": comparison.agreement(runs),
        "flips": comparison.flips(runs),
        "ranking": comparison.ranking(scores),
        "pairs": comparison.pairwise(runs),
    }


def _by_profile(
    first: Sequence[grading.Graded], profile: str, made_by: Mapping[str, object], name: str
) -> dict[str, Any]:
    """Return the report's sections about other profiles than ours."""
    wanted, note = profiles.names() if profile == ALL else [profile], made_by.get(name)
    scores, bridges = bridge.to_profiles(
        first, wanted, notes.style(note), _option_order(note, name), notes.asks_for_explanations(note)
    )
    return {"bridges": bridges, **({"profiles": scores} if profile == ALL else {})}


def _against(
    first: Sequence[grading.Graded],
    asked: Sequence[Question],
    rules: Profile,
    baseline: Predictions,
    made_by: Mapping[str, object],
) -> comparison.Comparison:
    name = str(baseline) if isinstance(baseline, str | Path) else "the baseline"
    other = _grade(asked, _predictions(baseline, asked), rules, name, made_by.get(name))
    return comparison.compare(other, first, rules.smoothing, name)


def _grade(
    asked: Sequence[Question], said: Sequence[Prediction], rules: Profile, name: str, note: object
) -> list[grading.Graded]:
    try:
        return grading.grade(asked, said, rules, _option_order(note, name), notes.asks_for_explanations(note))
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _option_order(note: object, name: str) -> str | None:
    """Return the order in which predict showed the options, by the note beside its predictions."""
    found = notes.prompt(note).get("option_order")
    try:
        if found is not None:
            check_order(found)
    except ValueError as error:
        raise DataError(f"{name}.meta.json: {error}.") from None
    return None if found is None else str(found)


def _records(source: Any, cls: type[T]) -> list[T]:
    return list(jsonl.read(source, cls)) if isinstance(source, str | Path) else list(source)


def _predictions(source: Any, asked: Sequence[Question]) -> list[Prediction]:
    return others.read(source, asked) if isinstance(source, str | Path) else list(source)


def _runs(predictions: Any, asked: Sequence[Question]) -> dict[str, list[Prediction]]:
    """Return the predictions of each file, or of the one set of records, by name."""
    paths = _paths(predictions)
    if not paths:
        return {"predictions": _predictions(predictions, asked)}
    if twice := [str(path) for i, path in enumerate(paths) if path in paths[:i]]:
        raise UserError(f"--predictions: {twice[0]} is given twice.")
    return {str(path): _predictions(path, asked) for path in paths}


def _paths(source: Any) -> list[str | Path]:
    return [item for item in ([source] if isinstance(source, str | Path) else source) if isinstance(item, str | Path)]


def _check_out(out: str | Path | None, overwrite: bool) -> None:
    if out is None:
        return
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    for name in writing.NAMES:
        files.check_output(Path(out) / name, overwrite)


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
    origin: dict[str, Any] = {"path": str(path), "sha256": files.sha256(path)}
    if (note := _note(path)) is not None:
        origin["made_by"] = note
    return origin


def _note(path: str | Path) -> Any:
    """Return what predict wrote beside its predictions, None where there is nothing."""
    note = Path(f"{path}.meta.json")
    return documents.read_json(note, "note of predict") if note.is_file() else None


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
    parser.add_argument(
        "--seeds",
        action=argparse.BooleanOptionalAction,
        help="several files are seeds of one experiment: mean and deviation (default: as the notes beside them say)",
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
        seeds=args.seeds,
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
