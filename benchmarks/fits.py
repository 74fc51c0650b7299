"""Which model fits which card: `train --dry-run` for pairs that people own, as the Markdown table of docs/install.md.

Where the recipe as it is does not fit, the settings are added one after the other until it does. Models have the
published sizes, no weights; every question fills the recipe's limits of tokens. Nothing is downloaded.

    python benchmarks/fits.py
"""

import contextlib
import dataclasses
import io
import json
import tempfile
from pathlib import Path

import torch
from gpu import CHATGLM_6B, LLAMA_7B

from cmexam_tune import tiny
from cmexam_tune.config import load_config
from cmexam_tune.core import jsonl, schema
from cmexam_tune.training import arguments, estimate
from cmexam_tune.training.data.batches import TrainingData
from cmexam_tune.training.data.encoding import Encoder
from cmexam_tune.training.data.questions import question_files
from cmexam_tune.training.run_directory import run

LLAMA_13B = {
    **LLAMA_7B, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40,
}  # fmt: skip
# Of Qwen/Qwen2.5-7B and Qwen2.5-14B's config.json.
QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_14B = {
    **QWEN_7B, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8,
}  # fmt: skip
EXPLAIN = "prompt.style=answer_explain"
FULL = ("tuning={method: full}", "training.learning_rate=2e-5")
PAIRS = (
    ("ChatGLM-6B", "P-tuning, letters", "ptuning_chatglm.yaml", "chatglm", CHATGLM_6B, (), "V100-16GB"),
    ("ChatGLM-6B", "P-tuning, explanations", "ptuning_chatglm.yaml", "chatglm", CHATGLM_6B, (EXPLAIN,), "V100-16GB"),
    ("LLaMA-7B", "LoRA", "lora_llama.yaml", "llama", LLAMA_7B, (), "V100-16GB"),
    ("LLaMA-7B", "LoRA", "lora_llama.yaml", "llama", LLAMA_7B, (), "V100-32GB"),
    ("Qwen2.5-7B", "LoRA", "lora_qwen.yaml", "qwen", QWEN_7B, (), "3090"),
    ("LLaMA-13B", "LoRA", "lora_llama.yaml", "llama", LLAMA_13B, (), "4090"),
    ("LLaMA-13B", "LoRA", "lora_llama.yaml", "llama", LLAMA_13B, (), "A100-40GB"),
    ("Qwen2.5-7B", "full", "lora_qwen.yaml", "qwen", QWEN_7B, FULL, "A100-80GB"),
    ("Qwen2.5-14B", "LoRA", "lora_qwen.yaml", "qwen", QWEN_14B, (), "H100"),
    ("Qwen2.5-14B", "LoRA", "lora_qwen.yaml", "qwen", QWEN_14B, (), "910B"),
)
CARDS = 8
"""Of a machine, where one is not enough."""


def attempts(config, card):
    """Settings and number of cards, from the recipe as it is to what needs least."""
    yield (), 1
    given = ("training.gradient_checkpointing=true",)
    if not estimate.recomputes(config):
        yield given, 1
    micro = config.training.micro_batch
    while (micro := micro // 2) >= 1:
        given = ("training.gradient_checkpointing=true", f"training.per_device_train_batch_size={micro}")
        yield given, 1
    family, method = run.parts(config)
    if method.trains_beside_4bit and family.loads_in_4bit and card.computes_4bit:
        yield (given[0], "model.load_in_4bit=true"), 1
    yield (given[0], "training.deepspeed=zero3"), CARDS
    yield (given[0], "training.deepspeed=zero3_offload"), CARDS


def row(folder, pair):
    """A line of the table."""
    name, method, recipe, kind, shape, overrides, card_name = pair
    card = arguments.Card.named(card_name)
    if kind == "qwen":  # its config makes lists from its sizes when it is read
        file = folder / kind / "config.json"
        values = json.loads(file.read_text(encoding="utf-8")) | shape
        values.pop("layer_types", None)
        file.write_text(json.dumps(values), encoding="utf-8")
        shape = {}
    common = [
        f"data.train=[{folder / 'questions.jsonl'}]", "data.validation=[]", "data.test=[]", "data.num_workers=1",
        f"model.model_name_or_path={folder / kind}", f"model.dtype={'bfloat16' if card.bf16 else 'float16'}",
        *(f"model.config.{key}={value}" for key, value in shape.items()), *overrides,
    ]  # fmt: skip
    config = load_config(recipe, common)
    questions = question_files(config)[0]
    family, tuning = run.parts(config)
    loaded = family.load(config.model, questions, device="meta")
    with torch.device("meta"):
        model = tuning.attach(loaded.model, family, config.tuning.settings)
    encoder = Encoder(config.prompt, config.model, family, loaded, folder / "cache", 1)
    encoded = encoder.encode(questions)
    room, first = (card.memory - estimate.CONTEXT) / estimate.GIB, None
    for settings, world in attempts(config, card):
        tried = load_config(recipe, [*common, *settings])
        data = TrainingData(encoded, arguments.layout(tried.training, tried.prompt, world))
        need = estimate.needs(tried, model, data, world, card)[1][estimate.stage_of(tried)] / estimate.GIB
        first = need if first is None else first
        if need <= room:
            break
    plain = f"{first:.1f} of {room:.1f} GiB" + (", fits" if first <= room else "")
    cards = f" on {world} cards" if world > 1 else ""
    change = " ".join(f"`{setting}`" for setting in settings) + f"{cards}: {need:.1f} GiB"
    if need > room:
        change = "does not fit"
    return f"| {name} | {method} | {card_name} | {plain} | {change if settings else ''} |"


def table():
    """All lines of the table."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(name)
        for kind in ("chatglm", "llama", "qwen"):
            tiny.build(kind, folder / kind)
        long = schema.Question("q:0", "病" * 2000, {letter: "某种药物" for letter in "ABCDE"}, "A", "因" * 2000)
        questions = [dataclasses.replace(long, id=f"q:{number}") for number in range(64)]
        jsonl.write(folder / "questions.jsonl", questions)
        lines = ["| model | tuning | card | the recipe as it is | with |", "| --- | --- | --- | --- | --- |"]
        return [*lines, *(row(folder, pair) for pair in PAIRS)]


if __name__ == "__main__":
    print("\n".join(table()))
