"""What is private in transformers and used by models/ and models/families/: each place, and what it relies on.

A failure here names the place to look at after an update.
"""

import ast
import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch")

from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

PACKAGE = Path(__file__).resolve().parents[1] / "cmexam_tune"
CALLED = {
    "_prepare_position_ids_for_generation": (GenerationMixin, ["self", "inputs_tensor", "model_kwargs"]),
    "_can_set_attn_implementation": (PreTrainedModel, []),
    "_from_config": (PreTrainedModel, ["config", "kwargs"]),
}
"""Private method -> who has it, its parameters; used in `models/`."""
READ = {"_attn_implementation"}
"""Private attributes; `models/prefix.py` and the ChatGLM networks."""


@pytest.mark.parametrize("name", CALLED)
def test_signatures(name: str) -> None:
    owner, parameters = CALLED[name]
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters


def test_what_a_step_of_generate_is() -> None:
    """`kv_cache.PrefillScorer` makes steps as generate does: positions, then inputs, then the forward pass."""
    source = inspect.getsource(GenerationMixin.generate)
    assert "self._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)" in source
    assert "next_sequence_length=" in inspect.getsource(GenerationMixin._prefill)
    wanted = {"next_sequence_length", "past_key_values", "attention_mask", "is_first_iteration"}
    assert wanted <= set(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)


def test_nothing_else_private_is_used() -> None:
    """Of anything but `self`, `cls` and `super()`; the ChatGLM networks are classes of transformers themselves."""
    for path in sorted(
        [*PACKAGE.glob("models/*.py"), *PACKAGE.glob("models/families/*.py"), *PACKAGE.glob("models/families/*/*.py")]
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                own = ast.unparse(node.value).startswith(("self", "cls", "super()")) or node.attr == "_replace"
                assert own or node.attr in {*CALLED, *READ}, f"{path.name}:{node.lineno}: {ast.unparse(node)}"
