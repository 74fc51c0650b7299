"""Questions as token rows whose options and answers are never cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from cmexam_tune import prompts
from cmexam_tune.core.schema import Example, Question
from cmexam_tune.prompts import Style

IGNORE_INDEX = -100
"""Label of a token that carries no loss (torch's and transformers' value)."""

Ids = list[int]
Tokenize = Callable[[list[str]], list[Ids]]


@dataclass(frozen=True)
class Truncation:
    """What the length limits did to a set of questions."""

    rows: int = 0
    stems_cut: int = 0
    """Prompts that lost the middle of their stem."""
    explanations_cut: int = 0
    """Completions that lost the end of their explanation, and with it their EOS."""
    too_long: tuple[str, ...] = ()
    """Ids of questions whose options or answer alone exceed the limits: skipped."""
    unrenderable: tuple[str, ...] = ()
    """Ids of questions that the style cannot render (no explanation, no answer): skipped."""
    longest_source: int = 0
    longest_target: int = 0


@dataclass(frozen=True)
class Encoded:
    """Training rows: mappings with `question_id`, `input_ids`, `labels` and what else the family's collate reads."""

    rows: list[Mapping[str, Any]]
    truncation: Truncation = field(default_factory=Truncation)


T = TypeVar("T")


@dataclass(frozen=True)
class Sources(Generic[T]):
    """Tokenised prompts, one for each question, in order."""

    ids: list[T]
    cut: frozenset[int]
    """Indices of prompts that lost the middle of their stem."""
    too_long: frozenset[int]
    """Indices of prompts over the limit even without their stem; `ids` holds that shortest form."""


def fit_stems(
    questions: Sequence[Question],
    tokenize: Callable[[list[Question]], list[T]],
    limit: int,
    length: Callable[[T], int],
) -> Sources[T]:
    """Tokenise questions so that each has at most `limit` tokens, taking out the middle of its stem where it must.

    All questions are tokenised in one call; only the long ones are tried again, all of them together in each round
    of a binary search for the most characters of the stem that fit.
    """
    ids = tokenize(list(questions)) if questions else []
    # Question index -> [characters known to fit, characters known not to].
    bounds = {i: [-1, len(questions[i].stem)] for i, row in enumerate(ids) if length(row) > limit}
    # The empty stem first: if even that is too long, the search ends there and `ids` holds the shortest prompt.
    tries = dict.fromkeys(bounds, 0)
    while tries:
        rows = tokenize([prompts.shorten_stem(questions[i], keep) for i, keep in tries.items()])
        for (i, keep), row in zip(tries.items(), rows, strict=True):
            fits = length(row) <= limit
            bounds[i][0 if fits else 1] = keep
            if fits or keep == 0:
                ids[i] = row
        tries = {i: sum(bounds[i]) // 2 for i in tries if 0 <= bounds[i][0] < bounds[i][1] - 1}
    return Sources(ids, frozenset(bounds), frozenset(i for i, (fits, _) in bounds.items() if fits < 0))


def encode(
    questions: Sequence[Question],
    style: str | Style,
    source_ids: Tokenize,
    target_ids: Tokenize,
    *,
    max_source_length: int,
    max_target_length: int,
) -> Encoded:
    """Return training rows with labels on the completion only.

    Args:
        questions: what to encode; those that the style cannot render are skipped and listed.
        style: how they are asked and answered.
        source_ids: prompts to ids, all special tokens of the prompt included.
        target_ids: completions to ids, EOS included.
        max_source_length: most tokens of the prompt; the middle of a longer stem is left out, never an option.
        max_target_length: most tokens of the completion with its EOS; the end of a longer explanation is left out.
    """
    renderable, examples, unrenderable = _rendered(questions, style)
    sources = fit_stems(
        renderable,
        lambda some: source_ids([prompts.prompt(question, style) for question in some]),
        max_source_length,
        len,
    )
    targets, cut = fit_completions(renderable, examples, style, target_ids, max_target_length)
    rows: list[Mapping[str, Any]] = []
    too_long: list[str] = []
    indices: list[int] = []
    for i, question in enumerate(renderable):
        target = targets[i]
        if target is None or i in sources.too_long:
            too_long.append(question.id)
            continue
        indices.append(i)
        labels = [IGNORE_INDEX] * len(sources.ids[i]) + target
        rows.append({"question_id": question.id, "input_ids": sources.ids[i] + target, "labels": labels})
    return Encoded(
        rows,
        Truncation(
            rows=len(rows),
            stems_cut=sum(i in sources.cut for i in indices),
            explanations_cut=sum(i in cut for i in indices),
            too_long=tuple(too_long),
            unrenderable=tuple(unrenderable),
            longest_source=max((len(sources.ids[i]) for i in indices), default=0),
            longest_target=max((len(targets[i] or ()) for i in indices), default=0),
        ),
    )


def _rendered(questions: Sequence[Question], style: str | Style) -> tuple[list[Question], list[Example], list[str]]:
    """Return the questions that the style can render with an answer, their examples, and the ids of the others."""
    renderable: list[Question] = []
    examples: list[Example] = []
    unrenderable: list[str] = []
    for question in questions:
        try:
            example = prompts.render(question, style)
        except prompts.Unrenderable:
            unrenderable.append(question.id)
            continue
        if not example.completion:
            unrenderable.append(question.id)
            continue
        renderable.append(question)
        examples.append(example)
    return renderable, examples, unrenderable


def fit_completions(
    questions: Sequence[Question],
    examples: Sequence[Example],
    style: str | Style,
    target_ids: Tokenize,
    limit: int,
) -> tuple[list[Ids | None], set[int]]:
    """Tokenise completions into at most `limit` tokens; None where the answer alone does not fit.

    Returns:
        The ids, and the indices of completions that lost the end of their explanation.
    """
    ids: list[Ids | None] = list(target_ids([example.completion for example in examples])) if examples else []
    cut = {i for i, row in enumerate(ids) if row is not None and len(row) > limit}
    for i in cut:
        ids[i] = _cut_explanation(questions[i], examples[i], style, target_ids, limit)
    return ids, cut


def _cut_explanation(
    question: Question, example: Example, style: str | Style, target_ids: Tokenize, limit: int
) -> Ids | None:
    text, explanation = example.completion, (question.explanation or "").strip()
    start = text.rfind(explanation) if explanation else -1
    if start < 0:
        return None
    if start + len(explanation) == len(text.rstrip()):
        whole, head = target_ids([text, text[:start].rstrip()])
        # The head was tokenised with an EOS of its own, which stands for the first token of the explanation.
        return whole[:limit] if len(head) <= limit else None
    # The answer follows the explanation (chain of thought): the explanation gets shorter, the answer and EOS stay.
    fits, over, best = -1, len(explanation), None
    # One character first: without any explanation the style could not be rendered.
    keep = 1
    while over - fits > 1:
        shorter = prompts.render(replace(question, explanation=explanation[:keep]), style).completion
        (row,) = target_ids([shorter])
        if len(row) <= limit:
            fits, best = keep, row
        else:
            over = keep
            if keep == 1:
                break
        keep = (max(fits, 0) + over) // 2
    return best
