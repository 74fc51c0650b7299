"""Fitting to limits, with a tokenizer whose tokens are characters: what is kept can be read off directly."""

import random
from dataclasses import replace

import pytest
from kit import question

from cmexam_tune import prompts
from cmexam_tune.core.schema import Question
from cmexam_tune.models import features
from cmexam_tune.models.features import IGNORE_INDEX, Encoded

EOS = 1
calls: list[int] = []


def source_ids(texts: list[str]) -> list[list[int]]:
    calls.append(len(texts))
    return [[0, *map(ord, text)] for text in texts]


def target_ids(texts: list[str]) -> list[list[int]]:
    return [[*map(ord, text), EOS] for text in texts]


def encode(questions: list[Question], style: str, source: int, target: int) -> Encoded:
    calls.clear()
    return features.encode(questions, style, source_ids, target_ids, max_source_length=source, max_target_length=target)


def texts(row: object) -> tuple[str, str, bool]:
    """Prompt, completion, and whether EOS ends it."""
    ids, labels = row["input_ids"], row["labels"]  # type: ignore[index]
    start = sum(label == IGNORE_INDEX for label in labels)
    assert labels == [IGNORE_INDEX] * start + ids[start:]
    read = "".join(map(chr, ids))
    return read[1:start], read[start:].rstrip(chr(EOS)), ids[-1] == EOS


LONG = question(1, stem="甲" * 50 + "乙" * 50 + "最可能的诊断是", answer="BD", explanation="理由" * 40)


@pytest.mark.parametrize("limit", range(66, 175, 3))
def test_a_long_stem_loses_its_middle_and_nothing_else(limit: int) -> None:
    encoded = encode([LONG], "answer", limit, 30)
    prompt, completion, ended = texts(encoded.rows[0])
    full = prompts.prompt(LONG, "answer")
    assert len(prompt) + 1 <= limit and completion == "答案: BD" and ended
    assert prompt.endswith(full[full.index("选项:") :])
    if len(full) + 1 <= limit:
        assert prompt == full and encoded.truncation.stems_cut == 0
    else:
        # As much of the stem as fits: one more character would be too many.
        assert encoded.truncation.stems_cut == 1 and len(prompt) + 1 == limit and "…" in prompt
    assert encoded.truncation.longest_source == len(prompt) + 1


def test_options_are_never_cut_even_if_the_question_is_skipped() -> None:
    fine = question(2)
    encoded = encode([LONG, fine, LONG], "answer", 50, 30)
    assert [row["question_id"] for row in encoded.rows] == []
    assert encoded.truncation.too_long == ("q:1", "q:2", "q:1")
    shortest = len(prompts.prompt(prompts.shorten_stem(LONG, 0), "answer")) + 1
    assert encode([LONG], "answer", shortest, 30).truncation.rows == 1
    assert encode([LONG], "answer", shortest - 1, 30).truncation.rows == 0


@pytest.mark.parametrize("limit", range(1, 130))
@pytest.mark.parametrize("style", ["answer", "answer_text", "answer_explain", "explain", "open_explain", "cmb_cot"])
def test_the_answer_is_whole_or_the_question_is_skipped(style: str, limit: int) -> None:
    whole = prompts.render(LONG, style).completion
    encoded = encode([LONG], style, 400, limit)
    if not encoded.rows:
        assert encoded.truncation.too_long == (LONG.id,)
        return
    _, completion, ended = texts(encoded.rows[0])
    assert len(completion) + ended <= limit
    if len(whole) + 1 <= limit:
        assert completion == whole and ended and encoded.truncation.explanations_cut == 0
        return
    assert encoded.truncation.explanations_cut == 1
    if style == "cmb_cot":
        # The answer comes last here: the explanation is shorter, the answer and EOS are there.
        assert ended and completion.endswith(whole[whole.rindex("理由") + 2 :])
    else:
        assert not ended and whole.startswith(completion) and len(completion) == limit
        assert style in ("explain", "open_explain") or "BD" in completion


def test_what_cannot_be_rendered_is_listed() -> None:
    bare = replace(question(3), explanation=None)
    unanswered = replace(question(4), answer=None)
    encoded = encode([bare, unanswered, question(5)], "answer_explain", 500, 500)
    assert [row["question_id"] for row in encoded.rows] == ["q:5"]
    assert encoded.truncation.unrenderable == ("q:3", "q:4")
    assert encode([bare], "answer", 500, 500).truncation.rows == 1


def test_all_prompts_are_tokenised_together_and_only_long_ones_again() -> None:
    many = [question(i, stem="短" * 20) for i in range(300)] + [LONG] * 7
    encoded = encode(many, "answer", 120, 30)
    assert encoded.truncation.rows == 307 and encoded.truncation.stems_cut == 7
    assert calls[0] == 307 and set(calls[1:]) == {7} and len(calls) <= 9


def test_random_questions_keep_every_option_and_answer() -> None:
    rng = random.Random(0)
    asked = []
    for i in range(200):
        letters = "ABCDEFGHIJ"[: rng.randint(2, 10)]
        answer = "".join(sorted(rng.sample(letters, rng.randint(1, len(letters)))))
        asked.append(question(i, "问" * rng.randint(1, 300), answer, letters, explanation="解" * rng.randint(1, 300)))
    source, target = 260, 90
    encoded = encode(asked, "answer_explain", source, target)
    by_id = {q.id: q for q in asked}
    assert len(encoded.rows) + len(encoded.truncation.too_long) == 200 and encoded.truncation.stems_cut > 20
    for row in encoded.rows:
        q = by_id[row["question_id"]]
        prompt, completion, _ = texts(row)
        assert all(f"{letter} {text}" in prompt for letter, text in q.options.items())
        assert completion.startswith(f"答案: {q.answer} " + "；".join(q.options[a] for a in q.answer or ""))
