"""A model as judge: asked once for the scores of an answer, and once more where its reply cannot be read."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cmexam_tune.cmb_clin.judgements import Judgement
from cmexam_tune.cmb_clin.rubric import Rubric, Variant
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.inference.answering import prompt_cost, run_missing
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.models.completion import Completion, TextEngine
from cmexam_tune.prompts import PromptRequest, dialogue


@dataclass(frozen=True)
class JudgingTask:
    """What is judged: the answers of one model, and in which variant of the rubric."""

    cases: Sequence[Case]
    answers: Mapping[str, Prediction]
    rubric: Rubric
    variant: Variant = "plain"

    @property
    def keys(self) -> list[str]:
        """The turns that have an answer, in order."""
        return [
            key
            for key in dialogue.keys(self.cases)
            if key in self.answers and self.answers[key].finish != "error" and self.answers[key].text.strip()
        ]


def judge_missing(
    file: ResumableFile, task: JudgingTask, open_judge: Callable[[], TextEngine], batch_size: int
) -> None:
    """Judge the answers that the open file lacks, and sort it by the cases."""
    run_missing(
        file,
        task.keys,
        _requests(task, file.done_ids),
        functools.partial(_judgements, task),
        open_engine=open_judge,
        batch_size=batch_size,
        cost=prompt_cost,
        name="judge",
    )


def _requests(task: JudgingTask, done_ids: frozenset[str]) -> list[PromptRequest]:
    missing = set(task.keys) - done_ids
    requests = []
    for case in task.cases:
        for number, _ in enumerate(case.turns, 1):
            if (key := dialogue.key(case, number)) in missing:
                text = task.answers[key].text.rpartition("</think>")[2].strip()
                requests.append(task.rubric.request(case, number, text, task.variant))
    return requests


def _judgements(task: JudgingTask, judge: TextEngine, requests: Sequence[PromptRequest]) -> Iterator[Judgement]:
    """Yield readable judgements as they arrive; the judge is asked again for the others, once and at the end."""
    again = []
    for completion in judge.generate(requests):
        scores = task.rubric.parse(completion.text)
        if scores is None and completion.finish != "error":
            again.append(task.rubric.request_again(completion.request, completion.text, task.variant))
        else:
            yield _judgement(completion, scores, 1)
    for completion in judge.generate(again):
        yield _judgement(completion, task.rubric.parse(completion.text), 2)


def _judgement(completion: Completion, scores: Mapping[str, int] | None, times: int) -> Judgement:
    key = completion.request.question.id
    return Judgement(key, completion.text, scores, times, completion.finish, completion.reason)
