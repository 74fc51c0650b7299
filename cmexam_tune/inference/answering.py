"""From questions to lines: what is missing is answered in windows of batches and written as it comes."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cmexam_tune.config import Config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.progress import Progress, duration
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.inference import loading, usage
from cmexam_tune.inference.records import FAILED, ResumableFile
from cmexam_tune.models import families
from cmexam_tune.prompts import Asked, Asking

WINDOW = 64
"""Batches that are sorted by length together."""


def asking_of(config: Config, questions: Sequence[Question]) -> Asking:
    """Return how the questions of a file are put, with the pool of examples if there are to be any.

    Raises:
        UserError: no or unusable files of examples.
    """
    return Asking(config.prompt, questions, _pool(config) if config.prompt.shots else ())


def shot_files(config: Config) -> tuple[str, ...]:
    """Return the files that examples are drawn from.

    Raises:
        ConfigError: examples are wanted and no file is named.
    """
    if not config.prompt.shots:
        return ()
    files = (config.prompt.shots_from,) if config.prompt.shots_from else config.data.validation
    if not files:
        raise ConfigError(
            f"prompt.shots={config.prompt.shots}: examples come from prompt.shots_from=FILE (questions with answers, "
            "for example the exam's validation file), which is not set."
        )
    return files


def _pool(config: Config) -> Iterator[Question]:
    for file in shot_files(config):
        yield from jsonl.read(file, Question)


def answer_missing(file: ResumableFile, source: loading.Source, asking: Asking, questions: Sequence[Question]) -> None:
    """Answer the questions that the open file lacks, one line each, by one output or by the majority of several.

    Raises:
        UserError: examples that cannot be drawn, or a model or settings that cannot be used.
    """
    missing = [question for question in questions if question.id not in file.known]
    keys = [question.id for question in questions]
    if source.config.generation.votes > 1 and missing:
        _vote(file, source, asking, missing, keys)
        return
    asked = [asking.asked(question) for question in missing]
    write(file, answers(source, asking, asked, missing, file), keys)


def answers(
    source: loading.Source,
    asking: Asking,
    asked: Sequence[Asked],
    questions: Sequence[Question],
    file: ResumableFile,
) -> Iterator[Prediction]:
    """Return this process's share of the predictions, answers in the exam's letters; nothing is loaded for none.

    Args:
        source: the model.
        asking: how the questions are put.
        asked: what is asked; ids are distinct.
        questions: the question behind each of it, as the exam prints it.
        file: where the answers go; it knows who else answers, and keeps what a remote model used.
    """
    config = source.config
    mine = file.processes.share(asked, config.generation.batch_size, _work)
    if not mine:
        return iter(())
    exam = {item.question.id: question for item, question in zip(asked, questions, strict=True)}
    answerer = _answerer(source)
    if in_force := getattr(answerer, "in_force", None):  # no `isinstance`: an address needs no torch
        file.result["decoding"] = in_force()
    return (
        replace(prediction, answer=asking.restored(prediction.answer, exam[prediction.question_id]))
        for prediction in usage.counted(file, answerer, _windows(config, answerer, mine))
    )


def _work(asked: Asked) -> tuple[Any, ...]:
    """Return by what batches are put together: shared examples, then length."""
    return asked.examples, len(asked.words(asked.question))


def _answerer(source: loading.Source) -> Any:
    """Load the model and return what has a method `answer`."""
    config = source.config
    family = families.named(config.model.family)
    if isinstance(family, families.Writer):
        return family.decoder(loading.load(source), config)
    if config.prompt.shots:
        raise ConfigError(f"prompt.shots: a model of family {config.model.family} reads no examples. Leave it out.")
    loaded = loading.load(source)
    return _Chooser(lambda some: family.answer(loaded, [item.question for item in some], config))


@dataclass(frozen=True)
class _Chooser:
    """A model that chooses among options, with the method of those that write."""

    answer: Callable[[Sequence[Asked]], Iterator[Prediction]]


def _windows(config: Config, answerer: Any, asked: Sequence[Asked]) -> Iterator[Prediction]:
    """Answer in windows of many batches, so that the order of the file is roughly kept and lengths are still alike.

    A model behind an address gets all at once: it has no batches, and would stand still between windows.
    """
    size = len(asked) if config.model.is_remote else WINDOW * config.generation.batch_size
    for start in range(0, len(asked), size):
        yield from answerer.answer(asked[start : start + size])


def write(file: ResumableFile, predictions: Iterable[object], keys: Sequence[str], what: str = "predict") -> None:
    """Append predictions as they come, then put the file in the order of `keys`.

    The first one is there before anything is replaced: a wrong path or setting costs no old file.

    Args:
        file: an open file.
        predictions: this process's share of those that `file.known` lacks, in any order.
        keys: all keys of the file, answered ones included.
        what: the name of the work, for the screen.
    """
    done = sum(key in file.known for key in keys)
    if file.processes.first and 0 < done < len(keys):
        cli.note(f"{file.path}: {done} of {len(keys)} are answered already")
    if done == len(keys) and file.tidy:
        return
    started, predictions = time.monotonic(), iter(predictions)
    first = list(itertools.islice(predictions, 1))
    file.begin()
    each = itertools.chain(first, predictions)
    with Progress(what, "answers", len(keys), done) as progress:
        for prediction in each:
            file.append(prediction)
            # Of several processes the first speaks for all; their shares are alike.
            progress.move(min(file.processes.count, len(keys) - progress.done))
    file.finish(keys, len(keys) - done, time.monotonic() - started)


def _vote(
    file: ResumableFile,
    source: loading.Source,
    asking: Asking,
    questions: Sequence[Question],
    keys: Sequence[str],
) -> None:
    """Write the majority of several outputs for each question; the outputs have a file of their own until all are in.

    The key of an output is `<question>#<number>`: it seeds the sampling, and prediction goes on in the middle of a
    question.
    """
    count = source.config.generation.votes
    put = [asking.asked(question) for question in questions]
    asked = [
        replace(item, question=replace(item.question, id=f"{item.question.id}#{number}"))
        for item in put
        for number in range(count)
    ]
    behind = [question for question in questions for _ in range(count)]
    with ResumableFile(f"{file.path}.votes", file.meta, file.overwrite, file.processes) as outputs:
        left = [pair for pair in zip(asked, behind, strict=True) if pair[0].question.id not in outputs.known]
        predictions = answers(source, asking, [pair[0] for pair in left], [pair[1] for pair in left], outputs)
        write(outputs, predictions, [item.question.id for item in asked])
        file.result.update(outputs.result)
        found = {output.question_id: output for output in jsonl.read(outputs.path, Prediction)}
        groups = {question.id: [found[f"{question.id}#{number}"] for number in range(count)] for question in questions}
        file.begin()
        if file.processes.first:
            for key, group in groups.items():
                file.append(majority(key, group))
        file.finish(keys)
        if not any(output.finish == FAILED for output in found.values()):
            outputs.discard()


def majority(key: str, outputs: Sequence[Prediction]) -> Prediction:
    """Return the prediction that most outputs agree on; of equals the one seen first, as CMB counts.

    Unreadable outputs do not count; if all are, so is the answer. An output that failed fails the question.
    """
    if failed := next((output for output in outputs if output.finish == FAILED), None):
        return replace(failed, question_id=key)
    counts = Counter(output.answer for output in outputs if output.answer is not None)
    answer = counts.most_common(1)[0][0] if counts else None
    chosen = next(output for output in outputs if output.answer == answer)
    return replace(chosen, question_id=key, votes=tuple(output.text for output in outputs))


def summary(result: Mapping[str, Any]) -> str:
    """Return what a prediction came to, in a line for people."""
    text = f"{result.get('records', 0)} predictions"
    if result.get("seconds"):
        answered = result.get("answered", 0)
        text += f", {answered} answered in {duration(result['seconds'])}"
        text += f" ({answered / result['seconds']:.3g} a second)"
    if result.get("cut"):
        text += f"; {result['cut']} outputs were cut off by their limit (generation.max_new_tokens)"
    if result.get("cut_thinking"):
        text += f", {result['cut_thinking']} of them while thinking (generation.thinking_tokens)"
    if result.get("failed"):
        text += f"; {result['failed']} failed and will be asked again by the same command"
    return text
