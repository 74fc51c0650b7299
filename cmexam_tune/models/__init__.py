"""What model families share.

In: checkpoints and questions. Out: loaded models, token rows and batches, prefixes, and answers. Start reading in
`checkpoint.py`, opening a model; `features.py` and `causal.py` make token rows and batches of questions, `decode.py`
lets a decoder answer them.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Loaded(NamedTuple):
    """A model and the tokenizer it was trained with."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
