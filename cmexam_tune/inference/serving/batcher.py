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
from cmexam_tune.core.errors import UserError
from cmexam_tune.evaluation.answer_parsing import HALF
from cmexam_tune.models import families
from cmexam_tune.models.completion import Completion
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.generation.streaming import RowOptions
from cmexam_tune.prompts import PromptRequest

PAUSE = 0.005
"""Seconds that the first request of a batch waits for others."""


@dataclasses.dataclass
class Pending:
    """A request that is waiting or being answered."""

    request: PromptRequest
    config: Config
    options: RowOptions
    future: "Future[Completion]" = dataclasses.field(default_factory=Future)
    abandoned: bool = False
    """Nobody waits any more: it is left out, and work on a batch of such requests stops."""

    def abandon(self) -> None:
        """Say that nobody waits any more."""
        self.abandoned = True
        self.future.cancel()


class DynamicBatcher:
    """A model and the thread that answers requests with it, several in a batch."""

    def __init__(self, loaded: Loaded, size: int) -> None:
        """Start the thread; a batch has at most `size` requests."""
        self._loaded, self._size = loaded, size
        self._queue: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        self.batches = 0
        # A daemon thread does not keep a server alive that has been told to stop.
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: PromptRequest, config: Config, options: RowOptions | None = None) -> Pending:
        """Queue a request and return it; its `future` yields the completion or raises a `UserError`.

        `options.tell` is called in the batcher's thread with the part of the text so far that can no longer change.
        """
        pending = Pending(request, config, options or RowOptions())
        self._queue.put(pending)
        return pending

    def prompt_tokens(self, request: PromptRequest, config: Config) -> int:
        """Return how long a request's prompt is.

        Raises:
            UserError: the model's template has no form for it.
        """
        return len(self._decoder(config).ask([request])[0].row)

    def _decoder(self, config: Config) -> Any:
        return families.writer(config.model.family, "serve").engine(self._loaded, config)

    def _work(self) -> None:
        waiting: list[Pending] = []
        while True:
            first = waiting.pop(0) if waiting else self._queue.get()
            time.sleep(PAUSE)
            while not self._queue.empty():
                waiting.append(self._queue.get())
            batch = [first, *(pending for pending in waiting if pending.config == first.config)][: self._size]
            waiting = [pending for pending in waiting if not any(pending is taken for taken in batch)]
            # A request cancelled in the queue returns False here. A running future can no longer be cancelled, so
            # after this only `abandoned` says that its client has left.
            self._answer([pending for pending in batch if pending.future.set_running_or_notify_cancel()])

    def _answer(self, batch: Sequence[Pending]) -> None:
        """Answer requests that decode alike; one that cannot be answered does not stop the others."""
        if not batch:
            return
        self.batches += 1
        try:
            self._write(batch)
        except UserError as error:
            for pending in [pending for pending in batch if not pending.future.done()]:
                if len(batch) == 1:
                    pending.future.set_exception(error)
                else:
                    self._answer([pending])
        except Exception as error:  # noqa: BLE001 - whoever waits gets it, and the thread goes on
            for pending in batch:
                if not pending.future.done():
                    pending.future.set_exception(error)

    def _write(self, batch: Sequence[Pending]) -> None:
        import torch

        def halted(ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            nobody = all(pending.abandoned for pending in batch)
            return torch.full((len(ids),), nobody, dtype=torch.bool, device=ids.device)

        # Where it samples, nobody is to get what somebody else got before.
        generation = dataclasses.replace(batch[0].config.generation, seed=random.getrandbits(32))
        decoder = self._decoder(dataclasses.replace(batch[0].config, generation=generation))
        decoder.stopping.append(halted)
        decoder.row_options = {}
        requests = []
        for row, pending in enumerate(batch):
            # Ids of requests need not be distinct; places in the batch are.
            question = dataclasses.replace(pending.request.question, id=str(row))
            requests.append(dataclasses.replace(pending.request, question=question))
            decoder.row_options[question.id] = _held_back(pending.options, decoder.stops)
        for completion in decoder.generate(requests):
            batch[int(completion.request.question.id)].future.set_result(completion)


def _held_back(options: RowOptions, stops: Sequence[str]) -> RowOptions:
    """Return options whose `tell` holds back text that a stop string, the template's or the row's, may cut off."""
    if (tell := options.tell) is None:
        return options
    ends = (*stops, *options.stop)
    return dataclasses.replace(options, tell=lambda text: tell(settled(text, ends)))


def settled(text: str, stops: Sequence[str]) -> str:
    """Return the part of an unfinished text that later tokens cannot change or cut off.

    Incomplete characters and possible beginnings of a stop string at its end are held back.
    """
    if ends := [place for stop in stops if (place := text.find(stop)) >= 0]:
        return text[: min(ends)]
    text = text.rstrip(HALF)
    held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - held]
