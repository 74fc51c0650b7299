"""The questions of one or several files, read anew at every pass: no process holds all of CMB-train in memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from cmexam_tune.config import Config
from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.prompts.order import shuffled


@dataclass(frozen=True)
class QuestionFiles:
    """The first `limit` questions of the files that `data.<key>` names."""

    paths: tuple[str, ...]
    limit: int | None = None
    key: str = "train"
    mixture: tuple[float, ...] = ()
    """For each file how often an epoch shows its questions; empty: each question once."""
    shuffle_seed: int | None = None
    """Of the order of the options (see `shuffled`); None: as the exam prints them."""

    def __iter__(self) -> Iterator[Question]:
        """Yield the questions of all files, one file after the other; see `sourced`."""
        return (question for _, question in self.sourced())

    def sourced(self) -> Iterator[tuple[int, Question]]:
        """Read the files; every line of them is checked, also beyond the limit.

        Yields:
            The number of the file from 0, and a question of it as training shows it.

        Raises:
            DataError: a line that is no question; names file and line.
            ConfigError: two questions with one id.
        """
        seen: set[str] = set()
        for number, path in enumerate(self.paths):
            for question in jsonl.read(path, Question):
                if question.id in seen:
                    raise ConfigError(
                        f"data.{self.key}: question {question.id!r} of {path} stands in an earlier file too."
                    )
                seen.add(question.id)
                if self.limit is None or len(seen) <= self.limit:
                    yield number, question if self.shuffle_seed is None else shuffled(question, self.shuffle_seed)

    def __bool__(self) -> bool:
        return bool(self.paths)

    def checksum(self) -> str:
        """Return a checksum of what decides the questions: files, their order, limit, order of the options."""
        parts = [*(files.sha256(path) for path in self.paths), str(self.limit), str(self.shuffle_seed)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def question_files(config: Config) -> tuple[QuestionFiles, QuestionFiles]:
    """Return the training and the validation questions of a config; nothing is read yet.

    Raises:
        UserError: a file that is missing or empty, or no training file at all.
    """
    data = config.data
    if not data.train:
        raise ConfigError("data.train: name at least one questions file, as `cmexam-tune preprocess` writes them.")
    remedies = {"train": "", "validation": " `data.validation=[]` trains without validation."}
    for key, path in [("train", path) for path in data.train] + [("validation", path) for path in data.validation]:
        try:
            jsonl.check(path, f"data.{key} file")
        except UserError as error:
            raise type(error)(f"{error}{remedies[key]}") from None
    shuffle_seed = config.training.seed if data.shuffle_options else None
    return (
        QuestionFiles(data.train, data.max_train_samples, "train", data.mixture, shuffle_seed),
        # Validation keeps the exam's own order, so that its accuracy is the one that `predict` and `evaluate` give.
        QuestionFiles(data.validation, data.max_eval_samples, "validation"),
    )
