"""Answers of a model behind an address, in the way that `generation.mode` names."""

from collections.abc import Iterator, Sequence

from cmexam_tune.core.schema import Prediction
from cmexam_tune.models.families.endpoint import letters
from cmexam_tune.models.families.endpoint.remote import Connection, read
from cmexam_tune.prompts import Asked


class Remote(Connection):
    """A model behind an address, with the methods of `models.decode.Decoder`: `answer` and `write`."""

    def answer(self, asked: Sequence[Asked]) -> Iterator[Prediction]:
        """Yield a prediction for each question in the way that `generation.mode` names, as replies come in.

        Raises:
            UserError: wrong key, model or address; a server or style that lacks what the mode needs.
            TrainingStopped: the server fails again and again.
        """
        mode = self.config.generation.mode
        if mode == "constrained":
            yield from letters.constrained(self, asked)
        elif mode == "likelihood":
            yield from letters.likelihood(self, asked)
        else:
            for written in self.write(asked):
                yield read(written)
