"""What a prediction would send, before anything is sent or loaded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.core.schema import Case, Question
from cmexam_tune.inference import answering
from cmexam_tune.inference.loading import Source
from cmexam_tune.prompts import PromptRequest, dialogue


@dataclass(frozen=True)
class RequestEstimate:
    """How much would be asked, if nothing is answered yet."""

    questions: int
    requests: int
    """One for each output: with votes or orders several for each question."""
    characters: int
    """Of all prompts, system messages and examples included, templates not."""
    tokens: int | None
    """The same in tokens, where a tokenizer is named."""
    most_new_tokens: int
    """Upper bound of what is written."""

    def __str__(self) -> str:
        read = f"{self.characters:,} characters" if self.tokens is None else f"{self.tokens:,} tokens"
        return (
            f"{self.questions:,} questions, {self.requests:,} requests: {read} to read, "
            f"at most {self.most_new_tokens:,} tokens to write. Nothing was sent."
        )


def estimate(
    source: Source, questions: str | Path, limit: int | None = None, tokenizer: str | None = None
) -> RequestEstimate:
    """Return what predicting a file would send.

    Args:
        source: config of the model; for a model behind an address its key and address are checked.
        questions: questions or cases.
        limit: only the first so many.
        tokenizer: folder or hub name of a tokenizer to count tokens with; None: characters are counted.

    Raises:
        UserError: files or settings that cannot be used, or no such tokenizer.
    """
    config = source.config
    if config.model.is_remote:
        from cmexam_tune.models.families.endpoint import Remote

        Remote(config)
    prompts = _prompts(source, questions, limit)
    texts = [
        "\n".join(message["content"] for message in prompt.dialogue()._replace(system=config.prompt.system).messages())
        for prompt in prompts
    ]
    times = _times(source, prompts)

    def whole(lengths: Iterable[int]) -> int:
        return sum(length * count for length, count in zip(lengths, times, strict=True))

    tokens = None if tokenizer is None else whole(_tokens(texts, tokenizer))
    most = config.generation.arguments.get("max_new_tokens", config.prompt.max_target_length)
    return RequestEstimate(len(prompts), sum(times), whole(map(len, texts)), tokens, sum(times) * most)


def _times(source: Source, prompts: Sequence[PromptRequest]) -> list[int]:
    """Return how often each question is asked; another order of its options changes no length."""
    repetition = answering.repeated(source.config)
    if repetition is None:
        return [1] * len(prompts)
    return [len(repetition.orders(prompt.question)) for prompt in prompts]


def _prompts(source: Source, questions: str | Path, limit: int | None) -> Sequence[PromptRequest]:
    if dialogue.is_cases(questions):
        cases = list(jsonl.read(questions, Case))[:limit]
        return [dialogue.request(case, number) for case in cases for number, _ in enumerate(case.turns, 1)]
    exam = list(jsonl.read(questions, Question))
    builder = answering.prompt_builder(source.config, exam)
    return [builder.request(question) for question in exam[:limit]]


def _tokens(texts: Sequence[str], name: str) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {name}: cannot be read ({first_line(error)}).") from None
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
