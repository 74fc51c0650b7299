"""A model as judge: every answer gets its scores, once asked and at most once asked again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cmexam_tune.cmb_clin.judgements import Judgement
from cmexam_tune.cmb_clin.rubric import Rubric, Variant
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.inference import answering, loading, usage
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.models import families
from cmexam_tune.prompts import dialogue


@dataclass(frozen=True)
class Task:
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


def open_judge(source: loading.Source) -> Any:
    """Return a judge's writer.

    Raises:
        ConfigError: a model that chooses among options.
    """
    config = source.config
    return families.writer(config.model.family, "judge").decoder(loading.load(source), config)


def judge_missing(file: ResumableFile, judge: Any, task: Task) -> None:
    """Judge the answers that the open file lacks, and put it in the order of the cases."""
    judgements = usage.counted(file, judge, _judgements(judge, task, file.known))
    answering.write(file, judgements, task.keys, "judge")


def _judgements(judge: Any, task: Task, known: frozenset[str]) -> Iterator[Judgement]:
    """Yield what can be read as it comes; what cannot is asked once more at the end."""
    asked, again = [], []
    for case in task.cases:
        for number, _ in enumerate(case.turns, 1):
            key = dialogue.key(case, number)
            if key in known or key not in task.answers:
                continue
            answer = task.answers[key]
            text = answer.text.rpartition("</think>")[2].strip()
            if answer.finish != "error" and answer.text.strip():
                asked.append(task.rubric.asked(case, number, text, task.variant))
    for written in judge.write(asked) if asked else ():
        scores = task.rubric.parse(written.text)
        if scores is None and written.finish != "error":
            again.append(task.rubric.asked_again(written.asked, written.text, task.variant))
            continue
        yield _judgement(written, scores, 1)
    for written in judge.write(again) if again else ():
        yield _judgement(written, task.rubric.parse(written.text), 2)


def _judgement(written: Any, scores: Mapping[str, int] | None, times: int) -> Judgement:
    reason = getattr(written, "reason", None)
    return Judgement(written.asked.question.id, written.text, scores, times, written.finish, reason)
