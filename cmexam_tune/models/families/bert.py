"""BERT, RoBERTa and other encoders as classifiers of questions, with one of three heads (`model.head`).

choice: every option is scored beside the stem by one logit; binary cross-entropy over the options of a question, so
that the same threshold serves one answer and several. label: one softmax over the answer strings seen in training.
multilabel: one sigmoid for each letter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from cmexam_tune import prompts
from cmexam_tune.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.models import checkpoint, features
from cmexam_tune.models.completion import Completion, windows
from cmexam_tune.models.families import Classifier, Loaded
from cmexam_tune.models.features import IGNORE_INDEX, Encoded, Ids, Truncation
from cmexam_tune.models.precision import check_numbers, inference
from cmexam_tune.prompts import PromptRequest

THRESHOLD = 0.5
"""Probability from which an option belongs to the answer; the best one always does."""


class Bert(Classifier):
    """Encoders with a classification head."""

    lora_targets: ClassVar[tuple[str, ...]] = ("query", "value")

    def open(self, model: ModelConfig, questions: Iterable[Question] | None, device: str) -> Loaded:
        """Load an encoder with a classification head.

        A new head of `label` or `multilabel` takes its labels from `questions`; a head that was trained here brings
        them in its config.json, and an adapter's run names them in `model.config.id2label`.

        Raises:
            UserError: the path does not exist, holds no encoder, or nothing says what the labels are.
        """
        if model.adapter_name_or_path is not None:
            raise ConfigError(
                "model.adapter_name_or_path: family bert starts from a whole model. Merge the adapter first "
                "(`cmexam-tune export --merge`) and name that folder in model.model_name_or_path."
            )
        source = checkpoint.Checkpoint(model)
        config = source.config()
        kind, name = config.model_type, model.model_name_or_path
        if config.is_encoder_decoder or kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise UserError(
                f"{name}: is no encoder ({kind}); family bert needs one. For a decoder set model.family=llama."
            )
        if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            raise UserError(f"{name}: transformers has no classifier for type {kind!r}.")
        stored = getattr(config, "cmexam_head", None)
        head = model.head or stored
        if head is None:
            raise ConfigError("model.head: a classifier needs one of choice, label, multilabel.")
        if stored not in (None, head):
            raise UserError(f"{name}: was trained with model.head={stored}, the config says {head}.")
        labels = _labels(head, model, config if stored else None, questions)
        config.cmexam_head = head
        config.num_labels = len(labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
        classifier: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        prefix = classifier.base_model_prefix + "."
        encoder = source.weights(
            AutoModelForSequenceClassification,
            config,
            device,
            # The head is new unless it was trained here; models tuned only on masked words have no pooler.
            lambda key: stored is None and (not key.startswith(prefix) or ".pooler." in key),
        )
        return Loaded(encoder, source.tokenizer())

    def encode(
        self, loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig
    ) -> Encoded:
        """Return training rows: `input_ids` (choice: one list for each option), `labels`, `question_id`."""
        head, labels = _head(loaded), _label_list(loaded)
        sources = _sources(loaded, questions, prompt)
        rows: list[Mapping[str, Any]] = []
        unrenderable = []
        for i, question in enumerate(questions):
            target = _target(question, head, labels)
            if target is None:
                unrenderable.append(question.id)
            elif i not in sources.too_long:
                rows.append({"question_id": question.id, "input_ids": sources.ids[i], "labels": target})
        too_long = tuple(questions[i].id for i in sorted(sources.too_long) if questions[i].id not in set(unrenderable))
        return Encoded(
            rows,
            Truncation(
                rows=len(rows),
                stems_cut=len(sources.cut - sources.too_long),
                too_long=too_long,
                unrenderable=tuple(unrenderable),
                longest_source=max((_longest(row["input_ids"]) for row in rows), default=0),
            ),
        )

    def collate(self, loaded: Loaded, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, torch.Tensor]:
        """Return one right-padded batch.

        Returns:
            `input_ids`, `attention_mask` and, for models with segments, `token_type_ids` [n, s]; `question` [n]: which
            question a sequence belongs to; `labels`: choice [n], label [questions], multilabel [questions, letters].
        """
        rows = [row for group in groups for row in group]
        batch = _inputs(loaded, [row["input_ids"] for row in rows])
        labels = [row["labels"] for row in rows]
        if _head(loaded) == "multilabel":
            return {**batch, "labels": torch.tensor(labels)}
        return {**batch, "labels": torch.tensor([label for row in labels for label in row])}

    def scores(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits [n, labels] of a batch; `labels` and `question` in it are not read."""
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "question")}
        logits: torch.Tensor = model(**inputs).logits
        return logits.float()

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over questions of each one's loss, itself the mean over its options or letters."""
        logits, labels = self.scores(model, batch), batch["labels"]
        if labels.dim() == 1 and logits.shape[1] > 1:
            return functional.cross_entropy(logits, labels)
        if labels.dim() == 1:
            each = functional.binary_cross_entropy_with_logits(logits[:, 0], labels.float(), reduction="none")
            # Divided by the question's options: one with five weighs as much as one with two.
            sizes = torch.bincount(batch["question"])
            return (each / sizes[batch["question"]]).sum() / len(sizes)
        # Letters that a question does not offer have no label; each question weighs the same, however many it offers.
        has_label = (labels != IGNORE_INDEX).float()
        each = functional.binary_cross_entropy_with_logits(logits, labels.clamp(min=0).float(), reduction="none")
        return ((each * has_label).sum(1) / has_label.sum(1)).mean()

    def engine(self, loaded: Loaded, config: Config) -> "OptionScorer":
        """Return what answers; see `OptionScorer`."""
        return OptionScorer(self, loaded, config)


class OptionScorer:
    """A classifier bound to a configuration; a `models.completion.Engine`."""

    usage = None

    def __init__(self, family: Bert, loaded: Loaded, config: Config) -> None:
        """Bind; nothing is computed.

        Raises:
            ConfigError: worked examples are wanted, which a classifier cannot read.
        """
        if config.prompt.shots:
            raise ConfigError(f"prompt.shots: a model of family {config.model.family} reads no examples. Leave it out.")
        if config.prompt.context:
            raise ConfigError(
                f"prompt.context: a model of family {config.model.family} reads no passages. Leave it out."
            )
        self._family, self._loaded, self._config = family, loaded, config

    def effective_generation_config(self) -> dict[str, object]:
        """Return the type that is computed in."""
        return {"dtype": str(self._loaded.model.dtype).removeprefix("torch.")}

    def answer(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield a completion for each request, the longest of a window first; its text is `答案: AC`, or nothing."""
        for window in windows(requests, self._config.generation.prompts_at_once):
            yield from self._answer(window)

    def _answer(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        loaded, size = self._loaded, self._config.generation.prompts_at_once
        head, labels = _head(loaded), _label_list(loaded)
        limit = position_limit(loaded.model.config)
        sources = _sources(loaded, [request.question for request in requests], self._config.prompt)
        # An option longer than the model's positions can only be read in part; the question still gets an answer.
        ids = [[row[:limit] for row in sequences] for sequences in sources.ids]
        order = sorted(range(len(requests)), key=lambda i: -_longest(ids[i]))
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            inputs = _inputs(loaded, [ids[i] for i in chunk])
            batch = {name: value.to(loaded.model.device) for name, value in inputs.items()}
            with inference(loaded.model):
                logits = self._family.scores(loaded.model, batch).cpu()
            check_numbers(logits)
            for row, i in enumerate(chunk):
                mine = logits[inputs["question"] == row]
                letters = read_logits(requests[i].question, head, labels, mine[:, 0] if head == "choice" else mine[0])
                yield Completion(requests[i], f"答案: {letters}" if letters else "", None, letters or None)


def _labels(
    head: str, model: ModelConfig, stored: PreTrainedConfig | None, questions: Iterable[Question] | None
) -> list[str]:
    """Return the labels of the head, in the order of its outputs."""
    named = model.config.get("id2label")
    if stored is not None or named:
        table: Any = named or (stored.id2label if stored is not None else {})
        return [str(table[key]) for key in sorted(table, key=int)]
    if head == "choice":
        return ["correct"]
    if not questions:
        raise UserError(f"{model.model_name_or_path}: its head is not trained; give training questions (data.train).")
    if head == "multilabel":
        return sorted({letter for question in questions for letter in question.options})
    answers = sorted({question.answer for question in questions if question.answer}, key=lambda a: (len(a), a))
    if not answers:
        raise UserError("data.train: no question has an answer, so there is no label to train.")
    return answers


def _target(question: Question, head: str, labels: list[str]) -> list[int] | None:
    """Return the row's labels: one for each option, the class, or one for each letter; None if it has none."""
    answer = question.answer
    if answer is None or (head == "label" and answer not in labels):
        return None
    if head == "choice":
        return [int(letter in answer) for letter in question.options]
    if head == "label":
        return [labels.index(answer)]
    if any(letter not in labels for letter in answer):
        return None
    return [int(letter in answer) if letter in question.options else IGNORE_INDEX for letter in labels]


def _sources(loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig) -> features.Sources[list[Ids]]:
    """Tokenise questions into one sequence each, for `choice` into one for each option, stems cut to the limit."""
    tokenizer, choice = loaded.tokenizer, _head(loaded) == "choice"
    limit = position_limit(loaded.model.config)
    if prompt.max_source_length > limit:
        raise ConfigError(
            f"prompt.max_source_length={prompt.max_source_length}: this model has {limit} positions. Set at most that."
        )

    style = prompts.resolve_style(prompt)

    def tokenize(some: list[Question]) -> list[list[Ids]]:
        if not choice:
            return [[ids] for ids in tokenizer([prompts.prompt(q, style) for q in some])["input_ids"]]
        stems = [question.stem for question in some for _ in question.options]
        options = [text for question in some for text in question.options.values()]
        flat = iter(tokenizer(stems, options)["input_ids"])
        return [[next(flat) for _ in question.options] for question in some]

    return features.fit_stems(questions, tokenize, prompt.max_source_length, _longest)


def _longest(sequences: Sequence[Ids]) -> int:
    return max(len(ids) for ids in sequences)


def position_limit(config: PreTrainedConfig) -> int:
    """Return the longest sequence in tokens: RoBERTa-like models count positions from after the padding's."""
    roberta = config.model_type in ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert")
    return int(config.max_position_embeddings) - (int(config.pad_token_id or 0) + 1 if roberta else 0)


def _inputs(loaded: Loaded, questions: Sequence[list[Ids]]) -> dict[str, torch.Tensor]:
    tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
    flat = [ids for sequences in questions for ids in sequences]
    width = _longest(flat)
    pad = int(tokenizer.pad_token_id or 0)
    batch = {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids in flat]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in flat]),
        "question": torch.tensor([i for i, sequences in enumerate(questions) for _ in sequences]),
    }
    if "token_type_ids" in tokenizer.model_input_names:
        # The second segment (the option) starts after the first separator.
        is_end = (batch["input_ids"] == tokenizer.sep_token_id) & (batch["attention_mask"] == 1)
        ends = is_end.cumsum(1) - is_end.long()
        batch["token_type_ids"] = (ends > 0).long() * batch["attention_mask"]
    return batch


def read_logits(question: Question, head: str, labels: list[str], logits: torch.Tensor) -> str:
    """Return the answer that the logits of one question mean; only letters that the question offers can be in it."""
    values = dict(zip(question.options if head == "choice" else labels, logits.tolist(), strict=True))
    single = question.kind == "single"
    legal = {
        name: value
        for name, value in values.items()
        if all(letter in question.options for letter in name) and not (single and len(name) > 1)
    }
    if not legal:
        return ""
    best = max(legal, key=lambda name: legal[name])
    if single or head == "label":
        return best
    threshold = torch.logit(torch.tensor(THRESHOLD)).item()
    return "".join(sorted({best, *(name for name, value in legal.items() if value > threshold)}))


def _head(loaded: Loaded) -> str:
    return str(loaded.model.config.cmexam_head)


def _label_list(loaded: Loaded) -> list[str]:
    table: Any = loaded.model.config.id2label
    return [table[i] for i in sorted(table)]
