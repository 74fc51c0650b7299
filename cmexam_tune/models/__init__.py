"""What model families share.

In: checkpoints and questions. Out: loaded models, token rows and batches, prefixes, and answers. Start reading in
`checkpoint.py`, opening a model (`layouts.py`: one under its authors' names); `features.py` and `causal.py` make token
rows and batches of questions.

Whoever asks a decoder makes `prompts.Asked` (the question, how its words are written, earlier turns, a system text)
and calls `family.decoder(loaded, config).answer(asked)`, which yields a `Prediction` for each: `decode.py`. Its `write`
yields texts with their lengths and what ended them, for who wants no exam answer.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Loaded(NamedTuple):
    """A model and the tokenizer it was trained with."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"

    @classmethod
    def nothing(cls) -> "Loaded":
        """Return what a family loads whose model is elsewhere; never moved to a device."""
        return cls(None, None)  # type: ignore[arg-type]
