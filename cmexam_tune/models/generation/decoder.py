"""Three ways in which a decoder answers: free text, only legal answers, the most probable legal answer."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from peft import PeftModel
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.errors import ConfigError, UserError, first_line
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import (
    HALF,
    THINK,
    THOUGHT,
    letter_sets,
)
from cmexam_tune.models import Loaded, features
from cmexam_tune.models.causal import Codec, left_padded
from cmexam_tune.models.completion import Completion, windows
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation import (
    allowed_answers,
    kv_cache,
    sampling,
    stopping,
)
from cmexam_tune.models.generation.items import (
    Batch,
    Item,
    Reading,
    batches,
)
from cmexam_tune.models.generation.prefill import Reader, Start
from cmexam_tune.models.generation.streaming import RowOptions, Watching, within
from cmexam_tune.models.precision import inference
from cmexam_tune.prompts import Dialogue, PromptRequest

BLANK = "…"
"""Stands for stem and options in the prompt that prior normalisation compares with."""


class Decoder:
    """A model that writes, bound to its tokens and to a configuration; a `models.completion.TextEngine`."""

    usage = None

    def __init__(self, codec: Codec, loaded: Loaded, config: Config) -> None:
        """Bind; nothing is computed."""
        self.codec, self.tokenizer, self.config = codec, loaded.tokenizer, config
        # transformers' model itself; PEFT's layers stay inside it.
        self.model: Any = loaded.model.get_base_model() if isinstance(loaded.model, PeftModel) else loaded.model
        self.pad = int(self.tokenizer.pad_token_id or 0)
        self.stopping: list[Any] = []
        """More of transformers' stopping criteria, for `generate`."""
        self.row_options: dict[str, RowOptions] = {}
        """Id of a question -> what `generate` does for it alone."""
        self._halvings = 0
        self._priors: dict[str, dict[str, float]] = {}
        self._examples: dict[Any, int] = {}

    def effective_generation_config(self) -> dict[str, Any]:
        """Return how answers are made, whatever decided it, as JSON holds it: for the note beside the predictions."""
        effective = {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "lora_merged": not any(".lora_A." in name for name, _ in self.model.named_parameters()),
            "stop": list(self.codec.stop),
        }
        if self.config.generation.mode != "generate":
            return effective
        chosen = stopping.settings(self.model, self.tokenizer, self.config).to_diff_dict()
        return {**effective, **{key: value for key, value in chosen.items() if key != "transformers_version"}}

    def answer(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield a completion for each request in the way that `generation.mode` names, longest prompts first.

        Raises:
            ConfigError: a mode that needs letters with a style that writes none, or unusable generation settings.
        """
        modes = {"generate": self._written, "constrained": self._constrained, "likelihood": self._most_probable}
        mode = modes[self.config.generation.mode]
        for window in windows(requests, self.config.generation.batch_size):
            yield from self._within_memory(mode, window)

    def generate(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Let the model write, up to its EOS, a stop text of the template or of the row, or `max_new_tokens`."""
        return self._within_memory(self._written, requests)

    @property
    def batch_size(self) -> int:
        """Prompts that are answered together: `generation.batch_size`, halved each time it did not fit the card."""
        return max(self.config.generation.batch_size >> self._halvings, 1)

    def _within_memory(
        self, mode: Callable[[Sequence[PromptRequest]], Iterator[Completion]], requests: Sequence[PromptRequest]
    ) -> Iterator[Completion]:
        """Yield what `mode` makes of requests; those of a batch that the card cannot hold are asked in smaller ones."""
        missing = {request.question.id: request for request in requests}
        while True:
            try:
                for completion in mode(list(missing.values())):
                    del missing[completion.request.question.id]
                    yield completion
                return
            except torch.OutOfMemoryError as error:
                self._halve(error)
            # Not in the handler: while it runs, the traceback holds all that the batch had on the card.
            torch.cuda.empty_cache()

    def _halve(self, error: torch.OutOfMemoryError) -> None:
        """Answer fewer prompts at once from now on.

        Raises:
            UserError: there is one prompt at a time already.
            OutOfMemoryError: nothing can be asked again, because a part of it was told, or because other processes
                take every step together with this one.
        """
        zero3: bool = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
        if zero3 or any(row.tell for row in self.row_options.values()):
            raise error
        if self.batch_size == 1:
            raise UserError(
                f"{self.config.model.model_name_or_path}: one prompt at a time is too much for the card's memory "
                f"({first_line(error)}). Lower generation.max_new_tokens, prompt.max_source_length or prompt.shots, "
                "set model.load_in_4bit=true, or take a larger card."
            ) from error
        size = self.batch_size
        self._halvings += 1
        cli.note(f"note: {size} prompts at once do not fit the card; going on with generation.batch_size={size // 2}")

    def _constrained(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        for item, letters in self.constrained(requests):
            yield self._chosen(item, letters)

    def _most_probable(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        for item, scores in self._normalised(requests):
            yield self._chosen(item, max(scores, key=scores.__getitem__))

    def ask(self, requests: Sequence[PromptRequest]) -> list[Item]:
        """Return the prompts as ids, their stems cut to `prompt.max_source_length`, which examples are not counted in.

        A question whose options alone exceed the limit is asked all the same, without its stem: nothing is left out.
        """
        by_id = {item.question.id: item for item in requests}
        system = self.config.prompt.system

        def tokenize(some: list[Question]) -> list[tuple[Ids, int]]:
            dialogues = [by_id[question.id].dialogue(question) for question in some]
            dialogues = [d if d.system is not None else d._replace(system=system) for d in dialogues]
            rows = self.codec.sources(dialogues)
            return [(row, len(row) - self._of_examples(d)) for row, d in zip(rows, dialogues, strict=True)]

        sources = features.fit_stems(
            [item.question for item in requests], tokenize, self.config.prompt.max_source_length, lambda sized: sized[1]
        )
        return [Item(item, ids) for item, (ids, _) in zip(requests, sources.ids, strict=True)]

    def _of_examples(self, dialogue: Dialogue) -> int:
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
            positions, needed = getattr(self.model.config, "max_position_embeddings", None), len(whole)
            if self.config.generation.mode == "generate":
                needed += self.config.generation.arguments.get("max_new_tokens", stopping.room(self.config))
            if positions is not None and needed > positions:
                raise ConfigError(
                    f"prompt.shots={self.config.prompt.shots}: a prompt with its answer takes {needed} tokens, this "
                    f"model has {positions} positions. Use fewer."
                )
        return self._examples[key]

    def _written(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        chosen, shaping = sampling.split(stopping.settings(self.model, self.tokenizer, self.config))
        ends = stopping.end_ids(chosen)
        for batch in self._batches(self.ask(requests)):
            rows = [item.ids + self.codec.lead for item in batch.items]
            width = max(len(row) for row in rows)
            options = [self.row_options.get(item.question.id, RowOptions()) for item in batch.items]
            stops = [(*self.codec.stop, *row.stop) for row in options]
            watching = Watching(options, width, lambda ids: self._text(ids, ends), self._spell)
            criteria: list[Any] = [*self.stopping, *self._criteria(stops, width, chosen)]
            processors: list[Any] = []
            if (chosen.num_beams or 1) == 1:  # with beams there are more rows than prompts
                criteria.append(watching.after)
                # In front of `Draw`, which leaves one token and nothing of the distribution.
                processors.append(watching.before)
            if shaping is not None:
                processors.append(sampling.Draw(shaping, self._seeds(batch.items, options)))
            new = self._generate(rows, chosen, batch.start, logits_processor=processors, stopping_criteria=criteria)
            for i, (item, ids) in enumerate(zip(batch.items, new, strict=True)):
                end, text = stopping.end_of(ids, ends), self._text(ids, ends)
                cut = stopping.first_stop(text, stops[i])
                count = len(ids) if end is None else end + 1
                if cut is not None:
                    # Behind its stop text a row holds padding until the longest row of the batch has ended.
                    count = self._length_to_stop(ids[:count], stops[i], ends)
                finish: Literal["stop", "length"] = "length" if end is None and cut is None else "stop"
                if finish == "length":
                    # The limit counts tokens, of which a character may need several; vLLM and llama.cpp drop it too.
                    text = text.rstrip(HALF)
                yield Completion(
                    item.request,
                    text[:cut],
                    finish,
                    prompt_tokens=len(rows[i]),
                    completion_tokens=count,
                    logprobs=within(watching.tokens[i][:end], cut),
                )

    def _seeds(self, items: Sequence[Item], options: Sequence[RowOptions]) -> list[str]:
        """Return what the random numbers of each row start from."""
        common = self.config.generation.seed
        return [
            f"{common}/{item.question.id}" if row.seed is None else str(row.seed)
            for item, row in zip(items, options, strict=True)
        ]

    def _length_to_stop(self, ids: Ids, stops: Sequence[str], ends: set[int]) -> int:
        """Return how many of a row's tokens there are up to the one that completes its first stop text."""

        def stopped(count: int) -> bool:
            return stopping.first_stop(self._text(ids[:count], ends), stops) is not None

        return bisect.bisect_left(range(len(ids)), True, key=stopped)

    def _text(self, ids: Ids, ends: set[int]) -> str:
        ids = ids[: stopping.end_of(ids, ends)]
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return THINK * self.codec.thinks + str(text)

    def _spell(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _criteria(self, stops: Sequence[Sequence[str]], width: int, chosen: GenerationConfig) -> list[Any]:
        """Return what ends rows beside EOS: their stop texts; and thinking, for which `chosen` gets the room."""
        criteria: list[Any] = [stopping.StopText(self.tokenizer, stops, width)] if any(stops) else []
        if thinking := self.config.generation.thinking_tokens:
            end: Ids = self.tokenizer(THOUGHT, add_special_tokens=False)["input_ids"]
            most = stopping.settings(self.model, self.tokenizer, self.config).max_new_tokens
            criteria.append(stopping.Budget(end, width, thinking, most))
            chosen.max_new_tokens = thinking + len(end) + most
        return criteria

    def constrained(self, requests: Sequence[PromptRequest]) -> Iterator[tuple[Item, str]]:
        """Let the model write only legal answers: the style's words, then letters of the question in order."""
        for batch, leads, roots in self._trees(self.ask(requests)):
            rows = [item.ids + self.codec.lead + lead for item, lead in zip(batch.items, leads, strict=True)]
            width = max(len(row) for row in rows)
            chosen = GenerationConfig(
                do_sample=False, use_cache=True, max_new_tokens=max(root.depth for root in roots), pad_token_id=self.pad
            )  # type: ignore[no-untyped-call]
            new = self._generate(
                rows,
                chosen,
                batch.start,
                logits_processor=[stopping.OnlyLegal(roots, width)],
                stopping_criteria=[stopping.AtLeaf(roots, width)],
            )
            for item, root, ids in zip(batch.items, roots, new, strict=True):
                yield item, str(allowed_answers.walk(root, ids).letters)

    def likelihoods(
        self, requests: Sequence[PromptRequest], whole: bool = True
    ) -> Iterator[tuple[Item, dict[str, float]]]:
        """Yield each question with the log-probability of each of its legal answers, summed over the answer's tokens.

        Without `whole` the tokens that all answers of a question start with are left out of the sums, which saves the
        output layer at these tokens.
        """
        for reading in self._readings(self.ask(requests), whole):
            with inference(self.model):
                scores = allowed_answers.totals(reading.reader, reading.roots, reading.after)
            for item, start, rest in zip(reading.items, reading.lead, scores, strict=True):
                yield item, {letters: start + value for letters, value in rest.items()}

    def legal_answers(self, question: Question) -> dict[str, Ids]:
        """Return letters -> ids of each legal answer, as the style starts its completion.

        Where sets of several letters compete, what ends the letters (the style's next words, or EOS) belongs to the
        answer: otherwise A would always be at least as probable as AC.

        Raises:
            ConfigError: the style's completions do not start with the letters.
        """
        style = prompts.resolve_style(self.config.prompt)
        sets = letter_sets(question, self.config.generation.answer_sets)
        heads = [prompts.answer_head(question, letters, style) for letters in sets]
        has_sets = len(sets) > len(question.options)
        after, field, _ = style.write.partition("{letters}")[2].partition("{")
        texts = [head + after for head in heads] if has_sets else heads
        front = len(self.codec.lead)
        ids = self.codec.targets(texts)
        ends = has_sets and not field
        return {letters: row[front:] if ends else row[front:-1] for letters, row in zip(sets, ids, strict=True)}

    def _chosen(self, item: Item, letters: str) -> Completion:
        text = prompts.answer_head(item.question, letters, prompts.resolve_style(self.config.prompt))
        return Completion(item.request, text, None, letters)

    def _normalised(self, requests: Sequence[PromptRequest]) -> Iterator[tuple[Item, dict[str, float]]]:
        """Yield the scores by which answers are chosen."""
        by_prior, by_length = (
            self.config.generation.prior_normalization,
            self.config.generation.length_normalization,
        )
        # What all answers start with matters only to sums that are divided or compared with another prompt's.
        for item, scores in self.likelihoods(requests, whole=by_prior or by_length):
            if by_prior:
                prior = self._prior(item.request)
                scores = {letters: value - prior[letters] for letters, value in scores.items()}
            if by_length:
                ids = self.legal_answers(item.question)
                scores = {letters: value / len(ids[letters]) for letters, value in scores.items()}
            yield item, scores

    def _prior(self, request: PromptRequest) -> dict[str, float]:
        """Return the log-probabilities of the answers when stem and options are blank (Zhao et al. 2021)."""
        question = request.question
        blank = replace(question, stem=BLANK, options=dict.fromkeys(question.options, BLANK))
        # The kind decides which sets of letters are legal, and a prompt need not show it.
        key = f"{request.dialogue(blank)}{question.kind}"
        if key not in self._priors:
            ((_, self._priors[key]),) = self.likelihoods([replace(request, question=blank)])
        return self._priors[key]

    def _batches(self, items: Sequence[Item], key: Callable[[Item], Any] = lambda item: 0) -> Iterator[Batch]:
        return batches(self.model, items, self.pad, self.batch_size, key)

    def _trees(self, items: Sequence[Item]) -> Iterator[tuple[Batch, list[Ids], list[allowed_answers.Node]]]:
        """Yield batches with what all legal answers of each row start with, and the tree of the rest of them."""
        trees: dict[str, tuple[Ids, allowed_answers.Node]] = {}

        def kind(item: Item) -> str:
            """Questions with the same key have the same legal answers."""
            return " ".join(letter_sets(item.question, self.config.generation.answer_sets))

        for item in items:
            if (key := kind(item)) not in trees:
                trees[key] = allowed_answers.tree(self.legal_answers(item.question))
        for batch in self._batches(items, kind):
            leads, roots = zip(*(trees[kind(item)] for item in batch.items), strict=True)
            yield batch, list(leads), list(roots)

    def _readings(self, items: Sequence[Item], whole: bool) -> Iterator[Reading]:
        for batch, leads, roots in self._trees(items):
            rows = [item.ids + self.codec.lead + lead for item, lead in zip(batch.items, leads, strict=True)]
            with inference(self.model):
                reader = Reader(self.model, rows, self.pad, batch.start)
                logs = reader.prefill(max(len(lead) for lead in leads) + 1 if whole else 1)
            sums = [allowed_answers.summed(row, lead) if whole else 0.0 for row, lead in zip(logs, leads, strict=True)]
            yield Reading(batch.items, reader, roots, logs[:, -1], sums)

    def _generate(
        self,
        rows: list[Ids],
        chosen: GenerationConfig,
        start: Start | None = None,
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Sequence[Any] = (),
    ) -> list[Ids]:
        """Return what the model adds to each row.

        While it writes, the checkpoint's own generation settings are put away: transformers would take from them
        whatever `chosen` leaves open.
        """
        ids, mask = left_padded(rows, self.pad, self.model.device, start.ids if start else ())
        own, self.model.generation_config = self.model.generation_config, chosen
        try:
            with stopping.explained(self.config), inference(self.model):
                # `generate` repeats ids and mask for every beam, but not a cache that it is handed.
                past = start.rows(len(rows) * int(chosen.num_beams or 1)) if start else kv_cache.empty(self.model)
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=chosen,
                    past_key_values=past if chosen.use_cache else None,
                    logits_processor=LogitsProcessorList([stopping.Numbers(ids.shape[1]), *logits_processor]),
                    stopping_criteria=StoppingCriteriaList(stopping_criteria),
                )
        finally:
            self.model.generation_config = own
        new: list[Ids] = out[:, ids.shape[1] :].tolist()
        return new
