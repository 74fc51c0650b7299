"""Encoded questions: made in parallel, kept as Arrow tables that are mapped into memory and not read into it.

The cache's key names everything that the token rows depend on, and nothing else.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from cmexam_tune.config import Config
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import Question
from cmexam_tune.models import checkpoint
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.features import Truncation
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.data.sampler import label_count, length

PART = 4000
"""Questions that one process encodes in a row; fewer are encoded sooner than processes start."""
CHUNK = 1000
"""Questions that are tokenised in one call."""
MOST_WORKERS = 16
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, datasets.exceptions.DatasetsError)
"""What a damaged cache raises."""
OWN = ("length", "weight", "source", "truncation")
"""Columns that are added to a family's: tokens, labels (classifiers: 1), file; in a row for each chunk its report."""


class Samples(NamedTuple):
    """Encoded questions."""

    table: datasets.Dataset
    """`question_id`, `input_ids`, `labels` and what else the family's `collate` reads; one row for each question."""
    lengths: list[int]
    """Tokens of each; a question with several sequences (multiple choice) counts its longest."""
    num_targets: list[int]
    """Labels of each; 1 for classifiers."""
    sources: list[int]
    """Number of the file that each is from."""
    truncation: Truncation


def cache_key(config: Config, family: Family, loaded: Loaded, questions: QuestionFiles) -> str:
    """Return the key: tokenizer, prompt (style, template, limits), family, head, model config, questions and code."""
    digest = hashlib.sha256()
    for part in (
        checkpoint.tokenizer_hash(loaded.tokenizer),
        json.dumps(dataclasses.asdict(config.prompt), sort_keys=True),
        config.model.family,
        str(config.model.head),
        json.dumps(loaded.model.config.to_dict(), sort_keys=True, default=str),
        _code(family),
        questions.checksum(),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _code(family: Family) -> str:
    """Return a checksum of the code that turns questions into tokens, a family of a user's own included."""
    package = Path(__file__).resolve().parents[2]
    own = Path(getattr(family, "__file__", __file__)).resolve()
    sources = {
        *(package / "prompts").glob("*.py"),
        *(package / "models" / name for name in ("features.py", "causal.py")),
        package / "core" / "schema.py",
        *(Path(__file__).resolve().parent / name for name in ("encoding.py", "shuffled_options.py")),
        *(own.parent.glob("*.py") if own.name == "__init__.py" else [own]),
    }
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    for library in ("transformers", "tokenizers", "sentencepiece"):
        digest.update(metadata.version(library).encode())
    return digest.hexdigest()


def encode(config: Config, family: Family, loaded: Loaded, questions: QuestionFiles, cache: Path) -> Samples:
    """Return the encoded questions, from the cache folder where they are there already.

    Raises:
        UserError: as reading the questions.
        DataError: no question could be encoded; the message says why.
    """
    key = cache_key(config, family, loaded, questions)[:32]
    whole = (config, family, loaded, questions)
    try:
        samples = _samples(_table(whole, key, cache))
    except BROKEN:
        # Killed while it was written, a full disk that has space again, or somebody's hand.
        for folder in (cache / "generator").glob(f"*{key}*"):
            shutil.rmtree(folder)
        samples = _samples(_table(whole, key, cache))
    if not len(samples.table):
        report, prompt = samples.truncation, config.prompt
        unrenderable, too_long = len(report.unrenderable), len(report.too_long)
        raise DataError(
            f"{', '.join(questions.paths)}: none of {unrenderable + too_long} questions can be trained on with "
            f"prompt.style={prompt.style}: {unrenderable} cannot be rendered (no answer or no explanation), {too_long} "
            f"do not fit prompt.max_source_length={prompt.max_source_length} and "
            f"max_target_length={prompt.max_target_length}."
        )
    return samples


_World = tuple[Config, Family, Loaded, QuestionFiles]
_world: list[tuple[_World, int, int]] = []
"""What worker processes inherit when they are forked, so that neither model nor tokenizer has to be sent; how many
questions there are, and workers."""


def _table(world: _World, key: str, cache: Path) -> datasets.Dataset:
    ready = next((cache / "generator").glob(f"*{key}*/0.0.0/dataset_info.json"), None)
    columns, parts = (None, [(0, 0)]) if ready else _plan(world)
    workers = min(world[0].data.num_workers or os.cpu_count() or 1, MOST_WORKERS, len(parts))
    forks = "fork" in multiprocessing.get_all_start_methods()
    workers = workers if forks else 1
    _world[:] = [(world, parts[-1][1], workers)]
    try:
        with _quiet(), _tokenizers_in_one_thread(workers > 1):
            table: datasets.Dataset = datasets.Dataset.from_generator(
                _generate,
                features=columns,
                cache_dir=str(cache),
                gen_kwargs={"parts": parts},
                num_proc=workers if workers > 1 else None,
                fingerprint=key,
            )
    except datasets.exceptions.DatasetGenerationError as error:
        # The cause is a question that cannot be read; the wrapper says nothing to a user.
        raise error.__cause__ or error from None
    finally:
        _world.clear()
    return table


def _plan(world: _World) -> tuple[datasets.Features | None, list[tuple[int, int]]]:
    """Return the columns of the table, as the first question that can be encoded shows them, and the workers' parts."""
    config, family, loaded, questions = world
    chunks = iter(questions)
    columns, count = None, 0
    while chunk := list(itertools.islice(chunks, CHUNK)):
        count += len(chunk)
        if columns is None and (rows := family.encode(loaded, chunk[:64], config.prompt, config.model).rows):
            columns = datasets.Features({name: _column(value) for name, value in {**rows[0], **_own(0, 0)}.items()})
    return columns, [(start, min(start + PART, count)) for start in range(0, count, PART)]


def _column(value: Any) -> Any:
    """Return the type of a column: token ids need no more than 32 bits."""
    if isinstance(value, list | tuple):
        return datasets.List(_column(value[0]) if value else datasets.Value("int32"))
    return datasets.Value("string" if isinstance(value, str) else "int32")


def _own(tokens: int, weight: int, source: int = 0, truncation: str = "") -> dict[str, Any]:
    return dict(zip(OWN, (tokens, weight, source, truncation), strict=True))


def _generate(parts: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each question that can be encoded, and after each chunk one with the report on it."""
    (((config, family, loaded, questions), total, workers),) = _world
    # The first worker speaks for all; their parts are alike.
    with Progress("encode", "questions", total, shown=parts[0][0] == 0, patience=1) as progress:
        for start, end in parts:
            part = itertools.islice(questions.sourced(), start, end)
            while chunk := list(itertools.islice(part, CHUNK)):
                yield from _chunk(config, family, loaded, chunk)
                progress.move(min(workers * len(chunk), total - progress.done))


def _chunk(
    config: Config, family: Family, loaded: Loaded, chunk: list[tuple[int, Question]]
) -> Iterator[dict[str, Any]]:
    encoded = family.encode(loaded, [question for _, question in chunk], config.prompt, config.model)
    source = {question.id: number for number, question in chunk}
    row: Mapping[str, Any] = {"question_id": "", "input_ids": [], "labels": []}
    for row in encoded.rows:
        weight = label_count(row) if family.task == "generate" else 1
        yield {**row, **_own(length(row), weight, source[row["question_id"]])}
    report = json.dumps(dataclasses.asdict(encoded.truncation))
    yield {**{name: type(value)() for name, value in row.items()}, **_own(0, 0, 0, report)}


def _samples(table: datasets.Dataset) -> Samples:
    columns = table.select_columns([*OWN]).with_format("numpy")
    lengths, weights, sources = (np.asarray(columns[name][:]) for name in OWN[:3])
    kept = np.flatnonzero(lengths)
    reports = [json.loads(text) for text in columns.select(np.flatnonzero(lengths == 0))["truncation"][:]]
    values: list[dict[str, Any]] = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in report.items()} for report in reports
    ]
    truncation = _join([Truncation(**value) for value in values])
    table = table.select(kept).remove_columns([*OWN])
    return Samples(table, lengths[kept].tolist(), weights[kept].tolist(), sources[kept].tolist(), truncation)


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show our progress in place of that of `datasets`."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _tokenizers_in_one_thread(forked: bool) -> Iterator[None]:
    """Keep each worker's tokenizer from starting a thread for every core."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    if forked:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if forked and before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        elif forked and before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def table(truncation: Truncation, config: Config) -> str:
    """Return what the limits did, for printing before the first step."""
    lines = [
        f"questions to train on      {truncation.rows:>8}",
        f"  stem shortened           {truncation.stems_cut:>8}  (max_source_length {config.prompt.max_source_length}, "
        f"longest {truncation.longest_source})",
        f"  explanation shortened    {truncation.explanations_cut:>8}  (max_target_length "
        f"{config.prompt.max_target_length}, longest {truncation.longest_target})",
        f"skipped: too long          {len(truncation.too_long):>8}{_some(truncation.too_long)}",
        f"skipped: no explanation    {len(truncation.unrenderable):>8}{_some(truncation.unrenderable)}",
    ]
    return "\n".join(lines)


def _some(ids: Sequence[str]) -> str:
    return f"  ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})" if ids else ""
