"""One file knows what kinds of accelerators there are; tried on one that torch has never heard of."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import training_kit

PACKAGE = training_kit.ROOT / "cmexam_tune"
HOME = PACKAGE / "models" / "device.py"
NAMES = re.compile(r"torch\.(cuda|npu|xpu|mps)\b|\.cuda\(|[\"'](cuda|npu|xpu|mps|nccl|hccl)\b")
FAKE = """
import os, sys
from types import SimpleNamespace
import torch
from torch.utils import backend_registration

calls = []
CARD = SimpleNamespace(
    get_device_name=lambda: "Ascend910B3", is_bf16_supported=lambda: True, mem_get_info=lambda: (60 << 30, 61 << 30),
    memory_reserved=lambda: 3 << 30, memory_allocated=lambda: 1 << 30, max_memory_reserved=lambda: 7 << 30,
    empty_cache=lambda: calls.append("emptied"), get_rng_state_all=lambda: ["state"],
    set_rng_state_all=lambda states: calls.append(states), is_available=lambda: True, device_count=lambda: 2,
    current_device=lambda: 0, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None,
)
os.environ["LOCAL_RANK"] = "1"
backend_registration._setup_privateuseone_for_python_backend("npu", CARD)
torch.distributed.Backend.register_backend("hccl", lambda *args: None, devices=["npu"])
torch.accelerator.is_available = lambda: True
torch.accelerator.set_device_index = lambda index: calls.append(index)
from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models import attention, checkpoint, device
from cmexam_tune.training import arguments, callbacks, processes

assert device.kind() == "npu" and str(device.place()) == "npu:1" and calls == [1]
assert checkpoint.dtype(ModelConfig(family="llama", model_name_or_path="x")) == torch.bfloat16
assert attention.suited("sdpa") == "sdpa" and device.shares_heads()
card = arguments.Card.here()
assert card == arguments.Card("Ascend910B3", True, True, 61 << 30, computes_4bit=False)
assert arguments.choose_precision({}, card) == {"bf16": True, "fp16": False}
assert device.backend() == "hccl" and device.summing_dtype(device.place()) == torch.float32
assert callbacks.peak_memory() == 7 << 30 and device.free_memory() == 62 << 30
device.set_rng_states(device.rng_states()); device.empty_cache()
assert calls[-2:] == [["state"], "emptied"]
try:
    checkpoint._quantised(ModelConfig(family="llama", model_name_or_path="x", load_in_4bit=True), None)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_names_an_accelerator(path: Path) -> None:
    if path != HOME:
        assert [line for line in path.read_text(encoding="utf-8").splitlines() if NAMES.search(line)] == []


def test_the_rule_finds_something() -> None:
    assert NAMES.search(HOME.read_text(encoding="utf-8"))
    for line in ("torch.cuda.empty_cache()", 'f"cuda:{rank}"', "model.cuda()", "backend = 'nccl'"):
        assert NAMES.search(line)


def test_an_accelerator_of_another_maker() -> None:
    """In a process of its own: torch takes one backend of another maker, for good."""
    done = subprocess.run([sys.executable, "-c", FAKE], env=training_kit.ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model.load_in_4bit: bitsandbytes has no kernels for this accelerator (Ascend910B3)" in done.stdout
