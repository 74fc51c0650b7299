"""Requests, allowed answers and outputs as tokens: how a model that writes is asked and read, whoever computes it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import HALF, THINK, letter_sets
from cmexam_tune.models import features
from cmexam_tune.models.causal import Codec
from cmexam_tune.models.completion import Completion, normalised
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation import sampling
from cmexam_tune.models.generation.allowed_answers import AnswerTrie
from cmexam_tune.prompts import Dialogue, PromptRequest

BLANK = "…"
"""Stands for stem and options in the prompt that prior normalisation compares with."""
Scores = dict[str, float]
"""Letters -> log-probability of the allowed answer that they are."""


@dataclass(frozen=True)
class Item:
    """A request, and its prompt as ids."""

    request: PromptRequest
    ids: Ids
    lead: Ids
    """What stands between the prompt and what the model writes."""

    @property
    def row(self) -> Ids:
        """The ids that the model continues."""
        return self.ids + self.lead

    @property
    def question(self) -> Question:
        """The question, whole, however much of it the prompt holds."""
        return self.request.question


class DecodedRow(NamedTuple):
    """What a row of tokens says."""

    text: str
    finish: Literal["stop", "length"]
    end: int | None
    """Place of the token that ended it."""
    cut: int | None
    """Characters in front of its first stop text."""


class PromptTokens:
    """A template, a tokenizer and a configuration, bound together."""

    def __init__(self, codec: Codec, tokenizer: PreTrainedTokenizerBase, config: Config, positions: int | None) -> None:
        """Bind; `positions` is how many tokens the model can tell apart, None: as many as there are."""
        self.codec, self.tokenizer, self.config, self.positions = codec, tokenizer, config, positions
        self.stops = tuple(dict.fromkeys((*codec.stop, *config.generation.stop_strings)))
        """Texts that end what is written, and are left out of it: the template's and the recipe's."""
        self._examples: dict[Hashable, int] = {}
        self._tries: dict[str, tuple[Ids, AnswerTrie]] = {}

    def ask(self, requests: Sequence[PromptRequest]) -> list[Item]:
        """Return the prompts as ids, their stems cut to `prompt.max_source_length`, which examples are not counted in.

        A question whose options alone exceed the limit is asked all the same, without its stem: nothing is left out.
        """
        worded = [request for request in requests if request.ids is None]
        by_id = {request.question.id: request for request in worded}
        system = self.config.prompt.system

        def tokenize(questions: list[Question]) -> list[tuple[Ids, int]]:
            """Return prompts, and how many of their tokens the limit counts."""
            dialogues = [by_id[question.id].dialogue(question) for question in questions]
            dialogues = [d if d.system is not None else d._replace(system=system) for d in dialogues]
            rows = self.codec.sources(dialogues)
            return [(row, len(row) - self._example_tokens(d)) for row, d in zip(rows, dialogues, strict=True)]

        sources = features.fit_stems(
            [request.question for request in worded],
            tokenize,
            self.config.prompt.max_source_length,
            lambda sized: sized[1],
        )
        given = [Item(request, list(request.ids), []) for request in requests if request.ids is not None]
        return [
            *(Item(request, ids, self._lead(request)) for request, (ids, _) in zip(worded, sources.ids, strict=True)),
            *given,
        ]

    def _lead(self, request: PromptRequest) -> Ids:
        return self.codec.targets([request.reply_start])[0][:-1] if request.reply_start else self.codec.lead

    def _example_tokens(self, dialogue: Dialogue) -> int:
        """Return how many tokens of a prompt are its examples.

        Raises:
            ConfigError: more than the model has positions for.
        """
        if not dialogue.examples:
            return 0
        key = dialogue.examples, dialogue.system
        if key not in self._examples:
            whole, bare = self.codec.sources([dialogue, dialogue._replace(examples=())])
            self._examples[key] = len(whole) - len(bare)
            needed = len(whole) + (self.new_tokens if self.config.generation.mode == "generate" else 0)
            if self.positions is not None and needed > self.positions:
                raise ConfigError(
                    f"prompt.shots={self.config.prompt.shots}: a prompt with its answer takes {needed} tokens, this "
                    f"model has {self.positions} positions. Use fewer."
                )
        return self._examples[key]

    @property
    def new_tokens(self) -> int:
        """How long a written text may be, thoughts not counted."""
        arguments = self.config.generation.arguments
        return int(arguments.get("max_new_tokens", sampling.default_max_new_tokens(self.config)))

    def allowed_answers(self, question: Question) -> dict[str, Ids]:
        """Return letters -> ids of each allowed answer, as the style starts its completion.

        Where sets of several letters compete, what ends the letters (the style's next words, or EOS) belongs to the
        answer: otherwise A would always be at least as probable as AC.

        Raises:
            ConfigError: the style's completions do not start with the letters.
        """
        style = prompts.resolve_style(self.config.prompt)
        sets = letter_sets(question, self.config.generation.answer_sets)
        heads = [prompts.answer_head(question, letters, style) for letters in sets]
        several = len(sets) > len(question.options)
        after, field, _ = style.write.partition("{letters}")[2].partition("{")
        texts = [head + after for head in heads] if several else heads
        front = len(self.codec.lead)
        ids = self.codec.targets(texts)
        ends = several and not field
        return {letters: row[front:] if ends else row[front:-1] for letters, row in zip(sets, ids, strict=True)}

    def allowed_key(self, question: Question) -> str:
        """Return what questions with the same allowed answers have in common."""
        return " ".join(letter_sets(question, self.config.generation.answer_sets))

    def answer_trie(self, question: Question) -> tuple[Ids, AnswerTrie]:
        """Return what all allowed answers of a question start with, and the tree of the rest of them."""
        if (key := self.allowed_key(question)) not in self._tries:
            self._tries[key] = AnswerTrie.of(self.allowed_answers(question))
        return self._tries[key]

    def choice(self, item: Item, letters: str) -> Completion:
        """Return the completion that a chosen answer is, in the style's words."""
        style = prompts.resolve_style(self.config.prompt)
        return Completion(item.request, prompts.answer_head(item.question, letters, style), None, letters)

    def text(self, ids: Ids, ends: set[int]) -> str:
        """Return what a row says up to the first of `ends`."""
        ids = ids[: sampling.end_of(ids, ends)]
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return THINK * self.codec.thinks + str(text)

    def read(self, ids: Ids, ends: set[int], stops: Sequence[str], said: str | None = None) -> DecodedRow:
        """Return what a row says up to its end or its first stop text; a row without either was cut off.

        `said` is its whole text where that is known: tokens that were chosen from a list need not spell it alone.
        """
        text, end = said or self.text(ids, ends), sampling.end_of(ids, ends)
        cut = sampling.first_stop(text, stops)
        if end is None and cut is None:
            # The limit counts tokens, of which a character may need several; vLLM and llama.cpp drop it too.
            return DecodedRow(text.rstrip(HALF), "length", end, cut)
        return DecodedRow(text[:cut], "stop", end, cut)


class Ranking:
    """likelihood: how log-probabilities of the allowed answers become a choice."""

    def __init__(
        self, tokens: PromptTokens, scores: Callable[[Sequence[Item], bool], Iterator[tuple[Item, Scores]]]
    ) -> None:
        """Bind to what computes scores: of items, with or without what all answers of a question start with."""
        self.tokens, self._scores, self._generation = tokens, scores, tokens.config.generation
        self._priors: dict[str, Scores] = {}

    @property
    def whole(self) -> bool:
        """Whether the sums need what all answers start with: only if they are divided, or compared across prompts."""
        return self._generation.prior_normalization or self._generation.length_normalization

    def best(self, item: Item, scores: Scores) -> Completion:
        """Return the most probable answer, normalised as the config says."""
        if self._generation.prior_normalization:
            prior = self._prior(item.request)
            scores = {letters: value - prior[letters] for letters, value in scores.items()}
        if self._generation.length_normalization:
            ids = self.tokens.allowed_answers(item.question)
            scores = {letters: value / len(ids[letters]) for letters, value in scores.items()}
        chosen = self.tokens.choice(item, max(scores, key=scores.__getitem__))
        return replace(chosen, probabilities=normalised(scores))

    def _prior(self, request: PromptRequest) -> Scores:
        """Return the log-probabilities of the answers when stem and options are blank (Zhao et al. 2021)."""
        question = request.question
        blank = replace(question, stem=BLANK, options=dict.fromkeys(question.options, BLANK))
        # The kind decides which sets of letters are allowed, and a prompt need not show it.
        key = f"{request.dialogue(blank)}{question.kind}"
        if key not in self._priors:
            ((_, self._priors[key]),) = self._scores(self.tokens.ask([replace(request, question=blank)]), True)
        return self._priors[key]
