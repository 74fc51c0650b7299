"""P-tuning v2: PEFT's prefix adapter as the witness, and the identities of a prefix that lives outside the cache."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")

from peft import PeftModel, PrefixTuningConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    LlamaConfig,
    LlamaForCausalLM,
)

from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models.adapters.ptuning import PTuning
from cmexam_tune.models.families.chatglm.authors_prefix import load_authors_prefix
from cmexam_tune.models.prefix import encoder_of

ptuning = PTuning()

LLAMA = SimpleNamespace(task="generate", lora_targets=(), prefix_shifts_positions=True)
BERT = SimpleNamespace(task="classify", lora_targets=(), prefix_shifts_positions=False)


def llama(kv_heads: int = 4, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tuned(model: Any, projection: bool = False, dropout: float = 0.0, family: Any = LLAMA) -> Any:
    hidden = 24 if projection else None
    settings = ptuning.Settings(5, projection, hidden, dropout)
    torch.manual_seed(1)
    return ptuning.attach(model, family, settings)


def batch() -> dict[str, Any]:
    torch.manual_seed(2)
    ids = torch.randint(3, 90, (3, 11))
    mask = torch.ones_like(ids)
    mask[1, 7:], mask[2, 4:] = 0, 0
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradients(model: Any, rows: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    loss = model(**rows).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("projection", [False, True], ids=["flat", "projection"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_equals_pefts_prefix_adapter(projection: bool, kv_heads: int) -> None:
    mine = tuned(llama(kv_heads), projection)
    encoder = encoder_of(mine)
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=projection,
        encoder_hidden_size=24 if projection else None,
    )  # fmt: skip
    peft = get_peft_model(llama(kv_heads), config)
    theirs = peft.prompt_encoder["default"]
    state = {k.replace("trans.", "transform."): v for k, v in encoder.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    rows = batch()
    real = rows["attention_mask"].bool()
    difference = (mine(**rows).logits - peft(**rows).logits)[real].abs().max()
    assert difference < 1e-5
    loss, grads = gradients(mine, rows)
    peft.zero_grad()
    other = peft(**rows).loss
    other.backward()
    assert abs(loss - other.detach()) < 1e-6
    for name, parameter in theirs.named_parameters():
        expected = parameter.grad
        got = grads[f"model.prefix_encoder.{name.replace('transform.', 'trans.')}"]
        assert (got - expected).abs().max() < 1e-6, name


@pytest.mark.parametrize("projection", [False, True], ids=["flat", "projection"])
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_saved_folder_loads_in_plain_peft(tmp_path: Path, projection: bool, kv_heads: int) -> None:
    mine = tuned(llama(kv_heads), projection)
    ptuning.save(mine, tmp_path)
    peft = PeftModel.from_pretrained(llama(kv_heads), str(tmp_path)).eval()
    rows = batch()
    real = rows["attention_mask"].bool()
    with torch.no_grad():
        assert (mine(**rows).logits - peft(**rows).logits)[real].abs().max() < 1e-5
    prompt = {"input_ids": rows["input_ids"][:, :4]}
    how = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(mine.generate(**prompt, **how), peft.generate(**prompt, **how))


@pytest.mark.parametrize("projection", [False, True], ids=["flat", "projection"])
def test_save_then_load_restores_every_parameter(tmp_path: Path, projection: bool) -> None:
    mine = tuned(llama(), projection)
    ptuning.save(mine, tmp_path)
    torch.manual_seed(9)
    again = ptuning.attach(llama(), LLAMA, ptuning.Settings(5, projection, 24 if projection else None))
    rows = batch()
    assert not torch.equal(again(**rows).logits, mine(**rows).logits)
    ptuning.load(again, tmp_path)
    assert torch.equal(again(**rows).logits, mine(**rows).logits)
    for name, value in encoder_of(mine).state_dict().items():
        assert torch.equal(value, encoder_of(again).state_dict()[name])


def test_gathered_state_dict_is_what_gets_saved(tmp_path: Path) -> None:
    mine = tuned(llama(), projection=True)
    state = {name: value + 1 for name, value in mine.state_dict().items()}
    ptuning.save(mine, tmp_path, state)
    ptuning.load(mine, tmp_path)
    for name, value in encoder_of(mine).state_dict().items():
        assert torch.equal(value, state[f"model.prefix_encoder.{name}"])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_no_gradient(dropout: float) -> None:
    model = tuned(llama(attention_dropout=0.0), projection=True, dropout=dropout).train()
    rows = batch()
    torch.manual_seed(3)
    loss, plain = gradients(model, rows)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(3)
    again, checkpointed = gradients(model, rows)
    assert loss == again
    assert plain.keys() == checkpointed.keys() and plain
    for name in plain:
        assert (plain[name] - checkpointed[name]).abs().max() < 1e-6
        assert plain[name].abs().max() > 0


def test_dropout_acts_on_the_prefix_and_only_in_training() -> None:
    model = tuned(llama(), dropout=0.5)
    rows = batch()
    assert torch.equal(model(**rows).logits, model(**rows).logits)
    model.train()
    assert not torch.equal(model(**rows).logits, model(**rows).logits)


def test_packed_rows_give_each_question_what_it_gives_alone() -> None:
    model = tuned(llama())
    ids = batch()["input_ids"]
    parts = [ids[0, :5], ids[1, :7], ids[2, :4]]
    packed = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    together = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
    alone = torch.cat([model(input_ids=part[None]).logits[0] for part in parts])
    assert (together - alone).abs().max() < 1e-5


@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_batch_generates_what_each_prompt_generates_alone(beams: int) -> None:
    model = tuned(llama())
    ids = batch()["input_ids"]
    parts = [ids[0, :9], ids[1, :6], ids[2, :3]]
    padded = torch.stack([torch.nn.functional.pad(part, (9 - len(part), 0)) for part in parts])
    how = {"max_new_tokens": 7, "do_sample": False, "num_beams": beams, "eos_token_id": None}
    together = model.generate(input_ids=padded, attention_mask=(padded != 0).long(), **how)[:, 9:]
    for row, part in zip(together, parts, strict=True):
        assert torch.equal(row, model.generate(input_ids=part[None], **how)[0, len(part) :])
        uncached = model.generate(input_ids=part[None], use_cache=False, **how)[0, len(part) :]
        assert torch.equal(row, uncached)


def test_half_precision_base_keeps_a_float32_prefix() -> None:
    model = tuned(llama().to(torch.bfloat16))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    loss, grads = gradients(model, batch())
    assert torch.isfinite(loss) and grads["model.prefix_encoder.embedding.weight"].dtype == torch.float32


def test_training_lowers_the_loss_and_leaves_the_base_alone() -> None:
    model = tuned(llama()).train()
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    rows, losses = batch(), []
    for _ in range(12):
        loss, _ = gradients(model, rows)
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in before.items())


def test_bert_gets_a_prefix_and_keeps_its_new_head_trainable(tmp_path: Path) -> None:
    def fresh() -> Any:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            initializer_range=0.2,
        )  # fmt: skip
        return BertForMultipleChoice(config).eval()

    rows = batch()
    inputs = {"input_ids": rows["input_ids"][None], "attention_mask": rows["attention_mask"][None]}
    bare = fresh()(**inputs).logits
    model = tuned(fresh(), projection=True, family=BERT)
    assert (model(**inputs).logits - bare).abs().max() > 1e-3
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"classifier.weight", "bert.prefix_encoder.trans.0.weight"} <= names
    with torch.no_grad():
        model.classifier.weight.add_(1)
    ptuning.save(model, tmp_path)
    again = ptuning.attach(fresh(), BERT, ptuning.Settings(5, True, 24))
    ptuning.load(again, tmp_path)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_virtual_tokens": 0}, "num_virtual_tokens"),
        ({"num_virtual_tokens": 4, "encoder_hidden_size": 8}, "prefix_projection"),
        ({"num_virtual_tokens": 4, "prefix_dropout": 1.0}, "prefix_dropout"),
    ],
)
def test_settings_refuse_what_cannot_be(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ptuning.Settings(**changes)


def test_wrong_sizes_and_wrong_files_are_refused(tmp_path: Path) -> None:
    model = tuned(llama())
    ptuning.save(model, tmp_path / "flat")
    other = ptuning.attach(llama(), LLAMA, ptuning.Settings(6))
    with pytest.raises(UserError, match="num_virtual_tokens"):
        ptuning.load(other, tmp_path / "flat")
    with pytest.raises(UserError, match="prefix_projection=false"):
        ptuning.load(tuned(llama(), projection=True), tmp_path / "flat")
    with pytest.raises(UserError, match="no such"):
        ptuning.load(model, tmp_path)
    torch.save({"lm_head.weight": torch.zeros(2)}, tmp_path / "other.bin")
    with pytest.raises(UserError, match="is no P-tuning checkpoint"):
        load_authors_prefix(tmp_path / "other.bin")
    with pytest.raises(ConfigError, match="carries a prefix already"):
        ptuning.attach(model, LLAMA, ptuning.Settings(4))
    flash = llama()
    flash.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ConfigError, match="sdpa"):
        ptuning.attach(flash, LLAMA, ptuning.Settings(4))


def test_settings_are_frozen_and_named_as_in_peft() -> None:
    names = {field.name for field in dataclasses.fields(ptuning.Settings)}
    assert names - {"prefix_dropout"} <= {field.name for field in dataclasses.fields(PrefixTuningConfig)}
