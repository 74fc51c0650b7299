"""Whether a sealed folder is as it was sealed, and whether its scores follow from its outputs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cmexam_tune.core import documents, files, jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.evaluation.text_metrics import TEXT_SCORES
from cmexam_tune.interop.sealing import sealed_folder
from cmexam_tune.interop.sealing.sealed_folder import (
    CONFIG,
    PREDICTIONS,
    QUESTIONS,
    READINGS,
    SEAL,
    Derived,
    SealedQuestion,
    SealHeader,
)

SHOWN = 5
"""Differences of one file that are named."""
_TOLERANCE = 1e-9
"""Relative: sums of floats may be rounded otherwise on another processor."""
_OF_TEXTS = {*TEXT_SCORES, "explanations"}
"""Scores that need the explanations of the exam."""


@dataclass(frozen=True)
class Verified:
    """A sealed folder that was read and recomputed."""

    folder: Path
    problems: tuple[str, ...]
    """What is not as it was sealed, or does not reproduce; the folder can be relied on where there is none."""
    remarks: tuple[str, ...] = ()
    seal: str = ""
    head: SealHeader | None = None
    questions: tuple[SealedQuestion, ...] = ()
    metadata: PredictionMetadata = field(default_factory=PredictionMetadata)
    derived: Derived | None = None
    """What follows from the outputs; None where files cannot be read."""
    with_texts: bool = False
    """Whether the questions' texts were there, so that nothing had to be taken over."""


def verify(folder: str | Path, questions: str | Path | None = None) -> Verified:
    """Recompute a sealed folder.

    Args:
        folder: What `export --results` wrote.
        questions: The questions with their texts. Without them the readings in `readings.json` are taken over, and
            BLEU and ROUGE are not recomputed.

    Raises:
        UserError: it is no sealed folder, or the questions cannot be read. What is wrong inside is a problem.
    """
    folder = Path(folder)
    if not (folder / SEAL).is_file():
        raise UserError(f"{folder}: is no sealed folder ({SEAL} is missing). `export --results` writes one.")
    exam = None if questions is None else list(jsonl.read(questions, Question))
    try:
        return _verify(folder, exam)
    # A file that is missing, or holds anything else than was sealed, can fail wherever it is first used.
    except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        return Verified(folder, (*_checksums(folder), f"cannot be read: {error}"))


def _verify(folder: Path, exam: Sequence[Question] | None) -> Verified:
    problems, remarks = list(_checksums(folder)), []
    values = documents.read_json(folder / SEAL)
    head = jsonl.from_object(SealHeader, values, str(folder / SEAL))
    if head.format != sealed_folder.FORMAT:
        raise DataError(f"format {head.format}, this version reads {sealed_folder.FORMAT}")
    sealed = tuple(jsonl.read(folder / QUESTIONS, SealedQuestion))
    predictions = list(jsonl.read(folder / PREDICTIONS, Prediction))
    metadata = PredictionMetadata(documents.read_json(folder / CONFIG))
    readings = documents.read_json(folder / READINGS)
    if sealed_folder.digest_of(sealed) != head.questions_sha256:
        problems.append(f"{QUESTIONS}: not the questions that {SEAL} names")
    if exam is not None and head.of is not None:
        exam = exam[: len(sealed)]
    if exam is not None and (others := _other_questions(sealed, exam)):
        problems.append(others)
        exam = None
    derived = sealed_folder.derive(head, sealed, predictions, metadata, questions=exam, readings=readings)
    for name, expected in derived.documents.items():
        problems += _differences(folder, name, expected, exam is not None)
    if exam is None:
        taken = sum(map(len, derived.readings.values()))
        remarks.append(
            f"{taken:,} of {len(derived.scores) * len(sealed):,} readings follow the options' texts and were taken "
            "over, BLEU and ROUGE need the explanations: --questions FILE recomputes them too"
        )
    if problems and head.code.get("sha256") != (own := sealed_folder.code())["sha256"]:
        remarks.append(
            f"sealed by cmexam_tune {head.code.get('cmexam_tune')}, another source than this {own['cmexam_tune']}"
        )
    seal = str(values.get("seal"))
    return Verified(folder, tuple(problems), tuple(remarks), seal, head, sealed, metadata, derived, exam is not None)


def _checksums(folder: Path) -> Iterator[str]:
    """Yield what is not as `seal.json` says."""
    try:
        values = documents.read_json(folder / SEAL)
        sealed = dict(values["files"])
        if values.get("seal") != sealed_folder.seal_of(values):
            yield f"{SEAL}: changed since it was sealed"
    except (UserError, LookupError, TypeError, ValueError) as error:
        yield f"{SEAL}: cannot be read ({error})"
        return
    present = sealed_folder.contents(folder)
    for name in sorted({*sealed, *present}):
        if name not in present:
            yield f"{name}: is missing"
        elif name not in sealed:
            yield f"{name}: was not sealed"
        elif present[name].is_symlink() or not present[name].is_file():
            yield f"{name}: is no plain file"
        elif files.sha256(present[name]) != sealed[name]:
            yield f"{name}: changed since it was sealed"


def _other_questions(sealed: Sequence[SealedQuestion], exam: Sequence[Question]) -> str:
    """Return how the given questions differ from the sealed ones; empty if they are the same."""
    exam_by_id = {question.id: SealedQuestion.of(question) for question in exam}
    ids = [item.id for item in sealed]
    if list(exam_by_id) != ids:
        others = f"{len(exam_by_id):,} others or in another order"
        return f"{QUESTIONS}: {len(ids):,} were sealed, --questions holds {others}"
    wrong = [item.id for item in sealed if item != exam_by_id[item.id]]
    return f"{QUESTIONS}: {len(wrong):,} are not those of --questions: {_some(wrong)}" if wrong else ""


def _differences(folder: Path, name: str, expected: object, with_texts: bool) -> Iterator[str]:
    """Yield one line where a file does not hold what was recomputed."""
    path = folder / name
    if not path.is_file():
        yield f"{name}: is missing"
        return
    if isinstance(expected, str):
        if path.read_text(encoding="utf-8") != expected:
            yield f"{name}: is not what follows from the scores"
        return
    if isinstance(expected, list):
        stored: object = [value for _, value in jsonl.read_objects(path)]
    else:
        stored = documents.read_json(path)
    different = [
        f"{where}: {_short(old)} sealed, {_short(new)} recomputed"
        for where, old, new in _unequal(stored, expected)
        if with_texts or where.rpartition(".")[2] not in _OF_TEXTS
    ]
    if different:
        yield f"{name}: {len(different):,} values do not reproduce: {_some(different, '; ')}"


def _unequal(stored: object, computed: object, where: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (place, what the file says, what was computed) wherever the two differ."""
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        for key in [*computed, *(key for key in stored if key not in computed)]:
            yield from _unequal(stored.get(key), computed.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(stored, list) and isinstance(computed, list | tuple) and len(stored) == len(computed):
        for number, (old, new) in enumerate(zip(stored, computed, strict=True), 1):
            yield from _unequal(old, new, f"{where}[{number}]")
    elif not _same(stored, computed):
        yield where, stored, computed


def _same(stored: object, computed: object) -> bool:
    if isinstance(stored, bool) or isinstance(computed, bool):
        return stored is computed
    if isinstance(stored, int | float) and isinstance(computed, int | float):
        return math.isclose(stored, computed, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(stored == computed)


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _some(items: Sequence[str], separator: str = ", ") -> str:
    return separator.join(items[:SHOWN]) + (f"{separator}..." if len(items) > SHOWN else "")
