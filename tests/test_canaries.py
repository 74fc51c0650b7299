"""What is private in transformers, accelerate and DeepSpeed and used all the same: each place, and what it relies on.

A failure here names the place to look at after an update of one of these libraries.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from transformers import Trainer, TrainingArguments

from cmexam_tune.training import safe_trainer
from cmexam_tune.training.trainer import ExamTrainer

TRAINING = Path(safe_trainer.__file__).parent
OVERRIDDEN = {
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
}
CALLED = {"_load_optimizer_and_scheduler": ["self", "checkpoint"]}


def source(function: Any) -> str:
    return inspect.getsource(function)


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_signatures(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == {**OVERRIDDEN, **CALLED}[name]


def test_nothing_else_is_overridden() -> None:
    classes = ExamTrainer.__mro__[: ExamTrainer.__mro__.index(Trainer)]
    private = {name for cls in classes for name in vars(cls) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in private if hasattr(Trainer, name)} == set(OVERRIDDEN)


def test_who_calls_them() -> None:
    """The Trainer still asks where this project answers."""
    assert "self._save_checkpoint(model, trial)" in source(Trainer._maybe_log_save_evaluate)
    assert "self._load_from_checkpoint(resume_from_checkpoint)" in source(Trainer.train)
    assert "self._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)" in source(
        Trainer._inner_training_loop
    )
    loop = source(Trainer._run_epoch)
    assert loop.index("self.training_step(") < loop.index("self._get_grad_norm(") < loop.index("self.optimizer.step()")
    assert "self.args.output_dir" in source(Trainer._get_output_dir), "checkpoints follow args.output_dir"
    assert "self.get_batch_samples(epoch_iterator" in loop


def test_deepspeed_saves_through_the_engine() -> None:
    assert "self.model_wrapped.save_checkpoint(output_dir" in source(Trainer._save_optimizer_and_scheduler)
    assert "exclude_frozen_parameters" in source(Trainer._save_optimizer_and_scheduler)
    engine = pytest.importorskip("deepspeed").DeepSpeedEngine
    assert {"save_dir", "exclude_frozen_parameters"} <= inspect.signature(engine.save_checkpoint).parameters.keys()
    assert {"load_dir", "load_module_strict"} <= inspect.signature(engine.load_checkpoint).parameters.keys()
    assert "def backward(self, loss, retain_graph=False, scale_wrt_gas=True)" in source(inspect.getmodule(engine))
    assert list(inspect.signature(engine.set_gradient_accumulation_boundary).parameters) == ["self", "is_boundary"]


def test_private_attributes() -> None:
    ops = pytest.importorskip("deepspeed").ops
    assert isinstance(ops.__compatible_ops__, dict)
    assert "deepspeed_shm_comm" in ops.__compatible_ops__
    assert "self._n_gpu" in source(TrainingArguments.n_gpu.fget)


def test_no_other_file_of_training_looks_inside() -> None:
    """Private attributes of anything but `self` (`cls`, `super()`) stand in `safe_trainer.py` only, but for two."""
    allowed = {("arguments.py", "arguments", "_n_gpu"), ("policy_trainer.py", "trainer", "_generate_single_turn")}
    for path in TRAINING.rglob("*.py"):
        if path.name == "safe_trainer.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = ast.unparse(node.value)
                inside = owner.startswith(("self", "cls", "super")) or (path.name, owner, node.attr) in allowed
                assert inside, f"{path.name}:{node.lineno}: {owner}.{node.attr}"


def test_what_is_private_in_trl() -> None:
    """What `trl_trainer.py`, `policy_trainer.py` and `preference_trainer.py` override or read in TRL's trainers."""
    trl = pytest.importorskip("trl")
    grpo, dpo = trl.GRPOTrainer, trl.DPOTrainer
    assert {"_send_telemetry", "create_model_card"} <= {name for cls in grpo.__mro__ for name in vars(cls)}
    signatures = {
        grpo._generate_and_score_completions: ["self", "inputs"],
        grpo._generate_single_turn: [
            "self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images",
        ],
        dpo._prepare_dataset: ["self", "dataset", "processing_class", "args", "dataset_name"],
    }  # fmt: skip
    for function, names in signatures.items():
        assert list(inspect.signature(function).parameters) == names
    scoring = source(grpo._generate_and_score_completions)
    assert 'self._logs["rewards"][name].extend(rewards_per_func[:, i].tolist())' in scoring, "gathered, group by group"
    assert '"advantages": advantages' in scoring and '"completion_mask": completion_mask' in scoring
    assert "self.rollout_func(prompts, self)" in source(grpo._generate)
    assert 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}' in source(grpo._generate)
    assert "if self.use_vllm and self.state.global_step != self._last_loaded_step:" in source(grpo._generate)
    assert "self.vllm_generation.sync_weights()" in source(grpo._generate)
    assert 'model.add_adapter("ref", default_config)' in source(grpo.__init__)
    assert '"ref" if "ref" in' in source(dpo.compute_ref_log_probs), "without the copy the base is the reference"
    assert '"prompt_ids"' in source(dpo._set_signature_columns_if_needed)
