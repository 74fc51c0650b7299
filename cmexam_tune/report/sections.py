"""What a report holds, as tables: one function for each.

What is computed from the graded answers alone is one row of `SECTIONS`: its key in report.json, its numbers, its tables
and its bars. Files, plots and page follow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation import breakdowns, grading
from cmexam_tune.evaluation.breakdowns import Breakdown, Cell, Consistency, FacetValue, PartialCredit, Share, Subset
from cmexam_tune.evaluation.comparison import Comparison, RunPair, ScoreDecomposition, text_intervals
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.scorers import Scorer
from cmexam_tune.report import baselines
from cmexam_tune.report.calibration import Calibration, calibration
from cmexam_tune.report.full_report import FullReport, Published
from cmexam_tune.report.item_response import ItemResponse, item_response
from cmexam_tune.report.option_orders import OptionOrders, option_orders
from cmexam_tune.report.stages import Stages, stages
from cmexam_tune.report.table import COLUMNS, Bar, Table, Text, cell, escape_markdown, for_page, short

BASELINES = {
    "uniform_subset": "Random set of letters",
    "uniform_single": "Random single letter",
    "majority": "Most frequent answer",
}
SECOND_MINUS_FIRST = "second minus first"
"""The head of every column of differences, so that no reader need guess their sign."""
LATEX_HEAD = "% \\usepackage{booktabs}; Chinese names need ctex or xeCJK.\n"


@dataclass(frozen=True)
class Evaluation:
    """What sections are computed from."""

    graded: Sequence[Graded]
    """All questions of the run that the report is about."""
    scorer: Scorer
    runs: Mapping[str, Sequence[Graded]]
    """Every run of the report, the first is that one; all of the same questions in the same order."""
    subset: int | None = None
    """So many questions that stand for the whole are to be chosen."""
    explained: Mapping[str, bool | None] = field(default_factory=dict)
    """Run -> whether it was asked for explanations, where that is known."""

    def score(self, part: Sequence[Graded]) -> Scores:
        """Return the scores of a part of the questions."""
        return grading.score(part, self.scorer)


@dataclass(frozen=True)
class ReportSection:
    """A part of the report that is computed from graded answers."""

    key: str
    """Of report.json."""
    compute: Callable[[Evaluation], Any]
    """Returns its numbers; None: there is nothing to say, and the report has no such section."""
    tables: Callable[[Any], Sequence[Table]] = lambda numbers: ()
    bars: Callable[[Any], Sequence[Bar]] | None = None
    """A chart of it, for the plots, too."""
    title: Text | None = None
    """Heading on the page, which shows tables and bars as they are; None: the page has a script of its own for it."""

    def page(self, numbers: object) -> dict[str, object]:
        """Return what the page's script draws of a section without a script of its own."""
        return {
            "key": self.key,
            "title": for_page(self.title or Text("", "")),
            "bars": [bar.page() for bar in self.bars(numbers)] if self.bars else [],
            "tables": [table.page() for table in self.tables(numbers)],
        }


def compute(evaluation: Evaluation) -> dict[str, object]:
    """Return key -> numbers of every section that has something to say."""
    computed = {section.key: section.compute(evaluation) for section in SECTIONS}
    return {key: numbers for key, numbers in computed.items() if numbers is not None}


def tables(report: FullReport) -> list[Table]:
    """Return every table of a report, in its order."""
    columns = _columns(report)
    return [
        # Without a baseline the first of several runs is all that it would hold.
        *([_scores("Overall", columns, _with_baseline(report))] if report.comparison or not report.runs else []),
        *([cut_off(report)] if any(run.cut for run in report.cut.values()) else []),
        *([_scores("Runs", columns, report.runs)] if report.runs else []),
        *([by_scorer(report)] if report.profiles else []),
        *([decompositions(tuple(report.bridges.values()))] if report.bridges else []),
        *([summary(report)] if report.summary else []),
        *([agreement(report)] if report.agreement else []),
        *([pairs(report.pairs)] if report.pairs else []),
        *([published(report.published, report.overall)] if report.published else []),
        *([comparison(report.comparison, report.name)] if report.comparison else []),
        *([subsets(report.subsets)] if report.subsets else []),
        *(breakdown(table, columns, report.published) for table in report.tables),
        *(
            table
            for section in SECTIONS
            if section.key in report.computed
            for table in section.tables(report.computed[section.key])
        ),
    ]


def headline(report: FullReport) -> Table:
    """Return what the program prints: the run, or several runs or scorers beside each other."""
    return _scores("", (*COLUMNS, *report.metrics), report.runs or report.profiles or _with_baseline(report))


def _with_baseline(report: FullReport) -> dict[str, Scores]:
    own = {report.name: report.overall}
    other = report.comparison
    if other is None or not other.scores:
        return own
    name = f"{other.name} (baseline)" if other.name == report.name else other.name
    return {**own, name: other.scores}


def by_scorer(report: FullReport) -> Table:
    """Return the outputs of the first run as every scorer scores them."""
    title = "The same outputs by every profile" if len(report.runs) < 2 else f"{report.name} by every profile"
    return _scores(title, _columns(report), report.profiles)


def _columns(report: FullReport) -> tuple[str, ...]:
    keys = (*COLUMNS, *report.metrics)
    return tuple(key for key in keys if report.overall.get(key) is not None or key == "accuracy")


def _scores(title: str, columns: Sequence[str], scores: Mapping[str, Scores]) -> Table:
    columns = [key for key in columns if key == "accuracy" or any(row.get(key) is not None for row in scores.values())]
    lines = tuple(_line(name, row, columns) for name, row in scores.items())
    return Table(("", *map(short, columns)), lines, title)


def _line(name: str, scores: Mapping[str, object], columns: Sequence[str]) -> tuple[str, ...]:
    return (name, *(cell(key, scores.get(key)) for key in columns))


def _intervals(ends: Mapping[str, Sequence[float]]) -> list[Table]:
    lines = tuple((short(key), cell(key, interval)) for key, interval in ends.items())
    return [Table(("", "95% CI"), lines, "95% intervals of the text metrics (bootstrap)")] if ends else []


def decompositions(ways: Sequence[ScoreDecomposition]) -> Table:
    """Return how far each scorer is from the standard one, in points of percent: the steps add up."""
    head = ("", "standard", "subset", "reading", "denominator", "average", "theirs", "read differently")
    lines = tuple(
        (
            f"{way.profile} *" if way.mark else way.profile,
            cell("", way.standard),
            *(_points(step) for step in (way.by_subset, way.by_reading, way.by_denominator, way.by_average)),
            cell("", way.theirs),
            str(len(way.differing)),
        )
        for way in ways
    )
    marks = sorted({way.mark.split(", not")[0] for way in ways if way.mark})
    note = "In points of percent; subset: " + "; ".join(
        f"{way.profile} {way.subset}" for way in ways if way.subset != "all questions"
    )
    note += f". * {', '.join(marks)}, which are not the words of that script" if marks else ""
    note += ". -: none of these questions counts there" if any(way.theirs is None for way in ways) else ""
    return Table(head, lines, "From the standard score to every profile's", note)


def _points(step: float | None) -> str:
    return "-" if step is None else f"{step:+.2f}"


def summary(report: FullReport) -> Table:
    """Return mean and deviation over the runs."""
    lines = tuple((short(k), cell(k, s.mean), cell(k, s.std), str(s.runs)) for k, s in report.summary.items())
    return Table(("", "mean", "std", "runs"), lines, "Mean and deviation of the runs")


def agreement(report: FullReport) -> Table:
    """Return how often two runs gave the same readable answer."""
    lines = tuple((pair, f"{share:.1f}") for pair, share in report.agreement.items())
    changed = ("questions whose answer changes", f"{report.flips} of {report.overall['n']}")
    return Table(("", "% of questions"), (*lines, changed), "Same readable answer in both")


def cut_off(report: FullReport) -> Table:
    """Return how many outputs of each run were cut off by their limit."""
    lines = tuple((name, str(run.outputs), str(run.cut), str(run.thinking)) for name, run in report.cut.items())
    return Table(("", "outputs", "cut off", "while thinking"), lines, "Outputs cut off by their limit")


def _guessing(guesses: Mapping[str, Mapping[str, object]]) -> list[Table]:
    lines = tuple((BASELINES[name], cell("", guess["expected"]), _simulated(guess)) for name, guess in guesses.items())
    head = ("", "expected accuracy", "simulated")
    return [Table(head, lines, "Guessing on the same questions")] if guesses else []


def _simulated(guess: Mapping[str, object]) -> str:
    if "mean" not in guess:
        return f"always {guess['answer']}"
    return f"{guess['mean']:.2f} ± {guess['std']:.2f} ({guess['seeds']} seeds)"


def published(numbers: Published, overall: Scores) -> Table:
    """Return the published models, the run above them."""
    keys = [key for key in dict.fromkeys(key for row in numbers.rows for key in row) if _shown(key)]
    own = tuple(cell(key, overall.get(key)) for key in keys)
    lines = [(str(row["name"]), *(str(row.get(key, "-")) for key in keys)) for row in numbers.rows]
    return Table(
        ("", *map(short, keys)), (("this run", *own), *lines), f"Published: {numbers.source}", _warning(numbers)
    )


def _shown(key: str) -> bool:
    return key != "name" and not key.endswith("_std")


def _warning(numbers: Published) -> str:
    return f"Not the same questions: {numbers.caveat}." if numbers.caveat else ""


def comparison(other: Comparison, run: str) -> Table:
    """Return the differences of the run called `run` from its baseline."""
    lines = tuple(
        (short(name), f"{metric.difference:+.2f}", f"{metric.low:+.2f} to {metric.high:+.2f}", metric.p_text)
        for name, metric in other.metrics.items()
    )
    title = (
        f"{other.name} | {run}: {len(other.gained)} questions newly right, {len(other.lost)} newly wrong"
        # Of questions that share cases McNemar's p is too small: there the bootstrap's stands in the line of accuracy.
        + (f", exact McNemar p = {other.mcnemar_p:.4g}" if other.clusters is None else "")
    )
    notes = []
    if other.smallest_difference is not None:
        notes.append(
            f"{other.n} questions detect a difference of {other.smallest_difference:.1f} points with 80% power"
        )
    if other.clusters is not None:
        notes.append(f"{other.clusters} groups of questions were drawn together")
    if other.computed is not None and "accuracy" in other.metrics:
        accuracy = other.metrics["accuracy"]
        shown = "changed" if accuracy.low > 0 or accuracy.high < 0 else "did not change, as far as these questions show"
        notes.append(
            f"Nothing but what computed them is different ({other.computed}): {other.other_answers} of {other.n} "
            f"answers are others, and the accuracy {shown}"
        )
    return Table(("", SECOND_MINUS_FIRST, "95% interval", "p"), lines, title, ". ".join(notes))


def pairs(compared: Sequence[RunPair]) -> Table:
    """Return every pair of runs, with p-values corrected for multiple comparisons."""
    lines = tuple(
        (
            f"{pair.first} | {pair.second}",
            f"{pair.difference:+.2f}",
            f"{pair.p_value:.4g}",
            f"{pair.adjusted_p:.4g}",
            "-" if pair.smallest_difference is None else f"{pair.smallest_difference:.1f}",
        )
        for pair in compared
    )
    head = ("", SECOND_MINUS_FIRST, "p (McNemar)", "p (Holm)", "smallest detectable")
    return Table(head, lines, "Pairwise", "Smallest difference detectable with 80% power")


def _credit(parts: Mapping[str, PartialCredit]) -> list[Table]:
    if "multiple" not in parts:
        return []
    lines = tuple(
        (name, str(part.n), *(f"{value:.2f}" for value in (part.accuracy, part.jaccard, part.precision, part.recall)))
        for name, part in parts.items()
    )
    head = ("right letters", "n", "exact", "Jaccard", "precision of letters", "recall of letters")
    return [Table(head, lines, "Questions with one and with several right letters")]


def subsets(parts: Sequence[Subset]) -> Table:
    """Return accuracy with and without some questions, and what it says in words."""
    lines = [("all", *_accuracy(parts[0].everything))]
    for part in parts:
        lines += [(f"{part.name}: only", *_accuracy(part.only)), (f"{part.name}: without", *_accuracy(part.without))]
    return Table(
        ("", "n", "Acc", "95% CI"), tuple(lines), "With and without", " ".join(part.sentence for part in parts)
    )


def _accuracy(share: Share) -> tuple[str, str, str]:
    return str(share.n), cell("", share.accuracy), cell("", share.accuracy_ci)


def breakdown(table: Breakdown, columns: Sequence[str], numbers: Published | None) -> Table:
    """Return the scores by the values of a facet, published accuracies of the same groups beside them."""
    theirs = numbers.of_facet(table.facet) if numbers else None
    models = tuple(dict.fromkeys(model for cells in theirs.cells.values() for model in cells)) if theirs else ()
    lines = []
    for group in table.cells:
        beside = theirs.cells.get(group.name, {}) if theirs else {}
        name = f"{label(group)}{' *' if group.small else ''}"
        lines.append((*_line(name, group.scores, columns), *(cell("", beside.get(model)) for model in models)))
    if table.macro_accuracy is not None:
        lines.append((*_line("macro average", {"accuracy": table.macro_accuracy}, columns), *("-" for _ in models)))
    notes = [f"* fewer than {table.minimum} questions"] if any(group.small for group in table.cells) else []
    if theirs and numbers:
        notes += [f"Columns with † are published: {theirs.source}", *filter(None, [_warning(numbers).rstrip(".")])]
    title = f"{table.facet} {table.zh}" + (f", {table.source}" if table.source else "")
    head = ("", *map(short, columns), *(f"{model} †" for model in models))
    return Table(head, tuple(lines), title, ". ".join(notes))


def label(group: Cell | FacetValue) -> str:
    """Return the paper's abbreviation, or else the English name, and the Chinese name of a group."""
    first = group.en if group.name == group.zh else group.name
    return first if first == group.zh else f"{first} {group.zh}"


def _lengths(bins: Sequence[Mapping[str, object]]) -> list[Table]:
    lines = tuple(
        (f"{b['from']}-{b['to'] or ''}", str(b["n"]), cell("", b["accuracy"]), cell("", b["accuracy_ci"])) for b in bins
    )
    return [Table(("", "n", "Acc", "95% CI"), lines, "Accuracy by length of the question (characters)")]


def _length_bars(bins: Sequence[Mapping[str, Any]]) -> list[Bar]:
    return [
        Bar(f"{b['from']}-{b['to'] or ''} (n={b['n']})", b["accuracy"], b["accuracy_ci"])
        for b in bins
        if b["accuracy"] is not None
    ]


def _consistency(consistency: Consistency) -> list[Table]:
    agreeing = consistency.concluding - consistency.conflicting
    lines = (
        ("argues for the answer", str(agreeing), _share_of(consistency.agreeing_right, agreeing)),
        (
            "argues for another letter",
            str(consistency.conflicting),
            _share_of(consistency.conflicting_right, consistency.conflicting),
        ),
    )
    reference = (
        "" if consistency.reference_treated is None else f" (the exam's own: {consistency.reference_treated:.1f})"
    )
    note = (
        f"{consistency.explained} outputs hold an explanation, {consistency.concluding} of them conclude with a "
        f"letter. They name {consistency.treated:.1f}% of their question's options{reference}; {consistency.treat_all} "
        "name every option"
    )
    return [Table(("", "outputs", "% of these right"), lines, "Explanations", note)]


def _share_of(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _orders(measured: OptionOrders) -> list[Table]:
    lines = [
        (Text("in the first order", "第一种顺序"), cell("", measured.first), ""),
        (Text("mean over the orders", "各顺序平均"), cell("", measured.mean), cell("", measured.mean_ci)),
        (Text("right in every order", "所有顺序都答对"), cell("", measured.all_right), cell("", measured.all_right_ci)),
        (Text("answer changes", "答案改变"), cell("", measured.changed), cell("", measured.changed_ci)),
    ]
    if measured.debiased is not None:
        lines += [
            (Text("one letter, first order", "单个字母的题，第一种顺序"), cell("", measured.probable_first), ""),
            (Text("the same, debiased (PriDe)", "同上，消除字母偏好（PriDe）"), cell("", measured.debiased), ""),
            (Text("the same, mean probability", "同上，各顺序概率平均"), cell("", measured.averaged), ""),
        ]
    note = Text(
        f"{measured.n} questions in up to {measured.orders} orders of their options; {measured.one_order} others have "
        "one order only, because their options speak of each other",
        f"{measured.n} 道题以至多 {measured.orders} 种选项顺序提问；"
        f"另有 {measured.one_order} 道题的选项互相指涉，只有一种顺序",
    )
    deviation = "-" if measured.recall_deviation is None else f"{measured.recall_deviation:.1f}"
    letters = Text(
        f"Askings with one right letter. Deviation of the recalls: {deviation} points (0: no letter is preferred)",
        f"仅含单选题。各字母召回率的标准差：{deviation} 个百分点（0 表示没有偏好）",
    )
    shares = tuple(
        (item.letter, *(cell("", value) for value in (item.right, item.given, item.recall, item.prior)))
        for item in measured.letters
    )
    percent = Text("% of questions", "占题数 %")
    head = (
        Text("letter", "字母"),
        Text("right %", "为正确答案 %"),
        Text("given %", "被选 %"),
        Text("recall %", "召回率 %"),
        Text("prior %", "先验 %"),
    )
    return [
        Table(("", percent, Text("95% CI", "95% 区间")), tuple(lines), Text("Order of the options", "选项顺序"), note),
        Table(head, shares, Text("Letters as the model saw them", "模型所见的字母"), letters),
    ]


def _calibration(calibration: Calibration) -> list[Table]:
    lines = (
        (Text("accuracy", "正确率"), cell("", calibration.accuracy), ""),
        (Text("mean probability of the answers", "所答选项的平均概率"), cell("", calibration.confidence), ""),
        (
            Text("expected calibration error", "期望校准误差（ECE）"),
            cell("", calibration.ece),
            cell("", calibration.ece_ci),
        ),
        (
            Text(
                f"accuracy of the surest {calibration.coverage:.0f}%",
                f"最有把握的 {calibration.coverage:.0f}% 题的正确率",
            ),
            cell("", calibration.covered_accuracy),
            cell("", calibration.covered_ci),
        ),
    )
    note = Text(
        f"{calibration.n} questions. Probabilities are among the allowed answers only; the surest are those of at "
        f"least {calibration.threshold:.1f}%. By chance alone the error stays below {calibration.ece_by_chance:.2f}. "
        "Bars: accuracy of the answers of such a probability, marks: their mean probability",
        f"共 {calibration.n} 题。概率只在允许的答案之间计算；最有把握的题概率不低于 {calibration.threshold:.1f}%。"
        f"仅由偶然造成的误差低于 {calibration.ece_by_chance:.2f}。"
        "条形为该概率区间内的正确率，标记为平均概率",
    )
    head = ("", "%", Text("95% CI", "95% 区间"))
    return [Table(head, lines, Text("Calibration", "校准"), note)]


def _reliability(calibration: Calibration) -> list[Bar]:
    mean = Text("mean probability", "平均概率")
    return [
        Bar(f"{part.low:.0f}-{part.high:.0f}% (n={part.n})", part.accuracy, part.accuracy_ci, {mean: part.confidence})
        for part in calibration.bins
    ]


def _item_response(response: ItemResponse) -> list[Table]:
    interval = Text("95% CI", "95% 区间")
    abilities = tuple(
        (run.name, f"{run.ability:+.2f}", f"{run.interval[0]:+.2f} to {run.interval[1]:+.2f}")
        for run in sorted(response.abilities, key=lambda run: -run.ability)
    )
    note = Text(
        f"{response.model} model over {response.n} questions, in logits: a run of ability 0 answers a question of mean "
        f"difficulty right half of the time. Difficulties spread by {response.spread:.2f}; each is in report.json",
        f"{response.model} 模型，{response.n} 题，单位为 logit：能力为 0 的模型对平均难度的题答对一半。难度的标准差为 "
        f"{response.spread:.2f}，各题难度见 report.json",
    )
    shown = [Table(("", Text("ability", "能力"), interval), abilities, Text("Abilities", "能力"), note)]
    if response.levels:
        lines = tuple((Text(level.en, level.zh), str(level.n), f"{level.difficulty:+.2f}") for level in response.levels)
        spearman = "-" if response.spearman is None else f"{response.spearman:.2f}"
        said = Text(
            f"Rank correlation of both over the questions: {spearman}", f"两种难度在各题上的等级相关系数：{spearman}"
        )
        head = (Text("the exam's difficulty", "考试标注的难度"), "n", Text("mean difficulty", "平均难度"))
        shown.append(Table(head, lines, Text("Difficulty beside the exam's own", "与考试标注难度对照"), said))
    if response.subset:
        errors = (
            (Text("one of each group of equal difficulty", "按难度分层各取一题"), f"{response.subset.error:.1f}"),
            (Text("drawn at random", "随机抽取"), f"{response.subset.random_error:.1f}"),
        )
        size = len(response.subset.ids)
        title = Text(f"{size} questions for the whole", f"用 {size} 题代表全部")
        said = Text(
            "Points by which their accuracy misses the whole's, for runs that had no part in choosing them",
            "其正确率与全部题目正确率的偏差（百分点），所评模型未参与选题",
        )
        shown.append(Table(("", Text("error", "误差")), errors, title, said))
    return shown


@dataclass(frozen=True)
class ContextUse:
    """A run with or without passages in front of its questions."""

    name: str
    passages: float
    """Mean number for each question; 0 without."""
    scores: Scores


def context_use(of: Evaluation) -> tuple[ContextUse, ...] | None:
    """Return the runs with and without passages; None where no run had any."""
    counts = {name: [len(item.prediction.context) for item in items] for name, items in of.runs.items()}
    if not any(map(any, counts.values())):
        return None
    return tuple(ContextUse(name, sum(own) / len(own), of.score(of.runs[name])) for name, own in counts.items())


def _context(runs: Sequence[ContextUse]) -> list[Table]:
    without = Text("without", "无")
    lines = tuple(
        (
            run.name,
            f"{run.passages:.1f}" if run.passages else without,
            *(cell(key, run.scores[key]) for key in ("n", "accuracy", "accuracy_ci")),
        )
        for run in sorted(runs, key=lambda run: run.passages)
    )
    head = ("", Text("passages", "参考段落"), "n", Text("accuracy", "正确率"), Text("95% CI", "95% 区间"))
    note = Text(
        "Runs differ in the passages alone only where all their other settings are equal",
        "仅当其他设置都相同时，运行之间的差异才只来自参考段落",
    )
    return [Table(head, lines, Text("With and without passages", "有无参考段落"), note)]


PARTS = {
    "all": Text("all questions", "所有题"),
    "single": Text("one right letter", "单个正确字母"),
    "several": Text("several right letters", "多个正确字母"),
}


TASKS = {
    "letters": Text("letters", "字母"),
    "explanation": Text("letters and explanation", "字母和解析"),
    "unknown": Text("unknown", "未知"),
    "both": Text("one letters, the other an explanation too", "一次只要字母，一次还要解析"),
}


def _stages(numbers: Stages) -> list[Table]:
    steps = tuple(
        (
            f"{step.first} | {step.second}",
            TASKS[step.task],
            PARTS[step.part],
            *(f"{count:,}" for count in (step.both, step.only_first, step.only_second, step.neither)),
            f"{step.difference:+.2f}",
            f"{step.p_value:.4g}",
            f"{step.adjusted_p:.4g}",
        )
        for step in numbers.steps
    )
    manners = tuple(
        (
            manner.run,
            TASKS[manner.task],
            *(cell("", value) for value in (manner.unreadable, manner.impossible, manner.at_once)),
            *("-" if value is None else f"{value:.0f}" for value in (manner.length_right, manner.length_wrong)),
        )
        for manner in numbers.manners
    )
    counts = (
        Text("both right", "都对"),
        Text("only the first", "仅前者对"),
        Text("only the second", "仅后者对"),
        Text("neither", "都错"),
    )
    asked = Text("asked for", "要求")
    tests = (Text("p (McNemar)", "p（McNemar）"), Text("p (Holm)", "p（Holm）"))
    writes = (
        Text("unreadable %", "读不出 %"),
        Text("impossible %", "题型不符 %"),
        Text("answer at once %", "开头即答 %"),
        Text("characters, right", "字数（对）"),
        Text("characters, wrong", "字数（错）"),
    )
    note = Text(
        "Impossible: several letters where the exam prints that one is right, or one where it prints several. At once: "
        "the answer stands in the first 20 characters",
        "题型不符：卷面印明单选却答多个字母，或印明多选却只答一个。开头即答：前 20 个字符里已有答案",
    )
    return [
        Table(
            ("", asked, Text("questions", "题目"), *counts, Text(SECOND_MINUS_FIRST, "后者减前者"), *tests),
            steps,
            Text("What each run gained and lost", "每次运行的得与失"),
        ),
        Table(("", asked, *writes), manners, Text("How each run writes", "每次运行的写法"), note),
    ]


SECTIONS: tuple[ReportSection, ...] = (
    ReportSection("intervals", lambda of: text_intervals(of.graded, of.scorer.smoothing), _intervals),
    ReportSection("partial_credit", lambda of: breakdowns.partial_credit(of.graded), _credit),
    ReportSection("baselines", lambda of: baselines.compute([item.question for item in of.graded]), _guessing),
    ReportSection("by_length", lambda of: breakdowns.by_length(of.graded, of.score), _lengths, _length_bars),
    ReportSection("confusion", lambda of: breakdowns.confusion(of.graded)),
    ReportSection(
        "calibration", lambda of: calibration(of.graded), _calibration, _reliability, Text("Calibration", "校准")
    ),
    ReportSection(
        "orders", lambda of: option_orders(of.graded), _orders, title=Text("Order of the options", "选项顺序")
    ),
    ReportSection(
        "item_response",
        lambda of: item_response(of.runs, of.subset),
        _item_response,
        title=Text("Ability and difficulty", "能力与难度"),
    ),
    ReportSection("stages", lambda of: stages(of.runs, of.explained), _stages, title=Text("Gained and lost", "得与失")),
    ReportSection("context", context_use, _context, title=Text("Passages", "参考段落")),
    ReportSection("explanations", lambda of: breakdowns.consistency(of.graded), _consistency),
)
"""In the order in which the files show them."""


def markdown(report: FullReport) -> str:
    """Return report.md: every table, how each number was computed, and where it comes from."""
    head = "Accuracy, F1, BLEU and ROUGE in percent; an unreadable output counts as the profile says.\n"
    if report.selection:
        head = f"**{escape_markdown(report.selection.sentence)}**\n\n{head}"
    signatures = "".join(f"- {escape_markdown(k)}: {escape_markdown(str(v))}\n" for k, v in report.signature.items())
    parts = [
        "# Evaluation report\n",
        head,
        *(table.markdown() for table in tables(report)),
        "## Signatures\n",
        signatures,
    ]
    return "\n".join(parts)


def latex(report: FullReport) -> str:
    """Return report.tex: the tables for a paper."""
    day = f", {report.identity.date}" if report.identity else ""
    about = f"n = {report.overall['n']:,}{day}"
    return LATEX_HEAD + "\n".join(table.latex(about) for table in tables(report))
