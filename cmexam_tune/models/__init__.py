"""Everything that loads or asks a model.

In: checkpoints and questions. Out: loaded models, token rows and batches, prefixes, and answers. `families/` are the
kinds of models that can be loaded, `adapters/` what of one can be trained, `generation/` how one writes, `engines/`
servers that compute one instead, `released/` checkpoints with code of their own; here is what these share.
Start reading in `checkpoint.py`, opening a model (`layouts.py`: one under its authors' names); `features.py` and
`causal.py` make token rows and batches of questions.

Whoever asks a model makes a `prompts.PromptRequest` (the question, how it is written, earlier turns, a system text) and
calls `family.engine(loaded, config).answer(requests)`, which yields a `Completion` for each: `completion.py`. Its
`generate` yields free text, for callers that want no exam answer; `to_prediction` makes a line of a predictions file.
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
        """Return what stands for a model that runs elsewhere; it is never moved to a device."""
        return cls(None, None)  # type: ignore[arg-type]
