"""Explanations of exam questions as cases of one turn, so that they are judged like any answer."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cmexam_tune.core.schema import Case, Prediction, Question, Turn
from cmexam_tune.evaluation.answer_parsing import split_explanation

RUBRIC = Path(__file__).with_name("explanations.yaml")
ASK = "请给出答案，并解释理由。"


def cases(questions: Iterable[Question]) -> list[Case]:
    """Return a case for each question with a published answer and explanation, which are the reference."""
    return [
        Case(
            question.id,
            question.id,
            f"{question.stem}\n{question.option_lines}",
            (Turn(ASK, _said(question.answer, question.explanation)),),
        )
        for question in questions
        if question.answer and question.explanation
    ]


def answers(predictions: Iterable[Prediction], asked: Sequence[Case]) -> list[Prediction]:
    """Return what the predictions say to these cases, those that explain nothing left out."""
    known = {case.id for case in asked}
    explained = []
    for prediction in predictions:
        if prediction.question_id in known:
            explanation = prediction.explanation or split_explanation(prediction.text)
            if explanation:
                text = _said(prediction.answer, explanation)
                explained.append(Prediction(f"{prediction.question_id}:1", text, finish=prediction.finish))
    return explained


def _said(answer: str | None, explanation: str) -> str:
    return f"答案：{answer or '无'}\n解析：{explanation}"
