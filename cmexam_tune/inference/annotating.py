"""A model proposes annotations: every question is asked once for every facet, and every output is kept."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.inference import annotations, answering, loading, usage
from cmexam_tune.inference.provenance import provenance
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.models import families


def outputs(source: loading.Source, questions: Sequence[Question], path: Path, out: Path) -> dict[str, str]:
    """Return key -> text of a model's proposals; those that are in `out` are not asked again.

    Args:
        source: the model.
        questions: what is annotated.
        path: the file they came from.
        out: what the model wrote, one line for each question and facet.

    Raises:
        ConfigError: a model that chooses among options.
        UserError: `out` holds something else.
    """
    config = source.config
    family = families.writer(config.model.family, "annotate")
    keys = [annotations.key(question, facet) for question in questions for facet in annotations.FACETS]
    remedy = "Move it away, or choose another --out."
    with ResumableFile(out, provenance(config, path, source.run), remedy=remedy) as file:
        if not file.known.issuperset(keys):
            asked = [
                annotations.asked(question, facet)
                for question in questions
                for facet in annotations.FACETS
                if annotations.key(question, facet) not in file.known
            ]
            writer = family.decoder(loading.load(source), config)
            answering.write(file, usage.counted(file, writer, _written(writer, asked)), keys, "annotate")
            file.known = frozenset(keys)
        return file.texts()


def _written(writer: Any, asked: Sequence[Any]) -> Iterator[Prediction]:
    for written in writer.write(asked):
        reason = getattr(written, "reason", None)
        yield Prediction(written.asked.question.id, written.text, finish=written.finish, reason=reason)
