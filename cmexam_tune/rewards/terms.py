"""The terms of a reward: pure functions of a question and an output, each with where it comes from.

A new term is a function here, an entry in `TERMS`, and a weight of the same name in `config.settings.RewardConfig`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import conclusion, final_part
from cmexam_tune.rewards.strict_answer import AnswerPlace, Statement, statement

MARGIN = 64
"""Tokens before the limit at which `overlong` begins to cost."""
_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_WORD = re.compile(r"[^\W\d_]")


class Output(NamedTuple):
    """What a model wrote for a question."""

    text: str
    tokens: int | None = None
    """Tokens that were written, where they are known."""
    limit: int | None = None
    """Tokens that may be written."""


@dataclass(frozen=True)
class JudgedOutput:
    """An output beside its question, read once for all terms."""

    question: Question
    output: Output
    stated: Statement | None

    @classmethod
    def of(cls, question: Question, output: Output | str, place: AnswerPlace = "end") -> "JudgedOutput":
        """Read an output; `place` is where the style has the answer written."""
        output = Output(output) if isinstance(output, str) else output
        return cls(question, output, statement(output.text, question, place))


def exact(judged: JudgedOutput) -> float:
    """1 for exactly the right letters, else 0: the exam's own rule.

    AlphaMed (arXiv 2505.17952) trains on nothing else.
    """
    return float(judged.stated is not None and judged.stated.letters == judged.question.answer)


def format(judged: JudgedOutput) -> float:
    """1 where the answer can be read strictly, right or wrong: DeepSeek-R1's format reward (arXiv 2501.12948)."""
    return float(judged.stated is not None)


def partial(judged: JudgedOutput) -> float:
    """The Jaccard similarity to the right letters, where several are right and not exactly these were given; else 0.

    As ZSYZSY's chinese-medical-exam-llm (scripts/grpo_rewards.py) has it. Of a question with one right letter a guess
    of all letters must earn nothing, and what is exactly right has earned `exact`.
    """
    gold = set(judged.question.answer or "")
    if len(gold) < 2 or judged.stated is None or exact(judged):
        return 0.0
    stated = set(judged.stated.letters)
    return len(gold & stated) / len(gold | stated)


def overlong(judged: JudgedOutput) -> float:
    """0 up to `MARGIN` tokens before the limit, from there linearly to -1 at the limit; 0 where no length is known.

    The soft punishment of DAPO (arXiv 2503.14476, equation 13). A limit of fewer tokens has a margin of half of it.
    """
    tokens, limit = judged.output.tokens, judged.output.limit
    if tokens is None or limit is None:
        return 0.0
    margin = min(MARGIN, limit // 2) or 1
    return -min(max(tokens - (limit - margin), 0) / margin, 1.0)


def language(judged: JudgedOutput) -> float:
    """The share of Chinese characters among all letters that are not part of an option's text; 1 without any.

    Against thoughts in English about questions in Chinese; DeepSeek-R1's language consistency (arXiv 2501.12948).
    Latin letters within options (CT, HBsAg) are what the exam writes and cost nothing.
    """
    text = judged.output.text
    # Longest first, so that no option is cut out of another one.
    for option in sorted(judged.question.options.values(), key=len, reverse=True):
        text = text.replace(option, "") if option else text
    # The letters of the answer are Latin in any language.
    words = _WORD.findall(re.sub(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", "", text))
    return len([word for word in words if _CHINESE.match(word)]) / len(words) if words else 1.0


def argues(judged: JudgedOutput) -> float:
    """-1 where the explanation concludes with other letters than are answered ("故选B ... 答案：C"), else 0.

    An explanation that concludes with nothing is not punished: short answers have none. See
    `evaluation.breakdowns.consistency`, which counts the same in reports.
    """
    if judged.stated is None:
        return 0.0
    concluded = conclusion(final_part(judged.stated.explanation), judged.question.options)
    return -float(concluded is not None and concluded != judged.stated.letters)


Term = Callable[[JudgedOutput], float]
TERMS: Mapping[str, Term] = {term.__name__: term for term in (exact, format, partial, overlong, language, argues)}
"""Name, which is that of its weight under `reward`, -> term."""
