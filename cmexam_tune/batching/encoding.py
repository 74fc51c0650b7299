"""Encoded questions, made in parallel and cached under a key that names everything they depend on."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cmexam_tune.core import jsonl
from cmexam_tune.core.config import Config
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.families import Family, Loaded
from cmexam_tune.models import checkpoint
from cmexam_tune.models.features import Encoded, Truncation

PARALLEL_FROM = 4000
"""Fewer questions are encoded sooner than processes start."""


def code_hash(family: Family) -> str:
    """Return a checksum of the code that may take part in turning questions into tokens, a family of yours included."""
    package = Path(__file__).resolve().parent.parent
    sources = {*package.rglob("*.py"), Path(getattr(family, "__file__", __file__)).resolve()}
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    for library in ("transformers", "tokenizers", "sentencepiece"):
        digest.update(metadata.version(library).encode())
    return digest.hexdigest()


def cache_key(config: Config, family: Family, loaded: Loaded, questions: Sequence[Question]) -> str:
    """Return the key: tokenizer, prompt (style, template, limits), family, head, model config, questions and code."""
    digest = hashlib.sha256()
    parts = [
        checkpoint.tokenizer_hash(loaded.tokenizer),
        json.dumps(dataclasses.asdict(config.prompt), sort_keys=True),
        config.model.family,
        str(config.model.head),
        json.dumps(loaded.model.config.to_dict(), sort_keys=True, default=str),
        code_hash(family),
    ]
    for part in (*parts, *map(jsonl.dumps, questions)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def encode(config: Config, family: Family, loaded: Loaded, questions: Sequence[Question], cache: Path) -> Encoded:
    """Return the training rows of `questions`, from the cache folder where they lie there already.

    Raises:
        DataError: no question could be encoded; the message says why.
    """
    path = cache / f"{cache_key(config, family, loaded, questions)[:32]}.jsonl"
    encoded = _read(path) if path.exists() else None
    if encoded is None:
        encoded = whole(config, family, loaded, questions)
        facts = {"truncation": dataclasses.asdict(encoded.truncation)}
        jsonl.write(path, [*encoded.rows, facts], overwrite=True)
    return encoded


def whole(config: Config, family: Family, loaded: Loaded, questions: Sequence[Question]) -> Encoded:
    """Return the training rows of `questions`, without a cache.

    Raises:
        DataError: no question could be encoded; the message says why.
    """
    encoded = _encode(config, family, loaded, questions)
    if not encoded.rows:
        reasons = encoded.truncation
        raise DataError(
            f"{', '.join(config.data.train)}: none of {len(questions)} questions can be trained on with "
            f"prompt.style={config.prompt.style}: {len(reasons.unrenderable)} cannot be rendered (no answer or no "
            f"explanation), {len(reasons.too_long)} do not fit prompt.max_source_length="
            f"{config.prompt.max_source_length} and max_target_length={config.prompt.max_target_length}."
        )
    return encoded


def _read(path: Path) -> Encoded | None:
    """Return what the cache holds, or None for a file that was damaged."""
    try:
        rows: list[Mapping[str, Any]] = [value for _, value in jsonl.read_objects(path)]
    except UserError:
        return None
    facts = rows.pop().get("truncation")
    if facts is None:
        return None
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    return Encoded(rows, Truncation(**values))


def _encode(config: Config, family: Family, loaded: Loaded, questions: Sequence[Question]) -> Encoded:
    workers = config.data.num_workers or os.cpu_count() or 1
    if workers < 2 or len(questions) < PARALLEL_FROM or "fork" not in multiprocessing.get_all_start_methods():
        return family.encode(loaded, questions, config.prompt, config.model)
    size = -(-len(questions) // workers)
    # Forked, so that neither model nor tokenizer has to be sent; this runs before any GPU is touched.
    _shared.update(config=config, family=family, loaded=loaded, questions=questions)
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            parts = pool.map(_part, [(start, start + size) for start in range(0, len(questions), size)])
    finally:
        _shared.clear()
    return Encoded([row for part in parts for row in part.rows], _join([part.truncation for part in parts]))


_shared: dict[str, Any] = {}


def _part(bounds: tuple[int, int]) -> Encoded:
    config: Config = _shared["config"]
    part: Encoded = _shared["family"].encode(
        _shared["loaded"], _shared["questions"][slice(*bounds)], config.prompt, config.model
    )
    return part


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


def table(truncation: Truncation, config: Config) -> str:
    """Return what the limits did, for printing before the first step."""
    lines = [
        f"questions to train on      {truncation.rows:>8}",
        f"  stem shortened           {truncation.stems_cut:>8}  (max_source_length {config.prompt.max_source_length}, "
        f"longest {truncation.longest_source})",
        f"  explanation shortened    {truncation.explanations_cut:>8}  (max_target_length "
        f"{config.prompt.max_target_length}, longest {truncation.longest_target})",
        f"skipped: too long          {len(truncation.too_long):>8}{_some(truncation.too_long)}",
        f"skipped: style cannot say  {len(truncation.unrenderable):>8}{_some(truncation.unrenderable)}",
    ]
    return "\n".join(lines)


def _some(ids: Sequence[str]) -> str:
    return f"  ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})" if ids else ""
