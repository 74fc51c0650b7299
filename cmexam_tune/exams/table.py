"""Any table: `--map` says which columns hold stem, options and answer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams._cells import Reporter


def read(files: Sequence[Path], answers: Path | None = None, report: Reporter = lambda _: None) -> Iterator[Question]:
    """Refuse: without a map nothing can be read.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "table: --map is needed, for example --map stem=题干,options=A..E,answer=答案,facet:科室=科室, "
        "or --map auto, which finds columns by their names."
    )
