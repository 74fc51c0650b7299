"""The five annotations of CMExam, proposed by models in the words of the paper's appendix A.2 (arXiv 2306.03030)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import breakdowns
from cmexam_tune.evaluation.significance import kappa
from cmexam_tune.inference import loading
from cmexam_tune.inference.answering import prompt_cost, run_missing
from cmexam_tune.inference.provenance import provenance
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.models.completion import TextEngine, to_prediction
from cmexam_tune.prompts import PromptRequest
from cmexam_tune.prompts.dialogue import NO_OPTIONS

FACETS = ("Disease Group", "Clinical Department", "Medical Discipline", "Medical Competency", "Difficulty level")
NONE = "不符合"
"""What is answered where no category fits; CMExam's files hold it as a value."""
SEPARATOR = "#"
"""Between the id of a question and the facet, in the key of a proposal."""
_EDGES = " \t\r\n。.，,：:\"'“”‘’「」【】[]《》`*"


def categories(facet: str) -> list[str]:
    """Return the categories of a facet as the released files spell them, without `NONE`."""
    return [value.zh for value in breakdowns.define(facet).values if value.zh != NONE]


def key(question: Question, facet: str) -> str:
    """Return the key of a proposal."""
    return f"{question.id}{SEPARATOR}{facet}"


def request(question: Question, facet: str) -> PromptRequest:
    """Return the published instruction for one question and one facet."""
    names = categories(facet)
    words = (
        f"返回格式限制为某个具体类目的名称即可。共有{len(names)}个类别：{'、'.join(names)}。"
        "假设你是一位医疗行业专家，请判断下面这个题目属于哪个类别，"
        f'若都不符合，则只返回"{NONE}"这个标签.'
        f'题目信息为"{question.stem}：{question.option_lines}"。'
        f"注意，不需要回答问题本身，只需要返回这个题目与上述{len(names)}个类目中的哪个类目最相关，"
        f"返回{len(names)}个类目中的一个，不需要其他文字。"
    )
    return PromptRequest(Question(key(question, facet), words, NO_OPTIONS, None), lambda shown: shown.stem)


def outputs(source: loading.Source, questions: Sequence[Question], path: Path, out: Path) -> dict[str, str]:
    """Return key -> text of a model's proposals; those that are in `out` are not asked again.

    Args:
        source: the model.
        questions: what is annotated.
        path: the file they came from.
        out: what the model wrote, one line for each question and facet.

    Raises:
        ConfigError: a model that chooses among options.
        UserError: `out` holds something else.
    """
    requests = {key(question, facet): request(question, facet) for question in questions for facet in FACETS}

    def written(writer: TextEngine, missing: Sequence[PromptRequest]) -> Iterator[Prediction]:
        return (to_prediction(completion, parse=False) for completion in writer.generate(missing))

    remedy = "Move it away, or choose another --out."
    with ResumableFile(out, provenance(source.config, path, source.run), remedy=remedy) as file:
        run_missing(
            file,
            list(requests),
            [request for name, request in requests.items() if name not in file.done_ids],
            written,
            open_engine=lambda: loading.open_writer(source.beside(out), "annotate"),
            batch_size=source.config.generation.prompts_at_once,
            cost=prompt_cost,
            name="annotate",
        )
        return file.texts()


def parse(text: str, facet: str) -> str | None:
    """Return the category that an output is, or None: nothing but one of the categories, or `NONE`, is accepted."""
    name = text.rpartition("</think>")[2].strip(_EDGES)
    return name if name in (*categories(facet), NONE) else None


@dataclass(frozen=True)
class Proposal:
    """What the models proposed for one facet of one question."""

    question_id: str
    facet: str
    by_model: Mapping[str, str | None]
    """Model -> category; None: an output that names no category."""
    before: str | None
    """What the file says already."""

    @property
    def vote(self) -> str | None:
        """The category that most models propose, of equals the one seen first; None where nobody names one."""
        counts = Counter(name for name in self.by_model.values() if name is not None)
        return counts.most_common(1)[0][0] if counts else None


def proposals(questions: Iterable[Question], outputs: Mapping[str, Mapping[str, str]]) -> list[Proposal]:
    """Return what models wrote as proposals.

    Args:
        questions: those that were asked about.
        outputs: model -> key -> text.
    """
    return [
        Proposal(
            question.id,
            facet,
            {model: parse(texts.get(key(question, facet), ""), facet) for model, texts in outputs.items()},
            question.facets.get(facet),
        )
        for question in questions
        for facet in FACETS
    ]


def filled(questions: Sequence[Question], proposed: Sequence[Proposal]) -> list[Question]:
    """Return the questions with the votes where they have no annotation yet; what a file says is never replaced."""
    votes = {(proposal.question_id, proposal.facet): proposal.vote for proposal in proposed}
    return [
        replace(
            question,
            facets={
                **{facet: _stored(facet, vote) for facet in FACETS if (vote := votes.get((question.id, facet)))},
                **question.facets,
            },
        )
        for question in questions
    ]


def _stored(facet: str, vote: str) -> str:
    """Return a category as CMExam's files hold it: difficulty is a number from 1, the easiest."""
    return str(categories(facet).index(vote) + 1) if facet == FACETS[-1] and vote != NONE else vote


def report(proposed: Sequence[Proposal]) -> dict[str, Any]:
    """Return for each facet how many were proposed and refused, and the agreement with what the file said before.

    `accuracy` is the share of annotated questions with the same category, a refused output counting as wrong; `kappa`
    is Cohen's, over the same questions.
    """
    models = list(dict.fromkeys(model for proposal in proposed for model in proposal.by_model))
    by_facet: dict[str, object] = {}
    for facet in FACETS:
        of_facet = [proposal for proposal in proposed if proposal.facet == facet]
        names = {model: [proposal.by_model[model] for proposal in of_facet] for model in models}
        by_facet[facet] = {
            "questions": len(of_facet),
            "proposed": sum(proposal.vote is not None for proposal in of_facet),
            "none_fits": sum(proposal.vote == NONE for proposal in of_facet),
            "refused": {model: sum(name is None for name in chosen) for model, chosen in names.items()},
            "agreement": {
                **{
                    model: _agreement(facet, [(proposal.before, proposal.by_model[model]) for proposal in of_facet])
                    for model in models
                },
                "vote": _agreement(facet, [(proposal.before, proposal.vote) for proposal in of_facet]),
            },
        }
    return by_facet


def _agreement(facet: str, pairs: Sequence[tuple[str | None, str | None]]) -> dict[str, float | int | None] | None:
    define = breakdowns.define(facet)
    judged = [(define.recognise(before).zh, after or "") for before, after in pairs if before is not None]
    if not judged:
        return None
    first, second = zip(*judged, strict=True)
    return {
        "n": len(judged),
        "accuracy": sum(before == after for before, after in judged) / len(judged),
        "kappa": kappa(first, second),
    }
