"""What the host does for each token that is written: looking for stop texts, and ChatGLM-6B's positions.

Both ways of each in one run, so that the ratio holds on a busy machine too: decoding the end of all rows and finding
the positions of whole rows for every token, and what prediction does now. On the CPU, whose time it is.

    python benchmarks/stopping.py --json stopping.json
"""

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path

import torch
from transformers import DynamicCache

from cmexam_tune import tiny
from cmexam_tune.config import ModelConfig
from cmexam_tune.models.families import Family
from cmexam_tune.models.families.chatglm.modeling_v1 import PrefixLMRows
from cmexam_tune.models.generation import sampling

BATCHES = (16, 64, 128)
WRITTEN = 128
"""Tokens of each row that are there already."""
STOPS = ("\n问：", "\n[Round")
TEXT = "患者上腹痛三年，餐后缓解，最可能的诊断是胃溃疡。因为疼痛有规律，所以先做胃镜检查，再决定治疗。"


def decode_all(tokenizer, ids, tail):
    """Look for stop texts in the end of every row, as it was done."""
    texts = tokenizer.batch_decode(ids[:, -tail:], skip_special_tokens=True)
    return torch.tensor([sampling.first_stop(text, STOPS) is not None for text in texts])


def microseconds(work, steps):
    """The median time of a call of `work(step)`."""
    work(0)
    seconds = []
    for step in range(steps):
        started = time.perf_counter()
        work(step)
        seconds.append(time.perf_counter() - started)
    return 1e6 * sorted(seconds)[len(seconds) // 2]


def stop_texts(tokenizer, batch, steps):
    """Microseconds a token of both ways; rows write an ordinary text, each from another place."""
    words = tokenizer(TEXT * 20, add_special_tokens=False)["input_ids"]
    rng = random.Random(0)
    starts = [rng.randrange(len(words) // 2) for _ in range(batch)]
    rows = torch.tensor([words[start : start + WRITTEN + steps] for start in starts])
    criterion = sampling.StopText(tokenizer, [STOPS] * batch, 0)
    before = microseconds(lambda step: decode_all(tokenizer, rows[:, : WRITTEN + step], criterion.tail), steps)
    after = microseconds(lambda step: criterion(rows[:, : WRITTEN + step], None), steps)
    return before, after


def positions(model, batch, steps):
    """Microseconds a token of both ways, with what transformers itself does for a step taken away."""
    gmask, sop = model.config.gmask_token_id, model.config.bos_token_id
    ids = torch.tensor([[9] * 200 + [gmask, sop] + [11] * (WRITTEN + steps)] * batch)
    mask, width = torch.ones_like(ids), 202
    cache = DynamicCache()
    states = torch.zeros(batch, 1, width, 4)
    model.prepare_inputs_for_generation(ids[:, :width], attention_mask=mask[:, :width], past_key_values=cache)
    cache.update(states, states, 0)

    def count_on(step):
        end = width + WRITTEN + step
        given = {"attention_mask": mask[:, :end], "past_key_values": cache, "next_sequence_length": 1}
        return model.prepare_inputs_for_generation(ids[:, :end], **given)["position_ids"]

    def whole_rows(step):
        end = width + WRITTEN + step
        return PrefixLMRows(model.config, ids[:, :end], mask[:, :end].bool()).positions()[..., -1:]

    assert torch.equal(count_on(5), whole_rows(5))
    return microseconds(whole_rows, steps), microseconds(count_on, steps)


def main():
    """Measure all batches and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--steps", type=int, default=200, help="tokens that are timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    print("| what | batch | before, us a token | now | ratio |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig(family="chatglm", model_name_or_path=str(tiny.build("chatglm", Path(folder) / "chatglm")))
        loaded = Family.named("chatglm").load(config)
        for batch in BATCHES:
            for name, (before, after) in {
                "stop texts": stop_texts(loaded.tokenizer, batch, arguments.steps),
                "positions of ChatGLM-6B": positions(loaded.model, batch, arguments.steps),
            }.items():
                figures[f"{name}, batch {batch}"] = {"before": before, "now": after, "ratio": before / after}
                print(f"| {name} | {batch} | {before:.0f} | {after:.0f} | {before / after:.1f} |", flush=True)
    if arguments.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps({"microseconds": figures, **machine}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
