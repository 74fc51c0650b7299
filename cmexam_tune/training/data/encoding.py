"""Questions into token rows: made in parallel, kept as Arrow files that are mapped into memory and not read into it.

The cache's key names everything that the token rows depend on, and nothing else.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np

from cmexam_tune import prompts
from cmexam_tune.config import ModelConfig, PromptConfig
from cmexam_tune.core import files, jsonl, schema
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.progress import Progress
from cmexam_tune.models import causal, checkpoint, features
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.features import IGNORE_INDEX, Truncation
from cmexam_tune.training.data.batches import EncodedQuestions, Sample
from cmexam_tune.training.data.questions import QuestionFiles

PART = 4000
"""Questions in one file of the cache, which one process encodes; fewer are encoded sooner than a process starts."""
CHUNK = 1000
"""Questions that are tokenised in one call."""
MAX_WORKERS = 16
MANIFEST = "encoded.json"
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, datasets.exceptions.DatasetsError)
"""What a cache that is not there or damaged raises."""
COLUMNS = ("length", "num_targets", "source")
"""Added to a family's columns: tokens, labels (classifiers: 1), number of the file."""


@dataclass(frozen=True)
class CacheManifest:
    """What encoded.json in a cache folder says; written last."""

    parts: int
    """Folders with at least one row."""
    rows: int
    truncation: Truncation


@dataclass(frozen=True)
class Encoder:
    """Turns questions into token rows, or finds them in the cache."""

    prompt: PromptConfig
    model: ModelConfig
    family: Family
    loaded: Loaded
    cache: Path
    num_workers: int | None = None
    """Processes that encode; None: as many as there are cores."""

    def encode(self, questions: QuestionFiles) -> EncodedQuestions:
        """Return the encoded questions, from the cache folder where they are there already.

        Raises:
            UserError: as reading the questions.
            DataError: no question could be encoded; the message says why.
        """
        folder = self.cache / self.key(questions)[:32]
        encoded = None
        with contextlib.suppress(*BROKEN):
            encoded = self._open(folder)
        if encoded is None:
            # Not there, or damaged: a full disk that has space again, or somebody's hand.
            shutil.rmtree(folder, ignore_errors=True)
            self._write(folder, questions)
            encoded = self._open(folder)
        if not len(encoded):
            skipped, prompt = encoded.truncation, self.prompt
            unrenderable, too_long = len(skipped.unrenderable), len(skipped.too_long)
            raise DataError(
                f"{', '.join(questions.paths)}: none of {unrenderable + too_long} questions can be trained on with "
                f"prompt.style={prompt.style}: {unrenderable} cannot be rendered (no answer or no explanation), "
                f"{too_long} do not fit prompt.max_source_length={prompt.max_source_length} and "
                f"max_target_length={prompt.max_target_length}."
            )
        return encoded

    def key(self, questions: QuestionFiles) -> str:
        """Return what names the cache: tokenizer, prompt, family, head, model config, questions, and code."""
        digest = hashlib.sha256()
        for part in (
            checkpoint.tokenizer_hash(self.loaded.tokenizer),
            json.dumps(dataclasses.asdict(self.prompt), sort_keys=True),
            self.model.family,
            str(self.model.head),
            json.dumps(self.loaded.model.config.to_dict(), sort_keys=True, default=str),
            _code_checksum(self.family),
            questions.checksum(),
        ):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()

    def _open(self, folder: Path) -> EncodedQuestions:
        manifest = jsonl.read_one(folder / MANIFEST, CacheManifest, "list of encoded questions")
        parts = [datasets.load_from_disk(str(path)) for path in sorted(folder.glob("part-*"))]
        table = datasets.concatenate_datasets(parts) if parts else datasets.Dataset.from_dict({c: [] for c in COLUMNS})
        if (len(parts), len(table)) != (manifest.parts, manifest.rows):
            raise ValueError(f"{folder}: {len(parts)} of {manifest.parts} parts, {len(table)} of {manifest.rows} rows")
        columns = table.select_columns([*COLUMNS]).with_format("numpy")
        lengths, num_targets, sources = (np.asarray(columns[name][:]).tolist() for name in COLUMNS)
        collate = functools.partial(self.family.collate, self.loaded)
        return EncodedQuestions(
            table.remove_columns([*COLUMNS]), lengths, num_targets, sources, manifest.truncation, collate
        )

    def _write(self, folder: Path, questions: QuestionFiles) -> None:
        # Every line is checked before a process starts.
        count = sum(1 for _ in questions)
        parts = [range(start, min(start + PART, count)) for start in range(0, count, PART)]
        workers = min(self.num_workers or os.cpu_count() or 1, MAX_WORKERS, len(parts))
        with files.parents_of(folder), files.part_of(folder, folder=True) as staged, _without_progress_bars():
            encode_part = functools.partial(self._write_part, staged, questions)
            reports = []
            with Progress("encode", "questions", count, patience=1) as progress:
                for part, report in zip(parts, _fork_map(encode_part, parts, workers), strict=True):
                    reports.append(report)
                    progress.move(len(part))
            folders = len([*staged.glob("part-*")])
            manifest = CacheManifest(
                folders, sum(rows for rows, _ in reports), _join([report for _, report in reports])
            )
            (staged / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest)), encoding="utf-8")
            with contextlib.suppress(OSError):  # another training has made the same meanwhile
                staged.rename(folder)

    def _write_part(self, folder: Path, questions: QuestionFiles, part: range) -> tuple[int, Truncation]:
        """Encode the questions of a part; return how many have a row, and what the limits did."""
        tables: list[datasets.Dataset] = []
        reports: list[Truncation] = []
        sourced = itertools.islice(questions.sourced(), part.start, part.stop)
        while chunk := list(itertools.islice(sourced, CHUNK)):
            encoded = self.family.encode(self.loaded, [question for _, question in chunk], self.prompt, self.model)
            reports.append(encoded.truncation)
            source = {question.id: number for number, question in chunk}
            rows = [
                {
                    **row,
                    "length": length(row),
                    "num_targets": label_count(row) if self.family.task == "generate" else 1,
                    "source": source[row["question_id"]],
                }
                for row in encoded.rows
            ]
            if rows:
                columns = datasets.Features({name: _column_type(value) for name, value in rows[0].items()})
                tables.append(datasets.Dataset.from_list(rows, features=columns))
        if tables:
            datasets.concatenate_datasets(tables).save_to_disk(str(folder / f"part-{part.start:09}"))
        return sum(map(len, tables)), _join(reports)


def _code_checksum(family: Family) -> str:
    """Return a checksum of the code that turns questions into tokens, a family of a user's own included."""
    family_file = Path(inspect.getfile(type(family))).resolve()
    sources = {
        *Path(prompts.__file__).parent.glob("*.py"),
        *(Path(str(module.__file__)) for module in (schema, features, causal)),
        Path(__file__),
        *(family_file.parent.glob("*.py") if family_file.name == "__init__.py" else [family_file]),
    }
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    for library in ("transformers", "tokenizers", "sentencepiece"):
        digest.update(metadata.version(library).encode())
    return digest.hexdigest()


def length(sample: Sample) -> int:
    """Return the tokens of a question; one with several sequences (multiple choice) counts its longest."""
    ids = sample["input_ids"]
    return max((len(item) for item in ids), default=0) if ids and isinstance(ids[0], Sequence) else len(ids)


def label_count(sample: Sample) -> int:
    """Return how many positions of a decoder's question carry a loss; nothing predicts the first position."""
    return sum(label != IGNORE_INDEX for label in sample["labels"][1:])


def _column_type(value: object) -> Any:
    """Return the type of a column: token ids need no more than 32 bits."""
    if isinstance(value, list | tuple):
        return datasets.List(_column_type(value[0]) if value else datasets.Value("int32"))
    return datasets.Value("string" if isinstance(value, str) else "int32")


def _join(parts: Sequence[Truncation]) -> Truncation:
    """Add up counts, join lists of ids, and keep the greatest lengths."""
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(Truncation):
        values = [getattr(part, field.name) for part in parts]
        if field.name.startswith("longest"):
            joined[field.name] = max(values)
        elif isinstance(values[0], tuple):
            joined[field.name] = tuple(item for value in values for item in value)
        else:
            joined[field.name] = sum(values)
    return Truncation(**joined)


# Processes

In = TypeVar("In")
Out = TypeVar("Out")


def _fork_map(function: Callable[[In], Out], items: Sequence[In], workers: int) -> Iterator[Out]:
    """Yield `function(item)` of each item in order, from forked processes where there are several workers.

    A forked process has whatever `function` holds (model, tokenizer) without its being sent.
    """
    if workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(function, items)
        return
    fork = multiprocessing.get_context("fork")
    with (
        _tokenizers_in_one_thread(),
        concurrent.futures.ProcessPoolExecutor(workers, fork, initializer=_inherit, initargs=(function,)) as pool,
    ):
        yield from pool.map(_call_inherited, items)


_inherited: Callable[[Any], Any]
"""In a worker process of `_fork_map`: its function. Nowhere else is it set."""


def _inherit(function: Callable[[Any], Any]) -> None:
    global _inherited
    _inherited = function


def _call_inherited(item: object) -> Any:
    return _inherited(item)


@contextlib.contextmanager
def _tokenizers_in_one_thread() -> Iterator[None]:
    """Keep each worker's tokenizer from starting a thread for every core."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Show our progress in place of that of `datasets`."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def truncation_table(truncation: Truncation, prompt: PromptConfig) -> str:
    """Return what the limits did, for printing before the first step."""
    lines = [
        f"questions to train on      {truncation.rows:>8}",
        f"  stem shortened           {truncation.stems_cut:>8}  (max_source_length {prompt.max_source_length}, "
        f"longest {truncation.longest_source})",
        f"  explanation shortened    {truncation.explanations_cut:>8}  (max_target_length "
        f"{prompt.max_target_length}, longest {truncation.longest_target})",
        f"skipped: too long          {len(truncation.too_long):>8}{_some(truncation.too_long)}",
        f"skipped: no explanation    {len(truncation.unrenderable):>8}{_some(truncation.unrenderable)}",
    ]
    return "\n".join(lines)


def _some(ids: Sequence[str]) -> str:
    return f"  ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})" if ids else ""
