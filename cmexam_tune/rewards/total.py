"""The reward of an output: its terms, each times its weight."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cmexam_tune.config import RewardConfig
from cmexam_tune.core.schema import Question
from cmexam_tune.rewards.strict_answer import AnswerPlace
from cmexam_tune.rewards.terms import TERMS, JudgedOutput, Output

DECISIVE = "exact"
"""The term that says right or wrong: a group in which it is the same for all outputs teaches nothing."""
FADING = "partial"
"""The term that `partial_steps` is about."""


@dataclass(frozen=True)
class Reward:
    """What outputs earn under a recipe's section `reward`."""

    config: RewardConfig
    place: AnswerPlace = "end"
    """Where the prompt's style has the answer written."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term that counts, and of `exact` in any case."""
        weights = {name: float(getattr(self.config, name)) for name in TERMS}
        # `exact` is computed even where it earns nothing: it tells which groups of outputs can teach anything.
        return {name: weight for name, weight in weights.items() if weight or name == DECISIVE}

    def term(self, name: str, question: Question, output: Output | str, step: int = 0) -> float:
        """Return what one term gives, not weighted; `partial` fades from step to step."""
        value = TERMS[name](JudgedOutput.of(question, output, self.place))
        return value * self.fade(step) if name == FADING else value

    def terms(self, question: Question, output: Output | str, step: int = 0) -> dict[str, float]:
        """Return what each term that counts gives, not weighted."""
        return {name: self.term(name, question, output, step) for name in self.weights}

    def fade(self, step: int) -> float:
        """Return what is left of `partial` at a training step: 1 at first, 0 from `partial_steps` on."""
        steps = self.config.partial_steps
        return 1.0 if steps is None else max(1 - step / steps, 0.0)

    def total(self, terms: Mapping[str, float]) -> float:
        """Return the weighted sum of terms."""
        return sum(self.weights[name] * value for name, value in terms.items())

    def of(self, question: Question, outputs: Iterable[Output | str], step: int = 0) -> list[float]:
        """Return the reward of each output for a question."""
        return [self.total(self.terms(question, output, step)) for output in outputs]
