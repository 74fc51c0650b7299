"""Run by torchrun from test_chatglm_zero.py: P-tuning steps of a tiny ChatGLM under DeepSpeed; rank 0 prints losses."""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from cmexam_tune.families import chatglm
from cmexam_tune.training.arguments import start_deepspeed
from cmexam_tune.tuning import ptuning

STEPS = 4


def batch(version: str) -> dict[str, Any]:
    """Four rows of equal length with labels on the last tokens."""
    torch.manual_seed(4)
    words = torch.randint(8, 78, (4, 6))
    marks = torch.tensor([[81, 84]] * 4)
    ids = torch.cat([words[:, :4], marks, words[:, 4:]], 1) if version == "v1" else torch.cat([marks, words], 1)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) < 5, -100), "use_cache": False}


def tuned(base: Path) -> Any:
    """Return the same untrained prefix on the same base in every process."""
    torch.manual_seed(1)
    model = ptuning.attach(chatglm.load_model(base), chatglm, ptuning.Settings(4, True, None, 0.0)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def plain(base: Path) -> tuple[list[float], Any]:
    """Return losses of one process without DeepSpeed, and the model."""
    model = tuned(base)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(base.name)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def main(base: Path, stage: int, out: Path) -> None:
    """Train on this rank's half of the rows, then write the adapter from gathered weights."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    start_deepspeed()
    model = tuned(base)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    rank, losses = dist.get_rank(), []
    rows = {k: v[2 * rank : 2 * rank + 2] if torch.is_tensor(v) else v for k, v in batch(base.name).items()}
    for _ in range(STEPS):
        loss = engine(**rows).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    with deepspeed.zero.GatheredParameters([p for _, p in trained], enabled=stage == 3):
        state = {name: p.detach().clone() for name, p in trained}
    if rank == 0:
        ptuning.save(engine.module, out, state)
        (out / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
