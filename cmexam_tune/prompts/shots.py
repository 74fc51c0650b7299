"""Few-shot examples: answered questions that stand before the one that is asked, drawn as CMB draws them."""

import random
from collections.abc import Iterable, Sequence

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.normalise import question_text
from cmexam_tune.core.schema import Example, Question
from cmexam_tune.prompts.styles import Style, Unrenderable, render

Class = tuple[str, str]


def class_of(question: Question) -> Class:
    """Return exam_type and exam_class; questions without them (CMExam's) are all of one class."""
    return question.facets.get("exam_type", ""), question.facets.get("exam_class", "")


class Shots:
    """A pool of examples; questions of a class share theirs, so that their keys and values are computed once.

    CMB draws anew for every question and sets no seed, so that its published numbers cannot be repeated to the letter;
    here the draw depends on the seed and the class only.
    """

    def __init__(
        self, pool: Iterable[Question], asked: Iterable[Question], style: str | Style, n: int, seed: int = 0
    ) -> None:
        """Take the pool without the questions that are asked, now or later: an example would give their answer away.

        Args:
            pool: the validation questions, with answers (and, for a style that writes them, explanations).
            asked: all questions of the file that is answered.
            style: how the examples are rendered.
            n: examples before each question.
            seed: of the draw.
        """
        self.style, self.n, self.seed = style, n, seed
        test = list(asked)
        ids = {question.id for question in test}
        texts = {question_text(question.stem, question.options) for question in test}
        self._pool: dict[Class, list[Example]] = {}
        for question in pool:
            if question.answer is None or question.id in ids:
                continue
            if question_text(question.stem, question.options) in texts:
                continue
            try:
                example = render(question, style)
            except Unrenderable:
                continue
            self._pool.setdefault(class_of(question), []).append(example)
        self._drawn: dict[Class, Sequence[Example]] = {}

    def of(self, question: Question) -> Sequence[Example]:
        """Return the examples for a question, in the order of the draw.

        Raises:
            DataError: fewer than `n` questions of that class are in the pool.
        """
        name = class_of(question)
        if name not in self._drawn:
            candidates = self.candidates(question)
            if len(candidates) < self.n:
                of = f" of {'/'.join(name)}" if any(name) else ""
                raise DataError(
                    f"prompt.shots={self.n}: prompt.shots_from has {len(candidates)} questions{of} that can be examples"
                    f" for {question.id!r} (answered, explained where the style explains, not among those that are "
                    "asked). Use fewer, or another file."
                )
            self._drawn[name] = random.Random(f"{self.seed}/{'/'.join(name)}").sample(candidates, self.n)
        return self._drawn[name]

    def candidates(self, question: Question) -> Sequence[Example]:
        """Return what the examples of a question are drawn from, in the order of the pool."""
        return self._pool.get(class_of(question), [])
