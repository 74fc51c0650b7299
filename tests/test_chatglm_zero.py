"""P-tuning of ChatGLM on two processes with DeepSpeed ZeRO-2 and ZeRO-3 gives what one process gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import torch
import zero_prefix

from cmexam_tune.families import chatglm
from cmexam_tune.models.prefix import encoder_of
from cmexam_tune.tuning import ptuning

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(("version", "stage"), [("v1", 2), ("v2", 3)])
def test_two_processes_give_the_losses_of_one(version: str, stage: int, tmp_path: Path) -> None:
    base = HERE / "golden_chatglm" / version
    wanted, model = zero_prefix.plain(base)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "zero_prefix.py"), str(base), str(stage), str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(wanted, abs=1e-4)
    assert wanted[-1] < wanted[0]
    again = ptuning.attach(chatglm.load_model(base), chatglm, ptuning.Settings(4, True, None, 0.0))
    ptuning.load(again, tmp_path)
    trained = encoder_of(model).state_dict()
    for name, value in encoder_of(again).state_dict().items():
        assert torch.allclose(value, trained[name], atol=1e-3), name
