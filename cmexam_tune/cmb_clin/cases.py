"""CMB-Clin: every turn of every case is answered, with what was said before it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cmexam_tune.config import Config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.inference import answering, loading, usage
from cmexam_tune.inference.provenance import provenance
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.models import families
from cmexam_tune.prompts import chat_template, dialogue


def predict(source: loading.Source, questions: str | Path, out: str | Path, overwrite: bool, limit: int | None) -> Path:
    """Answer the turns of a file of cases and return the predictions file, in the order of the cases.

    Raises:
        ConfigError: a model that chooses among options, a mode that chooses letters, or a wrapper for one turn only.
        UserError: a file that cannot be used, or `out` holds predictions of something else.
    """
    every = list(jsonl.read(questions, Case))[:limit]
    config = _config(source.config)
    keys = list(dialogue.keys(every))
    with ResumableFile(out, provenance(source.config, questions, source.run), overwrite) as file:
        # The turns of one case may wait for one another, so a process answers whole cases.
        cases = file.processes.share(every, 1, lambda case: len(case.turns))
        answers: Iterator[Prediction] = iter(())
        if not file.known.issuperset(dialogue.keys(cases)):
            writer = families.writer(config.model.family, "answer cases").decoder(loading.load(source), config)
            answers = usage.counted(file, writer, _answers(file, writer, config, cases))
        answering.write(file, answers, keys)
        if file.processes.first:
            cli.note(answering.summary(file.result))
    return Path(out)


def _config(config: Config) -> Config:
    """Return the config with the form that its wrapper has for conversations.

    Raises:
        ConfigError: see `predict`.
    """
    families.writer(config.model.family, "answer cases")
    if config.generation.mode != "generate":
        raise ConfigError(f"generation.mode={config.generation.mode}: cases are answered in words. Use generate.")
    return replace(
        config, prompt=replace(config.prompt, template=chat_template.of_conversations(config.prompt.template))
    )


def _answers(file: ResumableFile, writer: Any, config: Config, cases: Sequence[Case]) -> Iterator[Prediction]:
    """Answer all turns at once, or with the model's own answers in the history one turn of all cases after another."""
    name = config.prompt.template
    form = chat_template.CASE if name == "auto" else chat_template.template(name).case
    if config.prompt.history == "reference":
        every = [(case, number) for case in cases for number, _ in enumerate(case.turns, 1)]
        missing = [(case, number) for case, number in every if dialogue.key(case, number) not in file.known]
        yield from _written(writer, [dialogue.asked(case, number, None, form) for case, number in missing])
        return
    own = file.texts()
    for number in range(1, max(len(case.turns) for case in cases) + 1):
        asked = []
        for case in cases:
            answered = [own.get(dialogue.key(case, earlier)) for earlier in range(1, number)]
            there = [text for text in answered if text is not None]
            # After a turn whose request failed a case waits for the next start.
            if number <= len(case.turns) and dialogue.key(case, number) not in own and len(there) == len(answered):
                asked.append(dialogue.asked(case, number, there, form))
        for prediction in _written(writer, asked):
            if prediction.finish != "error":
                own[prediction.question_id] = prediction.text
            yield prediction


def _written(writer: Any, asked: Sequence[Any]) -> Iterator[Prediction]:
    if not asked:
        return
    for written in writer.write(asked):
        reason = getattr(written, "reason", None)
        yield Prediction(written.asked.question.id, written.text.strip(), finish=written.finish, reason=reason)
