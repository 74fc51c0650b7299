"""The order in which options are shown.

At prediction: does a model answer the question, or prefer a letter? In training: the answer is to be learnt, not its
letter. What is trained on is only shuffled where the question survives it: no option or stem speaks of other options,
and every letter in the explanation that could be an option's clearly is. Every other question stays as it is.
"""

import dataclasses
import math
import random
import re
from collections.abc import Mapping, Sequence

from cmexam_tune.core.schema import Question, letters
from cmexam_tune.prompts.question_checks import contradicted, not_shufflable

_WORD = re.compile(r"[A-Za-z0-9Ａ-Ｚａ-ｚ]+")
_RUN = r"(?<![A-Za-z0-9])[A-J]+(?:\s*[、，,和及与]\s*[A-J]+)*(?![A-Za-z0-9])"
_RIGHT = r"(?:均|都|皆|也)?(?:不?正确|错误|不[对是选]|[对错])"
_END = r"(?=\s*(?:$|[^\u4e00-\u9fffA-Za-z0-9]|[A-J]+\s*[对错]))"
_REFERENCE = re.compile(
    rf"(?:选项|[故应]选|本题[应为]?选|(?:所以|因此)选|选择?答案|答案(?:应?[为是选])?)\s*[:：]?\s*{_RUN}"
    rf"(?:选?项|{_RIGHT})?{_END}"
    rf"|(?<![素型A-Za-z0-9]){_RUN}\s*[两三四]?(?:个?选项|项)"
    rf"|(?<![\u4e00-\u9fff]){_RUN}\s*{_RIGHT}{_END}|(?<=[对错])[A-J]+\s*{_RIGHT}{_END}"
    rf"|(?<![\u4e00-\u9fff]){_RUN}\s*[为是](?:本题的?)?(?:正确|错误)?答案"
)
"""Words that make letters an option's: `故选C`, `（A错B对）`, `B、D项`, `E为本题正确答案`."""
# Medical terms with a letter that is no option's.
_TERM = re.compile(r"维生素\s*[A-E](?![A-Za-z0-9])|(?<![A-Za-z0-9])(?:B超|C反应蛋白)")
_BY_PLACE = re.compile(r"第[一二三四五]个?(?:选项|答案|项)|[前后][两三四二][项个者]|最后一?个?(?:选项|项)")


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
    # `Random` hashes a text seed with SHA-512, the same in every process; Python's own `hash` is salted.
    mixed = list(places)
    random.Random(f"{number}/{question.id}").shuffle(mixed)
    return dict(zip(places, mixed, strict=True))


def several(question: Question, count: int, seed: int, first: str | None = None) -> list[str | None]:
    """Return at most `count` different orders of a question's options, `first` before all others.

    The others are rotations, in an order drawn from seed and id: over all of them every text stands once under every
    letter, so that a preference for a letter cancels. Where they are used up, shuffles follow. A question whose order
    carries meaning has its first order only.
    """
    if not_shufflable(question):
        return [first]
    dice = random.Random(f"orders {seed}/{question.id}")
    turns = [f"rotate:{by}" for by in range(len(question.options))]
    dice.shuffle(turns)
    orders, known = [first], {tuple(moved(question, first or "rotate:0").values())}
    while len(orders) < min(count, math.factorial(len(question.options))):
        following = turns.pop() if turns else f"shuffle:{dice.randrange(10**9)}"
        places = tuple(moved(question, following).values())
        if places not in known:
            known.add(places)
            orders.append(following)
    return orders


def restored_scores(
    scores: Mapping[str, float] | None, question: Question, order: str | None
) -> dict[str, float] | None:
    """Return `scores` of answers to `shown(question, order)` by the exam's letters."""
    if scores is None:
        return None
    return {restored(answer, question, order) or "": value for answer, value in scores.items()}


def shuffled(question: Question, seed: int) -> Question:
    """Return the question with its options in an order drawn from seed and id, or unchanged where that is not safe.

    The letters of answer and explanation are moved along, so that they name the same texts.
    """
    explanation = question.explanation or ""
    spans = _letters_of_options(explanation, question)
    if spans is None or _BY_PLACE.search(explanation) or not_shufflable(question) or contradicted(question):
        return question
    order = f"shuffle:{seed}"
    new = moved(question, order)
    # From the end, so that the places of those before stay right.
    for start, end in reversed(spans):
        run = letters("".join(new[letter] for letter in explanation[start:end]))
        explanation = explanation[:start] + run + explanation[end:]
    return dataclasses.replace(
        shown(question, order), explanation=None if question.explanation is None else explanation
    )


def _letters_of_options(text: str, question: Question) -> list[tuple[int, int]] | None:
    """Return where letters of options stand in an explanation; None where one letter may be something else."""
    named = [match.span() for match in _REFERENCE.finditer(text)]
    terms = [match.span() for match in _TERM.finditer(text)]
    spans = []
    for match in _WORD.finditer(text):
        span = match.span()
        if not _like_options(match[0], question) or _within(span, terms):
            continue
        exact = set(match[0]) <= set(question.options) and len(set(match[0])) == len(match[0])
        # A letter that might be an option's and is not surely one: moving it or leaving it could both be wrong.
        if not exact or not _within(span, named):
            return None
        spans.append(span)
    return spans


def _within(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in others)


def _like_options(word: str, question: Question) -> bool:
    """Return whether a word is letters of options and nothing else: capitals, full width, or one small letter."""
    wide = {chr(ord(letter) + 0xFEE0) for letter in question.options}
    small = {letter.lower() for letter in question.options}
    return set(word) <= {*question.options, *wide} or word in small
