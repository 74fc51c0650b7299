"""A local model that writes or chooses: how it is asked, and the three modes in which it answers."""

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.evaluation.answer_parsing import THOUGHT
from cmexam_tune.models import Loaded, device
from cmexam_tune.models.causal import Codec, left_padded
from cmexam_tune.models.completion import Completion, Token, windows
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation import kv_cache, sampling
from cmexam_tune.models.generation.allowed_answers import AnswerComplete, AnswerTrie, OnlyAllowed
from cmexam_tune.models.generation.kv_cache import PrefillScorer, SharedPrefix
from cmexam_tune.models.generation.prompt_tokens import Item, PromptTokens, Ranking, Scores
from cmexam_tune.models.generation.streaming import RowOptions, Watching, within
from cmexam_tune.models.precision import inference
from cmexam_tune.prompts import PromptRequest

CONTEXT = 8
"""Tokens before a token that are decoded with it to see what it adds to a text."""
HOST_MEMORY = "can't allocate memory"
"""What torch says where the memory of this machine is not enough."""
FEW = 4
"""Requests from which on it is worth to read apart what their prompts begin with."""
PASS_ON_CPU, PASS_ON_CARD = 8, 256
"""Tokens of prompts that take as long as one more forward pass, whatever it holds: measured by benchmarks/batches.py on
a CPU; an estimate for cards, which read so many while they fetch the weights once."""


class Batch(NamedTuple):
    """Requests that are answered together, and what their prompts begin with if that was read already."""

    items: list[Item]
    start: SharedPrefix | None


def batch_slices(lengths: Sequence[int], most: int, saved: float) -> Iterator[slice]:
    """Yield slices of rows of so many tokens that are not slower together than one by one.

    Args:
        lengths: tokens of each row.
        most: rows of a slice.
        saved: what each row saves that needs no forward passes of its own, in tokens of padding.
    """
    first = tokens = width = 0
    for place, length in enumerate(lengths):
        others, wider = place - first, max(width, length)
        if others == most or (others + 1) * wider - tokens - length > others * saved:
            yield slice(first, place)
            first, tokens, wider = place, 0, length
        tokens, width = tokens + length, wider
    if lengths:
        yield slice(first, len(lengths))


class Decoder(PromptTokens):
    """A model that writes, bound to its tokens and to a configuration; a `models.completion.TextEngine`."""

    usage = None

    def __init__(self, codec: Codec, loaded: Loaded, config: Config) -> None:
        """Bind; nothing is computed."""
        # transformers' model itself; PEFT's layers stay inside it.
        self.model: Any = loaded.model.get_base_model() if isinstance(loaded.model, PeftModel) else loaded.model
        positions = getattr(self.model.config, "max_position_embeddings", None)
        super().__init__(codec, loaded.tokenizer, config, positions)
        self.pad = int(self.tokenizer.pad_token_id or 0)
        self.mode: Mode = MODES[config.generation.mode](self)
        self.stopping: list[Any] = []
        """More of transformers' stopping criteria, for `generate`."""
        self.row_options: dict[str, RowOptions] = {}
        """Id of a question -> what `generate` does for it alone."""
        self._size, self._halvings = config.generation.prompts_at_once, 0

    def effective_generation_config(self) -> dict[str, object]:
        """Return how answers are made, whatever decided it, as JSON holds it: for the note beside the predictions."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "lora_merged": not any(".lora_A." in name for name, _ in self.model.named_parameters()),
            "stop": list(self.stops),
            **self.mode.settings(),
        }

    def answer(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield a completion for each request in the way that `generation.mode` names, longest of a window first.

        Raises:
            ConfigError: a mode that needs letters with a style that writes none, or unusable generation settings.
        """
        return self._in_mode(self.mode, requests)

    def generate(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Let the model write, up to its EOS, a stop text of the template or of the row, or `max_new_tokens`."""
        return self._in_mode(FreeText(self), requests)

    def _in_mode(self, mode: "Mode", requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        for window in windows(requests, self.config.generation.prompts_at_once):
            yield from self._within_memory(mode, window)

    @property
    def _in_step(self) -> bool:
        """Whether all processes take every forward pass together, each with a batch: ZeRO-3 gathers its weights so."""
        return bool(is_deepspeed_zero3_enabled())  # type: ignore[no-untyped-call]

    @property
    def batch_size(self) -> int:
        """Prompts that are answered together: `generation.batch_size`, halved each time it did not fit the card."""
        return max(self._size >> self._halvings, 1)

    def _fit_batch(self, longest: int) -> None:
        """Find `generation.batch_size=auto` for prompts of so many tokens."""
        if self.config.generation.batch_size == "auto" and not self._in_step:
            generation = self.config.generation
            beams = int(generation.arguments.get("num_beams") or 1)
            self._size = (
                kv_cache.rows_that_fit(self.model, longest + self._most_written, beams) or generation.prompts_at_once
            )

    @property
    def _most_written(self) -> int:
        """Tokens that a row may be longer than its prompt."""
        generation = self.config.generation
        return (self.new_tokens if generation.mode == "generate" else 0) + generation.thinking_tokens

    @property
    def _saved(self) -> float:
        """What a row saves by sharing the forward passes of a batch, in tokens of its prompt."""
        # Where passes are taken in step all processes need equally many batches.
        each = math.inf if self._in_step else PASS_ON_CARD if device.is_accelerated() else PASS_ON_CPU
        return each * (1 + self._most_written)

    def _within_memory(self, mode: "Mode", requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield what `mode` makes of requests; those of a batch that the card cannot hold are asked in smaller ones."""
        missing = {request.question.id: request for request in requests}
        while True:
            try:
                for completion in mode.completions(self.ask(list(missing.values()))):
                    del missing[completion.request.question.id]
                    yield completion
                return
            except RuntimeError as error:
                # A card's is a RuntimeError too; the host's has no type of its own.
                if not isinstance(error, torch.OutOfMemoryError) and HOST_MEMORY not in str(error):
                    raise
                self._halve(error)
            # Not in the handler: while it runs, the traceback holds all that the batch had on the card.
            device.empty_cache()

    def _halve(self, error: RuntimeError) -> None:
        """Answer fewer prompts at once from now on.

        Raises:
            UserError: there is one prompt at a time already.
            OutOfMemoryError: nothing can be asked again, because a part of it was told, or because other processes
                take every step together with this one.
        """
        if self._in_step or any(row.tell for row in self.row_options.values()):
            raise error
        if self.batch_size == 1:
            raise UserError(
                f"{self.config.model.model_name_or_path}: one prompt at a time is too much for the memory "
                f"({first_line(error)}). Lower generation.max_new_tokens, prompt.max_source_length or prompt.shots, "
                f"{'set model.load_in_4bit=true, ' * device.computes_4bit()}or take a larger card."
            ) from error
        size = self.batch_size
        self._halvings += 1
        cli.note(f"note: {size} prompts at once do not fit the card; going on with generation.batch_size={size // 2}")

    def batches(self, items: Sequence[Item], key: Callable[[Item], Any] = lambda item: 0) -> Iterator[Batch]:
        """Yield batches of similar length, the longest first so that memory runs out at once or never.

        Requests with the same examples stand together: their beginning is read once, and so is a question of which
        the batch holds several orders or votes. Those of equal `key` stand together, too.
        """
        groups: dict[Any, list[Item]] = {}
        for item in items:
            groups.setdefault((item.request.system, item.request.examples), []).append(item)
        rest = [item for group in groups.values() if len(group) < FEW for item in group]
        large = [group for group in groups.values() if len(group) >= FEW] + [rest] * bool(rest)
        self._fit_batch(max((len(item.ids) for item in items), default=0))
        size, saved = self.batch_size, self._saved
        for group in sorted(large, key=lambda group: -max(len(item.ids) for item in group)):
            start = None if group is rest else self._read_once(group, [0] * len(group))
            order = _again_together(group, key)
            known = start.length if start else 0
            for rows in batch_slices([len(item.ids) - known for item in order], size, saved):
                batch, own = order[rows], start
                if not self._in_step:
                    own = self._read_once(batch, [_beginning(item) for item in batch], start)
                yield Batch(batch, own)

    def _read_once(
        self, items: Sequence[Item], groups: Sequence[Hashable], start: SharedPrefix | None = None
    ) -> SharedPrefix | None:
        with inference(self.model):
            return kv_cache.read_shared_prefix(self.model, [item.ids for item in items], groups, self.pad, start)

    def run(
        self,
        rows: Sequence[Ids],
        chosen: GenerationConfig,
        start: SharedPrefix | None = None,
        *,
        logits_processor: Sequence[object] = (),
        stopping_criteria: Sequence[object] = (),
        allowed_tokens: Callable[[int, torch.Tensor], list[int]] | None = None,
    ) -> list[Ids]:
        """Return what transformers' `generate` adds to each row, padding behind its end included.

        While it writes, the checkpoint's own generation settings are put away: transformers would take from them
        whatever `chosen` leaves open.
        """
        ids, mask = left_padded(rows, self.pad, self.model.device, start.length if start else 0)
        own, self.model.generation_config = self.model.generation_config, chosen
        try:
            with inference(self.model):
                # `generate` repeats ids and mask for every beam, but not a cache that it is handed.
                past = start.rows(len(rows), int(chosen.num_beams or 1)) if start else kv_cache.empty(self.model)
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=chosen,
                    past_key_values=past if chosen.use_cache else None,
                    logits_processor=LogitsProcessorList([sampling.RefuseNaN(ids.shape[1]), *logits_processor]),
                    stopping_criteria=StoppingCriteriaList(stopping_criteria),
                    prefix_allowed_tokens_fn=allowed_tokens,
                )
        finally:
            self.model.generation_config = own
        new: list[Ids] = out[:, ids.shape[1] :].tolist()
        return new


def _beginning(item: Item) -> Hashable:
    """Return what prompts have in common that ask a question again, its options in another order or not."""
    return item.request.system, item.request.examples, item.question.stem


def _again_together(items: Sequence[Item], key: Callable[[Item], Any]) -> list[Item]:
    """Return items by `key` and length, the longest first; prompts that ask a question again stand together."""
    longest: dict[Hashable, int] = {}
    for item in items:
        longest[_beginning(item)] = max(longest.get(_beginning(item), 0), len(item.ids))
    first = {beginning: place for place, beginning in enumerate(longest)}
    return sorted(items, key=lambda item: (key(item), -longest[_beginning(item)], first[_beginning(item)]))


class Mode(ABC):
    """A way of answering: what it needs, and what it returns."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def settings(self) -> dict[str, object]:
        """Return how is decoded, beyond what all modes share."""
        return {}

    @abstractmethod
    def completions(self, items: Sequence[Item]) -> Iterator[Completion]:
        """Yield a completion for each item of a window."""


class FreeText(Mode):
    """generate: the model writes what it likes, and the answer is read out of its text."""

    def settings(self) -> dict[str, object]:
        """Return what differs from transformers' defaults."""
        changed = self._generation_config().to_diff_dict()
        return {key: value for key, value in changed.items() if key != "transformers_version"}

    def _generation_config(self) -> GenerationConfig:
        return sampling.generation_config(self.decoder.model, self.decoder.tokenizer, self.decoder.config)

    def completions(self, items: Sequence[Item]) -> Iterator[Completion]:
        """Yield a text for each item."""
        chosen, shaping = sampling.split_sampling(self._generation_config())
        thinking = self.decoder.config.generation.thinking_tokens
        budget: partial[sampling.ThinkingBudget] | None = None
        if thinking:
            end: Ids = self.decoder.tokenizer(THOUGHT, add_special_tokens=False)["input_ids"]
            budget = partial(sampling.ThinkingBudget, end, thinking, chosen.max_new_tokens)
            # Each row ends by its own budget; the longest possible one holds both and `</think>` between them.
            chosen.max_new_tokens = thinking + len(end) + chosen.max_new_tokens
        for batch in self.decoder.batches(items):
            yield from self._write(batch, chosen, shaping, budget)

    def _write(
        self,
        batch: Batch,
        chosen: GenerationConfig,
        shaping: LogitsProcessorList | None,
        budget: "partial[sampling.ThinkingBudget] | None",
    ) -> Iterator[Completion]:
        decoder, ends = self.decoder, sampling.end_ids(chosen)
        options = [decoder.row_options.get(item.question.id, RowOptions()) for item in batch.items]
        rows, tries = zip(*map(self._row, batch.items, options), strict=True)
        width = max(len(row) for row in rows)
        stops = [(*decoder.stops, *row.stop) for row in options]
        watching = Watching(options, width, lambda ids: decoder.text(ids, ends), self._spell)
        criteria: list[object] = list(decoder.stopping)
        processors: list[object] = []
        if any(stops):
            criteria.append(sampling.StopText(decoder.tokenizer, stops, width))
        if budget is not None:
            criteria.append(budget(width=width))
        if (chosen.num_beams or 1) == 1:  # with beams there are more rows than prompts
            criteria.append(watching.after)
            # In front of `SeededSampling`, which leaves one token and nothing of the distribution.
            processors.append(watching.before)
            if any(tries):
                processors.append(OnlyAllowed(tries, width, decoder.pad))
        if shaping is not None:
            processors.append(sampling.SeededSampling(shaping, self._seeds(batch.items, options)))
        with sampling.rare_settings_blamed(decoder.config):
            new = decoder.run(rows, chosen, batch.start, logits_processor=processors, stopping_criteria=criteria)
        for i, (item, ids) in enumerate(zip(batch.items, new, strict=True)):
            said = None if (trie := tries[i]) is None else trie.walk(ids).letters
            written = decoder.read(ids, ends, stops[i], said)
            count = len(ids) if written.end is None else written.end + 1
            if written.cut is not None:
                # Behind its stop text a row holds padding until the longest row of the batch has ended.
                count = self._length_to_stop(ids[:count], stops[i], ends)
            yield Completion(
                item.request,
                written.text,
                written.finish,
                prompt_tokens=len(rows[i]),
                completion_tokens=count,
                logprobs=within(watching.tokens[i][: count if options[i].echo else written.end], written.cut),
                prompt_text=self._prompt_text(item) if options[i].echo else "",
                prompt_logprobs=self._prompt_logprobs(watching, i, rows[i]) if options[i].echo else (),
            )

    def _row(self, item: Item, options: RowOptions) -> tuple[Ids, AnswerTrie | None]:
        """Return the ids that the model goes on from, and what it may write there; None: anything."""
        if not options.choices:
            return item.row, None
        codec = self.decoder.codec
        # As in `Choice`: tokenised with the words before them, which may share a token with them; EOS ends each.
        targets = codec.targets([item.request.reply_start + choice for choice in options.choices])
        front = 0 if item.request.ids is None else len(codec.lead)
        start, trie = AnswerTrie.of({choice: ids[front:] for choice, ids in zip(options.choices, targets, strict=True)})
        return item.ids + start, trie

    def _prompt_text(self, item: Item) -> str:
        return item.request.dialogue().prompt_text if item.request.ids is None else self._read(item.ids)

    def _prompt_logprobs(self, watching: Watching, row: int, ids: Ids) -> tuple[Token, ...]:
        """Return the tokens of a prompt as its row wants them noted."""
        if watching.options[row].top is None:
            return ()
        tokens, start = [Token(self._spell(ids[0]), 0.0, (), 0)], 0
        with inference(self.decoder.model):
            logs = kv_cache.prompt_log_probs(self.decoder.model, ids, self.decoder.pad)
            for place, behind in zip(range(1, len(ids)), logs, strict=False):
                # What a token adds to the text is seen behind a few others: alone it may lose its space.
                few = ids[max(place - CONTEXT, 0) : place]
                start += len(self._read(few)) - len(self._read(few[:-1]))
                tokens.append(watching.note(row, ids[place], behind, start))
        return tuple(tokens)

    def _seeds(self, items: Sequence[Item], options: Sequence[RowOptions]) -> list[str]:
        """Return what the random numbers of each row start from."""
        common = self.decoder.config.generation.seed
        return [
            f"{common}/{item.question.id}" if row.seed is None else str(row.seed)
            for item, row in zip(items, options, strict=True)
        ]

    def _length_to_stop(self, ids: Ids, stops: Sequence[str], ends: set[int]) -> int:
        """Return how many of a row's tokens there are up to the one that completes its first stop text."""

        def stopped(count: int) -> bool:
            return sampling.first_stop(self.decoder.text(ids[:count], ends), stops) is not None

        return bisect.bisect_left(range(len(ids)), True, key=stopped)

    def _spell(self, token: int) -> str:
        return self._read([token])

    def _read(self, ids: Ids) -> str:
        return str(self.decoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class Choice(Mode):
    """A way of answering in which only allowed answers can come out."""

    def batches(self, items: Sequence[Item]) -> Iterator[tuple[Batch, list[Ids], list[AnswerTrie]]]:
        """Yield batches with what all allowed answers of each row start with, and the tree of the rest of them."""
        decoder = self.decoder
        for batch in decoder.batches(items, lambda item: decoder.allowed_key(item.question)):
            starts, roots = zip(*(decoder.answer_trie(item.question) for item in batch.items), strict=True)
            yield batch, list(starts), list(roots)

    def rows(self, batch: Batch, starts: Sequence[Ids]) -> list[Ids]:
        """Return the prompts with the beginning that all answers share behind them."""
        return [item.row + start for item, start in zip(batch.items, starts, strict=True)]


class Constrained(Choice):
    """constrained: the model writes token by token, and of all tokens only those that lead to an allowed answer."""

    def completions(self, items: Sequence[Item]) -> Iterator[Completion]:
        """Yield a choice for each item."""
        for batch, starts, tries in self.batches(items):
            rows = self.rows(batch, starts)
            width = max(len(row) for row in rows)
            chosen = GenerationConfig(
                do_sample=False,
                use_cache=True,
                max_new_tokens=max(trie.depth for trie in tries),
                pad_token_id=self.decoder.pad,
            )  # type: ignore[no-untyped-call]
            new = self.decoder.run(
                rows,
                chosen,
                batch.start,
                allowed_tokens=partial(self._allowed_tokens, tries, width),
                stopping_criteria=[AnswerComplete(tries, width)],
            )
            for item, trie, ids in zip(batch.items, tries, new, strict=True):
                yield self.decoder.choice(item, str(trie.walk(ids).letters))

    def _allowed_tokens(self, tries: Sequence[AnswerTrie], width: int, row: int, ids: torch.Tensor) -> list[int]:
        """Return what may follow on the ids [prompt + new] of a row; behind a whole answer stands padding."""
        return list(tries[row].walk(ids[width:].tolist()).children) or [self.decoder.pad]


class Likelihood(Choice):
    """likelihood: the most probable of all allowed answers."""

    def __init__(self, decoder: Decoder) -> None:
        """Bind; nothing is computed."""
        super().__init__(decoder)
        self.ranking = Ranking(decoder, self.scores)

    def completions(self, items: Sequence[Item]) -> Iterator[Completion]:
        """Yield a choice for each item."""
        for item, scores in self.scores(items, self.ranking.whole):
            yield self.ranking.best(item, scores)

    def scores(self, items: Sequence[Item], whole: bool = True) -> Iterator[tuple[Item, Scores]]:
        """Yield each item with the log-probability of each of its allowed answers, summed over the answer's tokens.

        Without `whole` the tokens that all answers of a question start with are left out of the sums, which saves the
        output layer at these tokens.
        """
        model = self.decoder.model
        for batch, starts, tries in self.batches(items):
            with inference(model):
                scorer = PrefillScorer(model, self.rows(batch, starts), self.decoder.pad, batch.start)
                logs = scorer.prefill(max(len(start) for start in starts) + 1 if whole else 1)
                rests = scorer.answer_scores(tries, logs[:, -1])
            for item, start, row, rest in zip(batch.items, starts, logs, rests, strict=True):
                common = 0.0
                if whole:
                    # `logs` end behind the prompt; the place before a token says how probable it was.
                    first = len(row) - 1 - len(start)
                    common = sum(float(row[first + i, token]) for i, token in enumerate(start))
                yield item, {letters: common + value for letters, value in rest.items()}


MODES: dict[str, type[Mode]] = {"generate": FreeText, "constrained": Constrained, "likelihood": Likelihood}
"""`generation.mode` -> how it answers."""
