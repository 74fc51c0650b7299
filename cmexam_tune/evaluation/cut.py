"""Outputs that a limit cut off: their answers may be missing for want of room, not of knowledge."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cmexam_tune.evaluation.answer_parsing import still_thinking
from cmexam_tune.evaluation.grading import Graded


@dataclass(frozen=True)
class Cut:
    """How many outputs of a run its limit cut off."""

    outputs: int
    cut: int
    """Of the outputs, those with `finish: length`."""
    thinking: int
    """Of the cut ones, those in which `<think>` was never closed."""

    @property
    def sentence(self) -> str:
        """What the screen says."""
        return (
            f"{self.cut} of {self.outputs} outputs were cut off by their limit, {self.thinking} of them while thinking"
        )


def by_run(runs: Mapping[str, Iterable[Graded]]) -> dict[str, Cut]:
    """Return how many outputs of each run were cut off; a run of which no output says how it ended is left out."""
    found = {}
    for name, graded in runs.items():
        every = [one.prediction for one in graded]
        if any(one.finish for one in every):
            ends = [still_thinking(one.text) for one in every if one.finish == "length"]
            found[name] = Cut(len(every), len(ends), sum(ends))
    return found
