"""Asks the questions that a file has no answer to yet, and appends each record as it arrives."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from cmexam_tune.config import Config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.progress import Progress, duration
from cmexam_tune.core.schema import OrderedOutput, Prediction, Question
from cmexam_tune.inference import loading
from cmexam_tune.inference.records import FAILED, ResumableFile
from cmexam_tune.models.completion import Engine, Usage, to_prediction
from cmexam_tune.prompts import PromptBuilder, PromptRequest
from cmexam_tune.prompts.order import restored, restored_scores, several
from cmexam_tune.prompts.retrieval import Passage
from cmexam_tune.quality.passages import leaks

T = TypeVar("T")
EngineT = TypeVar("EngineT", bound=Engine)
DECODING = "decoding"
"""Key of `ResumableFile.result`: how answers were made, whatever decided it."""
SERVED = "served"
"""Key of `ResumableFile.result`: a list with what each start of the program used of a server."""
MODE = "mode"
"""Key of `ResumableFile.result`: how answers were read, where it is not what `generation.mode` means."""
SAVE_EVERY = 30.0
"""Seconds after which a server's counts are saved again, so that a kill costs few of them."""


def prompt_builder(config: Config, questions: Sequence[Question]) -> PromptBuilder:
    """Return the prompt builder for the questions of a file, with its pool of examples and its passages.

    Raises:
        UserError: no or unusable files of examples.
    """
    pool = _pool(config) if config.prompt.shots else ()
    return PromptBuilder(config.prompt, questions, pool, _passages(config, questions))


def _passages(config: Config, questions: Sequence[Question]) -> list[Passage]:
    """Return the passages of `prompt.context`.

    Raises:
        UserError: no or an unusable file, or passages that hold questions of this exam or their explanations.
    """
    context = config.prompt.context
    if context is None:
        return []
    passages = list(jsonl.read(context.passages, Passage))
    if not context.leaks and (found := list(leaks(passages, questions))):
        first = found[0]
        raise UserError(
            f"prompt.context: {len(found)} of the {len(passages)} passages in {context.passages} hold questions of "
            f"this exam or their explanations, for example {first.passage_id!r} the {first.what} of "
            f"{first.question_id!r}, and would tell the answers. `cmexam-tune check --questions FILE --passages FILE "
            "--out DIR` writes a file without them; prompt.context.leaks=true uses them all the same."
        )
    return passages


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


def run_missing(
    file: ResumableFile,
    keys: Sequence[str],
    items: Sequence[T],
    records: Callable[[EngineT, Sequence[T]], Iterable[object]],
    *,
    open_engine: Callable[[], EngineT],
    batch_size: int,
    cost: Callable[[T], object],
    name: str = "predict",
) -> None:
    """Answer what an open file lacks, append each record as it arrives, and sort the file by `keys`.

    The model is loaded only if this process has something to do, and nothing is replaced before the first record has
    arrived: a wrong path or setting costs no old file.

    Args:
        file: an open file; it knows what is there and who else answers, and keeps what a server used.
        keys: all keys of the finished file.
        items: what is missing in it.
        records: makes the records of this process's share of the items, in any order.
        open_engine: loads the model, or finds its address.
        batch_size: items that processes share out together.
        cost: sorts items by the work that they make.
        name: of the work, for the screen.

    Raises:
        UserError: a model or settings that cannot be used.
    """
    done = sum(key in file.done_ids for key in keys)
    if file.processes.first and 0 < done < len(keys):
        cli.note(f"{file.path}: {done} of {len(keys)} are done already")
    if done == len(keys) and file.joined:
        return
    started = time.monotonic()
    answers: Iterator[object] = iter(())
    queue = file.processes.queue(items, batch_size, cost)
    units = iter(queue)
    if mine := next(units, None):
        engine = open_engine()
        file.result[DECODING] = engine.effective_generation_config()
        all_mine = itertools.chain.from_iterable(records(engine, unit) for unit in itertools.chain([mine], units))
        answers = _usage_noted(file, engine.usage, all_mine)
    first = list(itertools.islice(answers, 1))
    file.start()
    with Progress(name, "answers", len(keys), done=done) as progress:
        try:
            for record in itertools.chain(first, answers):
                file.append(record)
                # Of several processes the first speaks for all.
                progress.move(done + queue.count_answer() - progress.done)
        except KeyboardInterrupt:
            if file.processes.first:
                cli.note(f"{file.path}: {progress.done} of {len(keys)} are done and kept; the same command goes on")
            raise
    file.finish(keys, len(keys) - done, time.monotonic() - started)


def _usage_noted(file: ResumableFile, usage: Usage | None, records: Iterable[T]) -> Iterator[T]:
    """Yield the records, and keep in the file's note what the server has used; a summary is printed at the end."""
    if usage is None:
        yield from records
        return
    earlier, start = list(file.result.get(SERVED, [])), time.monotonic()
    saved = start
    try:
        for record in records:
            yield record
            if usage.mode:
                file.result[MODE] = usage.mode
            file.result[SERVED] = [*earlier, {**usage.plain(), "seconds": round(time.monotonic() - start, 1)}]
            if time.monotonic() - saved > SAVE_EVERY:
                saved = time.monotonic()
                file.save_result()
    finally:
        # The first record is drawn before `start`: a failure there leaves the old note as it is.
        if usage.requests and file.started:
            file.save_result()
            cli.note(_in_a_line(usage))


def _in_a_line(usage: Usage) -> str:
    text = f"{usage.requests:,} requests, {usage.prompt_tokens:,} tokens read, {usage.completion_tokens:,} written"
    if usage.models:
        text += f", answered by {', '.join(sorted(usage.models))}"
    if usage.unseen:
        text += f"; of {usage.unseen:,} questions no letter was among the most probable tokens that the server sends"
    if usage.errors:
        text += f"; failed most often with: {usage.errors.most_common(1)[0][0]}"
    return text


def prompt_cost(request: PromptRequest) -> tuple[object, ...]:
    """Return the key by which requests are sorted into batches: shared examples first, then length."""
    return request.examples, len(request.render(request.question))


def answer_missing(
    file: ResumableFile, source: loading.Source, builder: PromptBuilder, questions: Sequence[Question]
) -> None:
    """Answer the questions that the open file lacks, one line each, by one output or by the majority of several.

    Raises:
        UserError: examples that cannot be drawn, or a model or settings that cannot be used.
    """
    repetition = repeated(source.config)
    if repetition is not None and not file.done_ids.issuperset(question.id for question in questions):
        _repeat(file, source, builder, repetition, questions)
    else:
        order = source.config.prompt.option_order
        _answer(file, source, builder, {question.id: OrderedQuestion(question, order) for question in questions})


class OrderedQuestion(NamedTuple):
    """A question, and the order of its options in which it is asked."""

    question: Question
    order: str | None


def _answer(
    file: ResumableFile, source: loading.Source, builder: PromptBuilder, questions: Mapping[str, OrderedQuestion]
) -> None:
    """Answer the questions, in the exam's letters; the key of each output may differ from its question's id."""

    def predictions(engine: Engine, requests: Sequence[PromptRequest]) -> Iterator[Prediction]:
        for prediction in map(to_prediction, engine.answer(requests)):
            asked = questions[prediction.question_id]
            yield replace(
                prediction,
                answer=restored(prediction.answer, *asked),
                probabilities=restored_scores(prediction.probabilities, *asked),
                context=tuple(passage.id for passage in builder.passages(asked.question)),
            )

    requests = []
    for key, asked in questions.items():
        if key not in file.done_ids:
            request = builder.request(*asked)
            requests.append(replace(request, question=replace(request.question, id=key)))
    run_missing(
        file,
        list(questions),
        requests,
        predictions,
        open_engine=lambda: loading.open_engine(source),
        batch_size=source.config.generation.prompts_at_once,
        cost=prompt_cost,
    )


@dataclass(frozen=True)
class Repetition:
    """Several outputs for each question that become one line."""

    name: str
    """Of the setting that asks for them; the file that holds the outputs until all are in ends with it."""
    orders: Callable[[Question], Sequence[str | None]]
    """The order of the options of each output."""
    joined: Callable[[Sequence[str | None], Sequence[Prediction]], Prediction]
    """What orders and outputs of a question, none of which failed, come to."""


def repeated(config: Config) -> Repetition | None:
    """Return how each question is asked several times, None where it is asked once."""
    generation, order = config.generation, config.prompt.option_order
    if generation.votes > 1:
        return Repetition("votes", lambda _: [order] * generation.votes, majority)
    if generation.orders > 1:
        return Repetition(
            "orders", lambda question: several(question, generation.orders, generation.seed, order), in_orders
        )
    return None


def _repeat(
    file: ResumableFile,
    source: loading.Source,
    builder: PromptBuilder,
    repetition: Repetition,
    questions: Sequence[Question],
) -> None:
    """Join several outputs for each question; the outputs have a file of their own until all are in.

    The key of an output is `<question>#<number>`: it seeds the sampling, and prediction goes on in the middle of a
    question.
    """
    missing = [question for question in questions if question.id not in file.done_ids]
    orders = {question.id: repetition.orders(question) for question in missing}
    asked = {
        f"{q.id}#{number}": OrderedQuestion(q, order) for q in missing for number, order in enumerate(orders[q.id])
    }
    with ResumableFile(f"{file.path}.{repetition.name}", file.meta, file.overwrite, file.processes) as samples:
        _answer(samples, source, builder, asked)
        file.result.update(samples.result)
        outputs = {output.question_id: output for output in jsonl.read(samples.path, Prediction)}
        file.start()
        if file.processes.first:
            for key, own in orders.items():
                file.append(joined(key, repetition, own, [outputs[f"{key}#{i}"] for i in range(len(own))]))
        file.finish([question.id for question in questions])
        # The same command asks failed outputs again, and needs the other outputs of their questions then.
        if not any(output.finish == FAILED for output in outputs.values()):
            samples.discard()


def joined(key: str, repetition: Repetition, orders: Sequence[str | None], outputs: Sequence[Prediction]) -> Prediction:
    """Return the line of a question; an output that failed fails the question."""
    failed = next((output for output in outputs if output.finish == FAILED), None)
    return replace(failed or repetition.joined(orders, outputs), question_id=key)


def in_orders(orders: Sequence[str | None], outputs: Sequence[Prediction]) -> Prediction:
    """Return the output with the options in the first order, and beside it all of them."""
    samples = zip(outputs, orders, strict=True)
    return replace(
        outputs[0], orders=tuple(OrderedOutput(output.text, order, output.probabilities) for output, order in samples)
    )


def majority(orders: Sequence[str | None], outputs: Sequence[Prediction]) -> Prediction:
    """Return the output that most outputs agree on; of equals the one seen first, as CMB counts.

    Unreadable outputs do not count; if all are, so is the answer. All were asked in the same of `orders`.
    """
    counts = Counter(output.answer for output in outputs if output.answer is not None)
    # `most_common` keeps equals in the order in which they were first counted.
    answer = counts.most_common(1)[0][0] if counts else None
    chosen = next(output for output in outputs if output.answer == answer)
    return replace(
        chosen,
        votes=tuple(output.text for output in outputs),
        votes_cut=tuple(number for number, output in enumerate(outputs) if output.finish == "length"),
    )


def summary(result: Mapping[str, Any], *, turns: bool = False) -> str:
    """Return what a prediction came to, in a line for people; with `turns` it was of conversations without letters."""
    count = result.get("records", 0)
    text = f"{count} {'turn' if turns else 'question'}{'' if count == 1 else 's'} asked"
    if result.get("seconds"):
        # Of several votes, or where failures were asked again, more outputs than questions.
        text += (
            f" in {duration(result['seconds'])} ({result.get('answered', 0) / result['seconds']:.3g} outputs a second)"
        )
    if not turns and "readable" in result:
        text += f"; {result['readable']} answer{'' if result['readable'] == 1 else 's'} readable"
    if result.get("cut"):
        text += f"; {result['cut']} outputs reached generation.max_new_tokens and were cut; raise it"
    if result.get("cut_thinking"):
        text += f", {result['cut_thinking']} of them while thinking (generation.thinking_tokens)"
    if result.get("failed"):
        text += f"; {result['failed']} failed and will be asked again by the same command"
    return text
