"""CMB-Clin: every turn of every case is answered, with what was said before it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cmexam_tune.config import Config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.inference import answering, loading
from cmexam_tune.inference.provenance import provenance
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.inference.shards import Shard, join_shards
from cmexam_tune.models.completion import Completion, TextEngine, to_prediction
from cmexam_tune.prompts import chat_template, dialogue


def predict(
    source: loading.Source,
    questions: str | Path,
    out: str | Path,
    *,
    overwrite: bool,
    limit: int | None,
    shard: Shard,
    join: bool,
) -> Path:
    """Answer the turns of a file of cases and return the predictions file, in the order of the cases.

    With `join` nothing is asked: the files that shards have written become `out`.

    Raises:
        ConfigError: a model that chooses among options, a mode that chooses letters, or a wrapper for one turn only.
        UserError: a file that cannot be used, or `out` holds predictions of something else.
    """
    cases = [case for case in list(jsonl.read(questions, Case))[:limit] if shard.holds(case.id)]
    config = _config(source.config)
    with ResumableFile(out, provenance(source.config, questions, source.run), overwrite) as file:

        def predictions(writer: TextEngine, unfinished: Sequence[Case]) -> Iterator[Prediction]:
            answer = _after_reference if config.prompt.history == "reference" else _after_own
            for completion in answer(file, writer, unfinished, _form(config.prompt.template)):
                yield to_prediction(completion, parse=False)

        if join:
            join_shards(file, {key: case.id for case in cases for key in dialogue.keys([case])})
            cli.note(answering.summary(file.result, turns=True))
            return Path(out)
        answering.run_missing(
            file,
            list(dialogue.keys(cases)),
            [case for case in cases if not file.done_ids.issuperset(dialogue.keys([case]))],
            predictions,
            open_engine=lambda: loading.open_writer(replace(source, config=config), "answer cases"),
            # The turns of one case may wait for one another, so a process answers whole cases.
            batch_size=1,
            cost=lambda case: len(case.turns),
        )
        if file.processes.first:
            cli.note(answering.summary(file.result, turns=True))
    return Path(out)


def _config(config: Config) -> Config:
    """Return the config with the form that its wrapper has for conversations.

    Raises:
        ConfigError: see `predict`.
    """
    if config.generation.mode != "generate":
        raise ConfigError(f"generation.mode={config.generation.mode}: cases are answered in words. Use generate.")
    return replace(
        config, prompt=replace(config.prompt, template=chat_template.of_conversations(config.prompt.template))
    )


def _form(template: str) -> chat_template.CaseWords:
    """Return the words of a case's first and of its later turns."""
    return chat_template.CASE if template == "auto" else chat_template.template(template).case


def _after_reference(
    file: ResumableFile, writer: TextEngine, cases: Sequence[Case], form: chat_template.CaseWords
) -> Iterator[Completion]:
    """Answer all missing turns at once, each after the reference answers to the earlier ones, as CMB does."""
    turns = [(case, number) for case in cases for number, _ in enumerate(case.turns, 1)]
    missing = [(case, number) for case, number in turns if dialogue.key(case, number) not in file.done_ids]
    return map(_stripped, writer.generate([dialogue.request(case, number, None, form) for case, number in missing]))


def _after_own(
    file: ResumableFile, writer: TextEngine, cases: Sequence[Case], form: chat_template.CaseWords
) -> Iterator[Completion]:
    """Answer turn by turn, all cases in one batch; each prompt holds the model's own answers to the earlier turns."""
    texts = file.texts()
    for number in range(1, max(len(case.turns) for case in cases) + 1):
        requests = []
        for case in cases:
            earlier = [texts.get(dialogue.key(case, turn)) for turn in range(1, number)]
            answered = [text for text in earlier if text is not None]
            # After a turn whose request failed a case waits for the next start.
            if number <= len(case.turns) and dialogue.key(case, number) not in texts and answered == earlier:
                requests.append(dialogue.request(case, number, answered, form))
        for completion in map(_stripped, writer.generate(requests)):
            if completion.finish != "error":
                texts[completion.request.question.id] = completion.text
            yield completion


def _stripped(completion: Completion) -> Completion:
    return replace(completion, text=completion.text.strip())
