"""From questions to lines: what is missing is answered in windows of batches and written as it comes."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cmexam_tune.core import cli, variants
from cmexam_tune.core.config import Config
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.families import Loaded
from cmexam_tune.prediction import loading
from cmexam_tune.prediction.resumable import ResumableFile

WINDOW = 64
"""Batches that are sorted by length together."""


def answer_missing(file: ResumableFile, source: loading.Source, questions: Sequence[Question]) -> None:
    """Answer the questions that the open file lacks; see `write`."""
    missing = [question for question in questions if question.id not in file.known]
    answers = answers_of(source.config, loading.load(source), missing) if missing else iter(())
    write(file, answers, [question.id for question in questions])


def answers_of(config: Config, loaded: Loaded, questions: Sequence[Question]) -> Iterator[Prediction]:
    """Answer in windows of many batches, so that the order of the file is roughly kept and lengths are still alike."""
    family: Any = variants.load("families", config.model.family)
    size = WINDOW * config.generation.batch_size
    for start in range(0, len(questions), size):
        yield from family.answer(loaded, questions[start : start + size], config)


def write(file: ResumableFile, answers: Iterable[Prediction], keys: Sequence[str]) -> None:
    """Append answers as they come, then put the file in the order of `keys`.

    The first answer is there before anything is replaced: a wrong path or setting costs no old file.

    Args:
        file: an open file.
        answers: one prediction for each key that `file.known` lacks, in any order.
        keys: all keys of the file, answered ones included.
    """
    from tqdm import tqdm

    done = sum(key in file.known for key in keys)
    if done:
        cli.note(f"{file.path}: {done} of {len(keys)} are answered already")
    answers = iter(answers)
    first = list(itertools.islice(answers, 1))
    if not first and done == len(keys):
        return
    file.begin()
    each = itertools.chain(first, answers)
    for prediction in tqdm(each, desc="predict", total=len(keys), initial=done, unit="question"):
        file.append(prediction)
    file.finish(keys)
