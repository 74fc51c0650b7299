"""The result of judging: one plain mapping, and its tables beside the paper's."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from cmexam_tune.cmb_clin import judgements
from cmexam_tune.cmb_clin.judgements import Judged
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.evaluation.significance import correlations, mean_std
from cmexam_tune.prompts import dialogue
from cmexam_tune.report.papers import published_tables
from cmexam_tune.report.table import Table, Text

TABLES = ("table5", "table6", "table8")
"""CMB's: general models and medical models by GPT-4, models by three experts."""
MODEL, AXIS = Text("model", "模型"), Text("axis", "评分项")
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
    lengths = {
        (model, key): len(text) for model, answers in predictions.items() for key, text in _read(answers).items()
    }
    return {
        "models": models,
        "agreement": judgements.agreements(judged, axes),
        "length": judgements.by_length(judged, lengths, axes),
        "moves": judgements.sensitivity(judged, axes),
    }


def temperatures(
    models: Mapping[str, Mapping[str, Any]], decoding: Mapping[str, tuple[str, float]]
) -> list[dict[str, Any]]:
    """Return how alike every two temperatures rank the models, for each judge, as CMB's Table 7.

    Args:
        models: what `summary` has under this key.
        decoding: name of a predictions file -> its model and temperature, where that is known.
    """
    averages: dict[str, dict[float, dict[str, float]]] = {}
    for name, (model, temperature) in decoding.items():
        for judge, means in models[name]["judges"].items():
            if means["average"] is not None:
                averages.setdefault(judge, {}).setdefault(temperature, {})[model] = means["average"]
    rows = []
    for judge, by_temperature in averages.items():
        for first, second in combinations(sorted(by_temperature), 2):
            both = sorted(by_temperature[first].keys() & by_temperature[second].keys())
            ranked = [[by_temperature[temperature][model] for model in both] for temperature in (first, second)]
            if len(both) > 2:  # of two, the order says nothing
                spearman = correlations(*ranked)["spearman"]
                rows.append({"judge": judge, "first": first, "second": second, "n": len(both), "spearman": spearman})
    return rows


def _answered(cases: Sequence[Case], answers: Sequence[Prediction]) -> dict[str, object]:
    """Return how many turns have an answer, and BLEU and ROUGE against the references in characters.

    A turn without an answer scores 0 there: it stays in the denominator.
    """
    from cmexam_tune.evaluation import text_metrics

    texts = _read(answers)
    references = [turn.answer for case in cases for turn in case.turns]
    hypotheses = [texts.get(name, "") for name in dialogue.keys(cases)]
    scores = text_metrics.aggregate(text_metrics.pair_statistics(hypotheses, references))
    return {
        "turns": len(references),
        "answered": sum(map(bool, hypotheses)),
        "text": {name: scores[name] for name in TEXT},
    }


def _read(answers: Sequence[Prediction]) -> dict[str, str]:
    """Return id of a turn -> what its reader sees of the answer."""
    return {
        answer.question_id: answer.text.rpartition("</think>")[2].strip()
        for answer in answers
        if answer.finish != "error"
    }


def tables(result: Mapping[str, Any], axes: Sequence[str]) -> list[Table]:
    """Return the tables of a summary: scores beside the paper's, text metrics, and how far scores can be relied on."""
    summary_tables = [_scores(result, axes), _texts(result)]
    if result["agreement"]:
        summary_tables.append(_agreement(result["agreement"]))
    if result["length"]:
        summary_tables.append(_length(result["length"]))
    if result["moves"]:
        summary_tables.append(_moves(result["moves"]))
    if result["temperatures"]:
        summary_tables.append(_temperatures(result["temperatures"]))
    return summary_tables


def _scores(result: Mapping[str, Any], axes: Sequence[str]) -> Table:
    columns, shown = (*axes, "average"), (*axes, Text("average", "平均"))
    lines: list[tuple[str, ...]] = []
    for model, values in result["models"].items():
        for judge, means in values["judges"].items():
            cells = [_spread(means[axis], means.get(f"{axis}_std")) for axis in columns]
            lines.append((model, judge, *cells, str(means["n"]), str(means["unread"] + means["failed"])))
        if len(values["judges"]) > 1:
            cells = [
                _spread(*values["over_judges"].get(axis, {"mean": None, "std": None}).values()) for axis in columns
            ]
            lines.append((model, Text("mean of judges", "各评委平均"), *cells, "", ""))
    for name in TABLES:
        table = published_tables.table("cmb", name)
        en, zh = ("three experts", "三位专家") if name == "table8" else ("GPT-4", "GPT-4")
        judge = Text(f"{en}, CMB Table {name[-1]}", f"{zh}，CMB 表 {name[-1]}")
        # Another rubric has other axes, of which the paper says nothing.
        for line in table.lines if {*axes} & {*table.lines[0].values} else ():
            lines.append((line.name, judge, *(_number(line.values.get(axis)) for axis in columns), "", ""))
    head = (MODEL, Text("judge", "评委"), *shown, Text("judged", "已评"), Text("unread", "未读出"))
    note = Text(
        "Mean±deviation over turns, 1 to 5; average is the mean of the axis means; of several judges the deviation is "
        "over judges. Published lines: CMB (arXiv 2308.08833), other judges and another rubric's words, so compare "
        "orders and differences rather than values. Judgements that could not be read are in no mean.",
        "各轮得分的平均±标准差，1 到 5 分；“平均”为各评分项平均分的平均；多位评委时标准差是评委之间的。"
        "论文数值见 CMB（arXiv 2308.08833），评委和评分标准的措辞都不同，宜比较名次和差距。无法读取的评分不计入平均。",
    )
    return Table(head, tuple(lines), Text("Scores", "得分"), note)


def _texts(result: Mapping[str, Any]) -> Table:
    lines = [
        (model, str(values["turns"]), str(values["answered"]), *(_number(values["text"][name]) for name in TEXT))
        for model, values in result["models"].items()
    ]
    note = Text(
        "Percent, against the reference answers, in characters; a turn without an answer scores 0.",
        "与参考答案相比，按字计算，单位 %；没有作答的轮次计 0 分。",
    )
    head = (MODEL, Text("turns", "轮次"), Text("answered", "已作答"), *TEXT)
    return Table(head, tuple(lines), Text("Text metrics", "文本指标"), note)


def _agreement(agreements: Sequence[Mapping[str, Any]]) -> Table:
    measures = ("spearman", "pearson", "kendall", "weighted_kappa")
    lines = [
        (
            f"{row['first']} / {row['second']}",
            row["axis"],
            str(row["n"]),
            *(_number(row.get(name)) for name in measures),
        )
        for row in agreements
    ]
    note = Text(
        "Over answers that both scored; weighted kappa: quadratic weights; ranking: the order of the models. "
        "Published: Spearman 0.93 of the rankings by experts and GPT-4 (11 models), Pearson above 0.71 on each axis "
        "(320 answers).",
        "只计两位评委都评过的作答；weighted kappa 为二次加权；ranking 是模型名次的一致性。论文：专家与 GPT-4 名次的 "
        "Spearman 为 0.93（11 个模型），各评分项的 Pearson 高于 0.71（320 份作答）。",
    )
    head = (Text("judges", "评委"), AXIS, "n", *measures)
    return Table(head, tuple(lines), Text("Agreement of the judges", "评委一致性"), note)


def _length(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [(row["judge"], row["axis"], str(row["n"]), _number(row["spearman"])) for row in rows]
    note = Text(
        "Spearman correlation of the scores with the answers' characters. Longer answers may be better ones: a judge "
        "that likes length for its own sake is well above the people who scored the same answers.",
        "得分与作答字数的 Spearman 相关。较长的作答也可能确实更好；若某评委的相关明显高于评同样作答的人，"
        "则说明它偏好长度本身。",
    )
    head = (Text("judge", "评委"), AXIS, "n", "spearman")
    return Table(head, tuple(lines), Text("Scores and length", "得分与长度"), note)


def _moves(sensitivities: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        (
            f"{row['judge']}, {row['variant']}",
            row["axis"],
            str(row["n"]),
            f"{100 * row['moved']:.1f}",
            _number(row["by"]),
            f"{row['shift']:+.2f}",
        )
        for row in sensitivities
    ]
    note = Text(
        "The same answers judged with the axes in the opposite order, or without the reference answer.",
        "同样的作答，评分项倒序或不给参考答案再评一次。",
    )
    head = (
        Text("judge, variant", "评委，方式"), AXIS, "n", Text("% moved", "变动 %"), Text("by (mean)", "平均幅度"),
        Text("shift", "平移"),
    )  # fmt: skip
    return Table(head, tuple(lines), Text("How far scores move", "得分的稳定性"), note)


def _temperatures(temperatures: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        (f"{row['first']:g} / {row['second']:g}", row["judge"], str(row["n"]), _number(row["spearman"]))
        for row in temperatures
    ]
    published = published_tables.table("cmb", "table7")
    for first, second in combinations(published.columns, 2):
        (values,) = (line.values for line in published.lines if line.name == first)
        pair = " / ".join(name.replace("Original", "0").removeprefix("T-") for name in (first, second))
        lines.append((pair, "ChatGPT, CMB Table 7", "", _number(values[second])))
    note = f"Spearman correlation of the models' order by average score; 0: greedy. Published: {published.note}."
    return Table(("temperatures", "judge", "models", "spearman"), tuple(lines), "Order of the models", note)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(mean: float | None, deviation: float | None) -> str:
    return _number(mean) + ("" if deviation is None else f"±{deviation:.2f}")
