"""What is computed from the graded answers of a report, and how it is shown.

A section is one row of `SECTIONS`: its key in report.json, what computes its numbers, its tables and its bars. Files,
plots and page show whatever is listed there. Tables that need more than graded answers (a baseline, a paper's numbers,
other scorers) are in `result_tables.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation import breakdowns, grading
from cmexam_tune.evaluation.breakdowns import Consistency, LengthBin, PartialCredit
from cmexam_tune.evaluation.comparison import text_intervals
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.scorers import Scorer
from cmexam_tune.report import baselines
from cmexam_tune.report.calibration import Calibration, calibration
from cmexam_tune.report.item_response import ItemResponse, item_response
from cmexam_tune.report.option_orders import OptionOrders, option_orders
from cmexam_tune.report.stages import Stages, stages
from cmexam_tune.report.table import SECOND_MINUS_FIRST, Bar, Table, Text, cell, for_page, short

Numbers = TypeVar("Numbers")
"""What a section computes."""
BASELINES = {
    "uniform_subset": "Random set of letters",
    "uniform_single": "Random single letter",
    "majority": "Most frequent answer",
}


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
class ReportSection(Generic[Numbers]):
    """A part of the report that is computed from graded answers."""

    key: str
    """Of report.json."""
    compute: Callable[[Evaluation], Numbers | None]
    """Returns its numbers; None: there is nothing to say, and the report has no such section."""
    tables: Callable[[Numbers], Sequence[Table]] = lambda numbers: ()
    bars: Callable[[Numbers], Sequence[Bar]] | None = None
    """A chart of it, for the plots, too."""
    title: Text | None = None
    """Heading on the page, which shows tables and bars as they are; None: the page has a script of its own for it."""

    def page(self, numbers: Numbers) -> dict[str, object]:
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


def _intervals(ends: Mapping[str, Sequence[float]]) -> list[Table]:
    lines = tuple((short(key), cell(key, interval)) for key, interval in ends.items())
    return [Table(("", "95% CI"), lines, "95% intervals of the text metrics (bootstrap)")] if ends else []


def _guessing(guesses: Mapping[str, Mapping[str, object]]) -> list[Table]:
    lines = tuple((BASELINES[name], cell("", guess["expected"]), _simulated(guess)) for name, guess in guesses.items())
    head = ("", "expected accuracy", "simulated")
    return [Table(head, lines, "Guessing on the same questions")] if guesses else []


def _simulated(guess: Mapping[str, object]) -> str:
    if "mean" not in guess:
        return f"always {guess['answer']}"
    return f"{guess['mean']:.2f} ± {guess['std']:.2f} ({guess['seeds']} seeds)"


def _credit(parts: Mapping[str, PartialCredit]) -> list[Table]:
    if "multiple" not in parts:
        return []
    lines = tuple(
        (name, str(part.n), *(f"{value:.2f}" for value in (part.accuracy, part.jaccard, part.precision, part.recall)))
        for name, part in parts.items()
    )
    head = ("right letters", "n", "exact", "Jaccard", "precision of letters", "recall of letters")
    return [Table(head, lines, "Questions with one and with several right letters")]


def _lengths(bins: Sequence[LengthBin]) -> list[Table]:
    lines = tuple(
        (_span(part), str(part["n"]), cell("", part["accuracy"]), cell("", part["accuracy_ci"])) for part in bins
    )
    return [Table(("", "n", "Acc", "95% CI"), lines, "Accuracy by length of the question (characters)")]


def _length_bars(bins: Sequence[LengthBin]) -> list[Bar]:
    return [
        Bar(f"{_span(part)} (n={part['n']})", accuracy, interval)
        for part in bins
        if (accuracy := part["accuracy"]) is not None and (interval := part["accuracy_ci"]) is not None
    ]


def _span(part: LengthBin) -> str:
    return f"{part['from']}-{part['to'] or ''}"


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
        note = Text(
            f"Rank correlation of both over the questions: {spearman}", f"两种难度在各题上的等级相关系数：{spearman}"
        )
        head = (Text("the exam's difficulty", "考试标注的难度"), "n", Text("mean difficulty", "平均难度"))
        shown.append(Table(head, lines, Text("Difficulty beside the exam's own", "与考试标注难度对照"), note))
    if response.subset:
        errors = (
            (Text("one of each group of equal difficulty", "按难度分层各取一题"), f"{response.subset.error:.1f}"),
            (Text("drawn at random", "随机抽取"), f"{response.subset.random_error:.1f}"),
        )
        size = len(response.subset.ids)
        title = Text(f"{size} questions for the whole", f"用 {size} 题代表全部")
        note = Text(
            "Points by which their accuracy misses the whole's, for runs that had no part in choosing them",
            "其正确率与全部题目正确率的偏差（百分点），所评模型未参与选题",
        )
        shown.append(Table(("", Text("error", "误差")), errors, title, note))
    return shown


@dataclass(frozen=True)
class ContextUse:
    """A run with or without passages in front of its questions."""

    name: str
    passages: float
    """Mean number for each question; 0 without."""
    scores: Scores


def context_use(evaluation: Evaluation) -> tuple[ContextUse, ...] | None:
    """Return the runs with and without passages; None where no run had any."""
    counts = {name: [len(item.prediction.context) for item in items] for name, items in evaluation.runs.items()}
    if not any(map(any, counts.values())):
        return None
    return tuple(
        ContextUse(name, sum(numbers) / len(numbers), evaluation.score(evaluation.runs[name]))
        for name, numbers in counts.items()
    )


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


# What `stages.PARTS` and `stages.Task` are called on the page.
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


# Each row checks by itself that its tables take what it computes; a tuple of different rows can only say Any.
SECTIONS: tuple[ReportSection[Any], ...] = (
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
