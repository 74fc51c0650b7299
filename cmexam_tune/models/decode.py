"""Three ways in which a decoder answers: free text, only legal answers, the most probable legal answer."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from cmexam_tune import answers, prompts
from cmexam_tune.core.config import Config
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.models import Loaded, features, legal
from cmexam_tune.models.causal import Codec
from cmexam_tune.models.features import Ids
from cmexam_tune.prompts import templates

BLANK = "…"
"""Stands for stem and options in the prompt that prior normalisation compares with."""


@dataclass(frozen=True)
class Asked:
    """A question with its prompt as ids."""

    question: Question
    ids: Ids


def answer(codec: Codec, loaded: Loaded, questions: Sequence[Question], config: Config) -> Iterator[Prediction]:
    """Yield a prediction for each question in the way that `generation.mode` names, longest prompts first.

    Raises:
        ConfigError: a mode that needs letters with a style that writes none, or unusable generation settings.
    """
    asked = ask(codec, loaded, questions, config)
    if config.generation.mode == "generate":
        yield from generate(codec, loaded, asked, config)
    elif config.generation.mode == "constrained":
        yield from constrained(codec, loaded, asked, config)
    else:
        priors: dict[str, dict[str, float]] = {}
        # What all answers start with matters only to sums that are divided or compared with another prompt's.
        whole = config.generation.prior_normalization or config.generation.length_normalization
        for item, scores in likelihoods(codec, loaded, asked, config, whole):
            if config.generation.prior_normalization:
                prior = _prior(codec, loaded, item.question, config, priors)
                scores = {letters: value - prior[letters] for letters, value in scores.items()}
            if config.generation.length_normalization:
                ids = legal_answers(codec, loaded, item.question, config)
                scores = {letters: value / len(ids[letters]) for letters, value in scores.items()}
            yield _legal_prediction(item.question, max(scores, key=scores.__getitem__), config)


def ask(codec: Codec, loaded: Loaded, questions: Sequence[Question], config: Config) -> list[Asked]:
    """Return the prompts as ids, their stems cut to `prompt.max_source_length`.

    A question whose options alone exceed the limit is asked all the same, without its stem: nothing is left out.
    """
    style = config.prompt.style

    def tokenize(some: list[Question]) -> list[Ids]:
        return codec.source_ids(loaded.tokenizer, [prompts.prompt(question, style) for question in some], config.prompt)

    sources = features.fit_stems(questions, tokenize, config.prompt.max_source_length, len)
    return [Asked(question, ids) for question, ids in zip(questions, sources.ids, strict=True)]


def batches(asked: Sequence[Asked], size: int, key: Callable[[Asked], Any] = lambda item: 0) -> Iterator[list[Asked]]:
    """Yield batches of similar length, the longest first so that memory runs out at once or never."""
    order = sorted(asked, key=lambda item: (key(item), -len(item.ids)))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def base_model(loaded: Loaded) -> Any:
    """Return the transformers model itself; PEFT's layers stay inside it."""
    return loaded.model.get_base_model() if isinstance(loaded.model, PeftModel) else loaded.model


def generate(codec: Codec, loaded: Loaded, asked: Sequence[Asked], config: Config) -> Iterator[Prediction]:
    """Let the model write, up to its EOS, a stop string of the template or `max_new_tokens`."""
    tokenizer, model = loaded.tokenizer, base_model(loaded)
    settings = generation_settings(loaded, config)
    stops = () if config.prompt.template == "auto" else templates.template(config.prompt.template).stop
    prefix, pad = codec.generation_prefix(tokenizer), int(tokenizer.pad_token_id or 0)
    for batch in batches(asked, config.generation.batch_size):
        rows = [item.ids + prefix for item in batch]
        width = max(len(row) for row in rows)
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        end = StoppingCriteriaList([_Stop(tokenizer, stops, width)] if stops else [])
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, stopping_criteria=end)
        for item, new in zip(batch, out[:, width:].tolist(), strict=True):
            text = str(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            text = text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
            explanation = answers.split_explanation(text)
            yield Prediction(item.question.id, text, answers.parse(text, item.question), explanation)


class _Stop(StoppingCriteria):
    """Ends a row whose last tokens hold a stop string; transformers' own needs a vocabulary with Latin letters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], width: int) -> None:
        self.tokenizer, self.stops, self.width = tokenizer, stops, width
        self.tail = 2 + max(len(stop.encode()) for stop in stops)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        new = input_ids[:, self.width :][:, -self.tail :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        ended = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


def generation_settings(loaded: Loaded, config: Config) -> GenerationConfig:
    """Return greedy decoding with every EOS that model and tokenizer name, changed by `generation`'s own settings."""
    own = loaded.model.generation_config.eos_token_id
    ends = {loaded.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    wanted = dict(config.generation.arguments)
    if wanted.get("num_return_sequences", 1) != 1:
        raise ConfigError("generation.num_return_sequences: every question gets one answer. Leave it out.")
    defaults: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "max_new_tokens": config.prompt.max_target_length,
        "eos_token_id": sorted(ends),
        "pad_token_id": loaded.tokenizer.pad_token_id,
        "use_cache": True,
    }
    library: Any = GenerationConfig
    if "max_length" in wanted:
        # transformers would prefer our default to what the user asked for.
        del defaults["max_new_tokens"]
    try:
        settings: GenerationConfig = library(**{**defaults, **wanted, "return_dict_in_generate": False})
    except ValueError as error:
        raise ConfigError(f"generation: {error}") from None
    return settings


def constrained(codec: Codec, loaded: Loaded, asked: Sequence[Asked], config: Config) -> Iterator[Prediction]:
    """Let the model write only legal answers: the style's words, then letters of the question in order."""
    for batch, reader, roots, after, _ in _read(codec, loaded, asked, config, whole=False):
        with torch.inference_mode():
            chosen = list(legal.greedy(reader, roots, after, int(loaded.tokenizer.pad_token_id or 0)))
        for item, letters in zip(batch, chosen, strict=True):
            yield _legal_prediction(item.question, letters, config)


def likelihoods(
    codec: Codec, loaded: Loaded, asked: Sequence[Asked], config: Config, whole: bool = True
) -> Iterator[tuple[Asked, dict[str, float]]]:
    """Yield each question with the log-probability of each of its legal answers, summed over the answer's tokens.

    Without `whole` the tokens that all answers of a question start with are left out of the sums.
    """
    for batch, reader, roots, after, lead in _read(codec, loaded, asked, config, whole):
        with torch.inference_mode():
            scores = legal.totals(reader, roots, after)
        for item, start, rest in zip(batch, lead, scores, strict=True):
            yield item, {letters: start + value for letters, value in rest.items()}


def _prior(
    codec: Codec, loaded: Loaded, question: Question, config: Config, known: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Return the log-probabilities of the answers when stem and options are blank (Zhao et al. 2021)."""
    blank = replace(question, stem=BLANK, options=dict.fromkeys(question.options, BLANK))
    key = prompts.prompt(blank, config.prompt.style) + str(question.kind)
    if key not in known:
        ((_, known[key]),) = likelihoods(codec, loaded, ask(codec, loaded, [blank], config), config)
    return known[key]


def legal_answers(codec: Codec, loaded: Loaded, question: Question, config: Config) -> dict[str, Ids]:
    """Return letters -> ids of each legal answer, as the style starts its completion.

    Where sets of several letters compete, what ends the letters (the style's next words, or EOS) belongs to the
    answer: otherwise A would always be at least as probable as AC.

    Raises:
        ConfigError: the style's completions do not start with the letters.
    """
    sets = legal.letter_sets(question, config)
    heads = [prompts.answer_head(question, letters, config.prompt.style) for letters in sets]
    several = len(sets) > len(question.options)
    after, field, _ = prompts.style_named(config.prompt.style).write.partition("{letters}")[2].partition("{")
    texts = [head + after for head in heads] if several else heads
    front = len(codec.generation_prefix(loaded.tokenizer))
    ids = codec.target_ids(loaded.tokenizer, texts)
    ends = several and not field
    return {letters: row[front:] if ends else row[front:-1] for letters, row in zip(sets, ids, strict=True)}


_Read = tuple[list[Asked], legal.Reader, list[legal.Node], torch.Tensor, list[float]]


def _read(codec: Codec, loaded: Loaded, asked: Sequence[Asked], config: Config, whole: bool) -> Iterator[_Read]:
    """Yield batches read up to where their legal answers part.

    Yields:
        The batch; its reader; the tree of the rest of each row's answers; log-probabilities [b, v] at its root; the
        summed log-probability of what all answers of a row start with, or 0 without `whole`, which saves the output
        layer at these tokens.
    """
    tokenizer, model = loaded.tokenizer, base_model(loaded)
    prefix, pad = codec.generation_prefix(tokenizer), int(tokenizer.pad_token_id or 0)
    allowed: dict[str, dict[str, Ids]] = {}

    def kind(item: Asked) -> str:
        """Questions with the same key have the same legal answers."""
        return " ".join(legal.letter_sets(item.question, config))

    for item in asked:
        if (key := kind(item)) not in allowed:
            allowed[key] = legal_answers(codec, loaded, item.question, config)
    for batch in batches(asked, config.generation.batch_size, kind):
        options = [allowed[kind(item)] for item in batch]
        leads = [_common(list(ids.values())) for ids in options]
        roots = [legal.Node() for _ in batch]
        for root, lead, ids in zip(roots, leads, options, strict=True):
            for letters, row in ids.items():
                root.add(row[len(lead) :], letters)
        rows = [item.ids + prefix + lead for item, lead in zip(batch, leads, strict=True)]
        reader = legal.Reader(model, rows, pad)
        with torch.inference_mode():
            logs = reader.prefill(max(len(lead) for lead in leads) + 1 if whole else 1)
        sums = [_sum(row, lead) if whole else 0.0 for row, lead in zip(logs, leads, strict=True)]
        yield batch, reader, roots, logs[:, -1], sums


def _common(rows: Sequence[Ids]) -> Ids:
    """Return what all rows start with, at least one token short of the shortest."""
    lead: Ids = []
    for tokens in zip(*(row[:-1] for row in rows), strict=False):
        if len(set(tokens)) > 1:
            break
        lead.append(tokens[0])
    return lead


def _sum(logs: torch.Tensor, lead: Ids) -> float:
    """Return the summed log-probability of `lead`, the last tokens that were read; `logs` [keep, v] end after them."""
    return sum(float(logs[place, token]) for place, token in enumerate(lead, len(logs) - 1 - len(lead)))


def _legal_prediction(question: Question, letters: str, config: Config) -> Prediction:
    return Prediction(question.id, prompts.answer_head(question, letters, config.prompt.style), letters)
