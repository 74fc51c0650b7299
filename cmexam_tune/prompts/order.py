"""The order in which options are shown: does a model answer the question, or prefer a letter?"""

import dataclasses
import random

from cmexam_tune.core.schema import Question, letters


def shown(question: Question, order: str | None) -> Question:
    """Return the question as the model sees it: same letters, texts in another order, the answer's letters moved too.

    Args:
        question: as the exam prints it.
        order: `rotate:k`, `shuffle:seed`, or None, which changes nothing.
    """
    if order is None:
        return question
    places = moved(question, order)
    texts = {new: question.options[old] for old, new in places.items()}
    answer = None if question.answer is None else letters("".join(places[letter] for letter in question.answer))
    return dataclasses.replace(question, options={letter: texts[letter] for letter in question.options}, answer=answer)


def restored(answer: str | None, question: Question, order: str | None) -> str | None:
    """Return the exam's letters of an answer that was given to `shown(question, order)`."""
    if answer is None or order is None:
        return answer
    back = {new: old for old, new in moved(question, order).items()}
    return letters("".join(back.get(letter, letter) for letter in answer))


def moved(question: Question, order: str) -> dict[str, str]:
    """Return the exam's letter -> the letter under which its text is shown."""
    how, _, number = order.partition(":")
    places = list(question.options)
    if how == "rotate":
        by = int(number) % len(places)
        return dict(zip(places, [*places[by:], *places[:by]], strict=True))
    mixed = list(places)
    random.Random(f"{number}/{question.id}").shuffle(mixed)
    return dict(zip(places, mixed, strict=True))
