"""Requests of several clients answered together: those that wait at the same time and decode alike are one batch."""

import dataclasses
import queue
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from cmexam_tune.config import Config
from cmexam_tune.core import variants
from cmexam_tune.core.errors import UserError
from cmexam_tune.inference.serving.openai_protocol import settled
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.generation.items import Written
from cmexam_tune.models.generation.streaming import RowOptions
from cmexam_tune.prompts import Asked

PAUSE = 0.005
"""Seconds that the first request of a batch waits for others."""


@dataclasses.dataclass
class Waiting:
    """A request that is waiting or being answered."""

    asked: Asked
    config: Config
    options: RowOptions
    future: "Future[Written]" = dataclasses.field(default_factory=Future)
    abandoned: bool = False
    """Nobody waits any more: it is left out, and work on a batch of such requests stops."""

    def abandon(self) -> None:
        """Say that nobody waits any more."""
        self.abandoned = True
        self.future.cancel()


class Together:
    """A model and the thread that lets it answer."""

    def __init__(self, loaded: Loaded, size: int) -> None:
        """Start the thread; a batch has at most `size` requests."""
        self._loaded, self._size = loaded, size
        self._queue: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self.batches = 0
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, asked: Asked, config: Config, options: RowOptions | None = None) -> Waiting:
        """Put a request in line and return it; its `future` gives what the model writes, or a `UserError`.

        `tell` of `options` is called by the thread that answers, with what of the text so far stays whatever comes.
        """
        waiting = Waiting(asked, config, options or RowOptions())
        self._queue.put(waiting)
        return waiting

    def prompt_tokens(self, asked: Asked, config: Config) -> int:
        """Return how long a request's prompt is.

        Raises:
            UserError: the model's template has no form for it.
        """
        return len(self._decoder(config).ask([asked])[0].ids)

    def _decoder(self, config: Config) -> Any:
        family: Any = variants.load("families", config.model.family)
        return family.decoder(self._loaded, config)

    def _work(self) -> None:
        held: list[Waiting] = []
        while True:
            first = held.pop(0) if held else self._queue.get()
            time.sleep(PAUSE)
            while not self._queue.empty():
                held.append(self._queue.get())
            batch = [first, *(one for one in held if one.config == first.config)][: self._size]
            held = [one for one in held if not any(one is taken for taken in batch)]
            self._answer([one for one in batch if one.future.set_running_or_notify_cancel()])

    def _answer(self, batch: Sequence[Waiting]) -> None:
        """Answer requests that decode alike; one that cannot be answered does not stop the others."""
        if not batch:
            return
        self.batches += 1
        try:
            self._write(batch)
        except UserError as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:
                for one in batch:
                    self._answer([one])
        except Exception as error:  # noqa: BLE001 - whoever waits gets it, and the thread goes on
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)

    def _write(self, batch: Sequence[Waiting]) -> None:
        import torch

        def halted(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            return torch.full((len(ids),), all(one.abandoned for one in batch), dtype=torch.bool, device=ids.device)

        # Where it samples, nobody is to get what somebody else got before.
        anew = dataclasses.replace(batch[0].config.generation, seed=random.getrandbits(32))
        decoder = self._decoder(dataclasses.replace(batch[0].config, generation=anew))
        decoder.stopping.append(halted)
        decoder.row_options = {str(i): _settled(one.options, decoder.codec.stop) for i, one in enumerate(batch)}
        questions = [dataclasses.replace(one.asked.question, id=str(i)) for i, one in enumerate(batch)]
        asked = [dataclasses.replace(one.asked, question=q) for one, q in zip(batch, questions, strict=True)]
        for written in decoder.write(asked):
            batch[int(written.asked.question.id)].future.set_result(written)


def _settled(options: RowOptions, stops: Sequence[str]) -> RowOptions:
    """Return options that do not tell what the template's stop strings `stops` or the row's own may cut off."""
    if (tell := options.tell) is None:
        return options
    every = (*stops, *options.stop)
    return dataclasses.replace(options, tell=lambda text: tell(settled(text, every)))
