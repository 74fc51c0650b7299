"""The result of judging: one plain mapping, and its tables beside the paper's."""

from collections.abc import Mapping, Sequence
from typing import Any

from cmexam_tune.cmb_clin import judgements
from cmexam_tune.cmb_clin.judgements import Judged
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.evaluation.significance import mean_std
from cmexam_tune.prompts import dialogue
from cmexam_tune.report.papers import published_tables
from cmexam_tune.report.table import Table

TABLES = ("table5", "table6", "table8")
"""CMB's: general models and medical models by GPT-4, models by three experts."""
TEXT = ("bleu1", "bleu4", "rouge1", "rouge2", "rougeL")


def summary(
    judged: Sequence[Judged],
    cases: Sequence[Case],
    predictions: Mapping[str, Sequence[Prediction]],
    axes: Sequence[str],
) -> dict[str, Any]:
    """Return all that `judge.json` holds beside its provenance.

    Args:
        judged: of every judge and predictions file.
        cases: what was asked.
        predictions: name -> answers.
        axes: of the rubric.
    """
    judges = list(dict.fromkeys(run.judge for run in judged))
    plain = {(run.model, run.judge): run.means(axes) for run in judged if run.variant == "plain"}
    models = {}
    for model, answers in predictions.items():
        by_judge = {judge: plain[model, judge] for judge in judges if (model, judge) in plain}
        together = {
            axis: dict(zip(("mean", "std"), mean_std(values), strict=True))
            for axis in (*axes, "average")
            if (values := [float(mean) for means in by_judge.values() if (mean := means[axis]) is not None])
        }
        models[model] = {**_answered(cases, answers), "judges": by_judge, "over_judges": together}
    return {
        "models": models,
        "agreement": judgements.agreements(judged, axes),
        "moves": judgements.moves(judged, axes),
    }


def _answered(cases: Sequence[Case], answers: Sequence[Prediction]) -> dict[str, Any]:
    """Return how many turns have an answer, and BLEU and ROUGE against the references in characters.

    A turn without an answer scores 0 there: it stays in the denominator.
    """
    from cmexam_tune.evaluation import text_metrics

    texts = {
        answer.question_id: answer.text.rpartition("</think>")[2].strip()
        for answer in answers
        if answer.finish != "error"
    }
    references = [turn.answer for case in cases for turn in case.turns]
    hypotheses = [texts.get(name, "") for name in dialogue.keys(cases)]
    scores = text_metrics.aggregate(text_metrics.pair_statistics(hypotheses, references))
    return {
        "turns": len(references),
        "answered": sum(map(bool, hypotheses)),
        "text": {name: scores[name] for name in TEXT},
    }


def tables(found: Mapping[str, Any], axes: Sequence[str]) -> list[Table]:
    """Return the tables of a summary: scores beside the paper's, text metrics, agreement, and how far scores move."""
    summary_tables = [_scores(found, axes), _texts(found)]
    if found["agreement"]:
        summary_tables.append(_agreement(found["agreement"]))
    if found["moves"]:
        summary_tables.append(_moves(found["moves"]))
    return summary_tables


def _scores(found: Mapping[str, Any], axes: Sequence[str]) -> Table:
    columns = (*axes, "average")
    lines = []
    for model, values in found["models"].items():
        for judge, means in values["judges"].items():
            cells = [_spread(means[axis], means.get(f"{axis}_std")) for axis in columns]
            lines.append((model, judge, *cells, str(means["n"]), str(means["unread"] + means["failed"])))
        if len(values["judges"]) > 1:
            cells = [
                _spread(*values["over_judges"].get(axis, {"mean": None, "std": None}).values()) for axis in columns
            ]
            lines.append((model, "mean of judges", *cells, "", ""))
    for name in TABLES:
        table = published_tables.table("cmb", name)
        judge = f"{'three experts' if name == 'table8' else 'GPT-4'}, CMB Table {name[-1]}"
        for line in table.lines:
            lines.append((line.name, judge, *(_number(line.values.get(axis)) for axis in columns), "", ""))
    head = ("model", "judge", *columns, "judged", "unread")
    note = (
        "Mean±deviation over turns, 1 to 5; average is the mean of the axis means; of several judges the deviation is "
        "over judges. Published lines: CMB (arXiv 2308.08833), other judges and another rubric's words, so compare "
        "orders and differences rather than values. Judgements that could not be read are in no mean."
    )
    return Table(head, tuple(lines), "CMB-Clin", note)


def _texts(found: Mapping[str, Any]) -> Table:
    lines = [
        (model, str(values["turns"]), str(values["answered"]), *(_number(values["text"][name]) for name in TEXT))
        for model, values in found["models"].items()
    ]
    note = "Percent, against the reference answers, in characters; a turn without an answer scores 0."
    return Table(("model", "turns", "answered", *TEXT), tuple(lines), "Text metrics", note)


def _agreement(found: Sequence[Mapping[str, Any]]) -> Table:
    measures = ("spearman", "pearson", "kendall", "weighted_kappa")
    lines = [
        (
            f"{row['first']} / {row['second']}",
            row["axis"],
            str(row["n"]),
            *(_number(row.get(name)) for name in measures),
        )
        for row in found
    ]
    note = (
        "Over answers that both scored; weighted kappa: quadratic weights; ranking: the order of the models. "
        "Published: Spearman 0.93 of the rankings by experts and GPT-4 (11 models), Pearson above 0.71 on each axis "
        "(320 answers)."
    )
    return Table(("judges", "axis", "n", *measures), tuple(lines), "Agreement of the judges", note)


def _moves(found: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        (
            f"{row['judge']}, {row['variant']}",
            row["axis"],
            str(row["n"]),
            f"{100 * row['moved']:.1f}",
            _number(row["by"]),
            f"{row['shift']:+.2f}",
        )
        for row in found
    ]
    note = "The same answers judged with the axes in the opposite order, or without the reference answer."
    head = ("judge, variant", "axis", "n", "% moved", "by (mean)", "shift")
    return Table(head, tuple(lines), "How far scores move", note)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(mean: float | None, deviation: float | None) -> str:
    return _number(mean) + ("" if deviation is None else f"±{deviation:.2f}")
