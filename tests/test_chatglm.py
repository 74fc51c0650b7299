"""ChatGLM from the checkout alone: plain formulas as witness, batches, precision, formats, tokenizers, tuning."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")

import kit
from safetensors.torch import load_file, save_file

from cmexam_tune import prompts
from cmexam_tune import tiny as tiny_models
from cmexam_tune.config import ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Turn
from cmexam_tune.models.adapters.lora import LoRA
from cmexam_tune.models.adapters.ptuning import PTuning
from cmexam_tune.models.families import Loaded, chatglm
from cmexam_tune.models.families.chatglm import modeling_v1, quantization, tiny_chatglm
from cmexam_tune.models.families.chatglm import tokenization as tokens
from cmexam_tune.models.families.chatglm.authors_prefix import write_authors_prefix
from cmexam_tune.models.families.chatglm.configuration import ChatGLM2Config, ChatGLMConfig
from cmexam_tune.models.families.chatglm.modeling_v1 import ChatGLMForCausalLM
from cmexam_tune.models.families.chatglm.modeling_v2 import ChatGLM2ForCausalLM
from cmexam_tune.models.prefix import Shape, encoder_of

lora = LoRA()
ptuning = PTuning()
CHATGLM = chatglm.ChatGLM()

OWN = Path(__file__).resolve().parent / "golden_chatglm"
VERSIONS = ("v1", "v2")
PREFIX = 4
PREFIX_KEY = "transformer.prefix_encoder."
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
KINDS = ("plain", "flat", "proj")
TEXTS = ("问题: 患者，男，45岁，\n 选项: A 10⁹/L\nB  两个空格\tC", "<sop>[gMASK]</s><eop><|user|> 答案: AC", "ABC 123")


def outputs(version: str) -> dict[str, Any]:
    return load_file(OWN / version / "outputs.safetensors")


def model_of(version: str, kind: str = "plain") -> Any:
    return chatglm.load_model(OWN / version, None if kind == "plain" else OWN / version / f"prefix_{kind}.safetensors")


def rows_of(version: str) -> list[Any]:
    return [outputs(version)[f"{i}.ids"] for i in range(3)]


def pad(rows: list[Any], side: str, value: int = 3) -> dict[str, Any]:
    width = max(len(row) for row in rows)
    gaps = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    fill = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([fill(row, gap, value=value) for row, gap in zip(rows, gaps, strict=True)]),
        "attention_mask": torch.stack([fill(torch.ones_like(r), g) for r, g in zip(rows, gaps, strict=True)]),
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_ids_are_those_of_the_plain_formulas(version: str, kind: str) -> None:
    model, g = model_of(version, kind), outputs(version)
    rows = rows_of(version)
    with torch.no_grad():
        for i, row in enumerate(rows):
            assert (model(input_ids=row[None]).logits[0] - g[f"{i}.{kind}"]).abs().max() < 1e-4
            assert torch.equal(model.generate(row[None], **GREEDY)[0, len(row) :], g[f"{i}.{kind}.greedy"])
        for side in ("left", "right"):
            batch = pad(rows, side)
            logits = model(**batch).logits
            for i in range(3):
                assert (logits[i][batch["attention_mask"][i].bool()] - g[f"{i}.{kind}"]).abs().max() < 1e-4
        batch = pad(rows, "left")
        for cache in (True, False):
            out = model.generate(**batch, use_cache=cache, **GREEDY)[:, batch["input_ids"].shape[1] :]
            assert all(torch.equal(out[i], g[f"{i}.{kind}.greedy"]) for i in range(3))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_questions_see_only_themselves(version: str, kind: str) -> None:
    model, g, rows = model_of(version, kind), outputs(version), rows_of(version)
    filler = torch.full((4,), 3)
    ids = torch.cat([*rows, filler])[None]
    positions = torch.cat([torch.arange(len(part)) for part in (*rows, filler)])[None]
    # With a cache transformers' own networks do not look for packed rows; training has none.
    for cache in (True, False) if version == "v1" else (False,):
        logits = model(input_ids=ids, position_ids=positions, use_cache=cache).logits[0]
        assert torch.isfinite(logits).all()
        expected = torch.cat([g[f"{i}.{kind}"] for i in range(3)])
        assert (logits[:-4] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["plain", "proj"])
def test_beams_and_sampling_do_not_depend_on_the_batch(version: str, kind: str) -> None:
    model, rows = model_of(version, kind), rows_of(version)
    batch = pad(rows, "left")
    together = model.generate(**batch, **{**GREEDY, "num_beams": 3})[:, batch["input_ids"].shape[1] :]
    for i, row in enumerate(rows):
        assert torch.equal(together[i], model.generate(row[None], **{**GREEDY, "num_beams": 3})[0, len(row) :])
    torch.manual_seed(5)
    sampled = model.generate(rows[0][None], max_new_tokens=6, do_sample=True, top_p=0.7, temperature=0.95)
    assert sampled.shape[1] > len(rows[0])


def test_long_context_releases_stretch_the_base_or_the_positions(tmp_path: Path) -> None:
    shutil.copytree(OWN / "v2", tmp_path / "a")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps({**values, "rope_ratio": 50}))
    g = outputs("v2")
    logits = chatglm.load_model(tmp_path / "a")(input_ids=g["1.ids"][None]).logits[0]
    assert (logits - g["1.ratio50"]).abs().max() < 1e-4 < (logits - g["1.plain"]).abs().max()
    named = {**values, "rope_ratio": 4, "_name_or_path": "THUDM/chatglm2-6b-32k"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(named))
    model = chatglm.load_model(tmp_path / "a")
    assert model.config.rope_interpolation
    ids, places = g["1.ids"][None], torch.arange(len(g["1.ids"]))[None]
    # Positions are divided by 4, so four times the usual ones give the usual result.
    stretched = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=4 * places).logits[0]
    assert (stretched - g["1.plain"]).abs().max() < 1e-4
    assert (model(input_ids=ids).logits[0] - g["1.plain"]).abs().max() > 1e-2


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_near(version: str, dtype: str) -> None:
    model, g = chatglm.load_model(OWN / version, OWN / version / "prefix_flat.safetensors", dtype), outputs(version)
    assert model.dtype == getattr(torch, dtype)
    assert encoder_of(model).embedding.weight.dtype == torch.float32
    logits = model(input_ids=g["1.ids"][None]).logits[0]
    assert logits.dtype == model.dtype and torch.isfinite(logits).all()
    assert (logits.float() - g["1.flat"]).abs().mean() < (0.03 if dtype == "float16" else 0.25)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("method", ["lora", "ptuning"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_training_keeps_float32_gradients(version: str, method: str, dtype: str) -> None:
    model = chatglm.load_model(OWN / version, dtype=dtype)
    if method == "lora":
        model = lora.attach(model, CHATGLM, lora.Settings(r=4, lora_alpha=8, lora_dropout=0.0))
    else:
        model = ptuning.attach(model, CHATGLM, ptuning.Settings(PREFIX, True, None, 0.1))
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    batch = pad(rows_of(version), "right")
    with torch.autocast("cpu", getattr(torch, dtype)):
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert torch.isfinite(loss) and all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("method", ["lora", "ptuning", "full"])
def test_tuning_lowers_the_loss_and_checkpointing_changes_no_gradient(version: str, method: str) -> None:
    model = model_of(version)
    if method == "lora":
        torch.manual_seed(1)
        model = lora.attach(model, CHATGLM, lora.Settings(r=4, lora_alpha=8, lora_dropout=0.0))
    elif method == "ptuning":
        torch.manual_seed(1)
        model = ptuning.attach(model, CHATGLM, ptuning.Settings(PREFIX, True, None, 0.1))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert (len(trained) == 5) == (method == "ptuning")
    batch = pad(rows_of(version), "right")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"][:, :4] = -100
    model.train()
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)

    def gradients() -> tuple[float, dict[str, Any]]:
        torch.manual_seed(7)
        model.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in trained.items()}

    first, plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, checkpointed = gradients()
    assert first == again
    assert max(float((plain[n] - checkpointed[n]).abs().max()) for n in plain) < 1e-6
    assert method == "lora" or all(float(grad.abs().max()) > 0 for grad in plain.values())
    for _ in range(8):
        loss, _ = gradients()
        optimizer.step()
    assert loss < first - 0.3


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("projection", [False, True])
def test_authors_prefix_format_there_and_back(version: str, projection: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = ptuning.attach(model_of(version), CHATGLM, ptuning.Settings(PREFIX, projection, None, 0.1)).eval()
    ids = rows_of(version)[1][None]
    wanted = model(input_ids=ids).logits
    file = write_authors_prefix(model, tmp_path / "from_model")
    config = json.loads((tmp_path / "from_model" / "config.json").read_text())
    assert (config["pre_seq_len"], config["prefix_projection"]) == (PREFIX, projection)
    stored = torch.load(file, weights_only=True)
    assert all(k.startswith("transformer.prefix_encoder.") and v.dtype == torch.float32 for k, v in stored.items())
    back = chatglm.load_model(OWN / version, tmp_path / "from_model")
    assert torch.equal(back(input_ids=ids).logits, wanted)
    shutil.copytree(OWN / version, tmp_path / "base")
    tokenizer_into(tmp_path / "base", version)
    named = ModelConfig("chatglm", str(tmp_path / "base"), adapter_name_or_path=str(tmp_path / "from_model"))
    assert torch.equal(CHATGLM.load(named).model.eval()(input_ids=ids).logits, wanted)


def tokenizer_into(folder: Path, version: str) -> None:
    """Put a tokenizer that is no larger than 96 tokens into the folder; only its loading matters."""
    from sentencepiece import SentencePieceTrainer

    prefix = folder / ("ice_text" if version == "v1" else "tokenizer")
    lines = iter(["问题 答案 A B C D 选项", "患者 男 诊断 正确 的 是"])
    extra = {"pad_id": 3, "control_symbols": ["[MASK]", "[gMASK]", "<sop>", "<eop>"]} if version == "v1" else {}
    SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(prefix), vocab_size=60, hard_vocab_limit=False, minloglevel=2, **extra
    )


@pytest.mark.parametrize(
    ("config", "model", "parameters", "prefix"),
    [
        (ChatGLMConfig(), ChatGLMForCausalLM, 6_173_286_400, 29_360_128),
        (ChatGLM2Config(), ChatGLM2ForCausalLM, 6_243_584_000, 1_835_008),
    ],
)
def test_full_size_has_the_released_number_of_parameters(config: Any, model: Any, parameters: int, prefix: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in model(config).parameters()) == parameters
    assert 128 * Shape.of(config, 128).width == prefix


def test_a_prefix_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another num_virtual_tokens, projection or base model"):
        chatglm.load_model(OWN / "v1", OWN / "v2" / "prefix_flat.safetensors")
    with pytest.raises(UserError, match="no such"):
        chatglm.load_model(OWN / "v1", tmp_path / "none.bin")


def quantized(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored integers and the scales of the rows; two columns of int4 in a byte, the first in its high half."""
    scale = (weight.abs().amax(1) / (2 ** (bits - 1) - 1)).half()
    rounded = (weight / scale[:, None].float()).round().to(torch.int8)
    packed = rounded if bits == 8 else (rounded[:, ::2] << 4) | (rounded[:, 1::2] & 15)
    return packed, scale


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_checkpoint_loads_dequantized(version: str, bits: int, tmp_path: Path) -> None:
    state = load_file(OWN / version / "model.safetensors")
    stored, plain = {}, {}
    for name, value in state.items():
        is_linear = value.ndim == 2 and ".layers." in name
        if is_linear:
            packed, scale = quantized(value, bits)
            stored[name], stored[f"{name}_scale"] = packed, scale
            plain[name] = quantization.dequantize(packed, scale, bits, torch.float32)
            assert (plain[name] - value).abs().max() <= scale.float().max() * 0.6
        else:
            stored[name] = plain[name] = value.half()
    config = json.loads((OWN / version / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_bit": bits}))
    halves = list(stored)
    parts = {"pytorch_model-1.bin": halves[::2], "pytorch_model-2.bin": halves[1::2]}
    for file, names in parts.items():
        torch.save({name: stored[name] for name in names}, tmp_path / file)
    index = {name: file for file, names in parts.items() for name in names}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    model = chatglm.load_model(tmp_path)
    model.save_pretrained(tmp_path / "plain")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert all(torch.equal(written[name], value.float()) for name, value in plain.items())
    # `meta` stands for a card: nothing is unpacked on the host.
    there = quantization.read_state(tmp_path, bits, torch.float16, device="meta")
    assert there.keys() == plain.keys() and all(value.is_meta for value in there.values())
    ids = rows_of(version)[0][None]
    assert torch.equal(chatglm.load_model(tmp_path / "plain")(input_ids=ids).logits, model(input_ids=ids).logits)
    torch.save(state, tmp_path / "plain" / "weights.bin")
    (tmp_path / "plain" / "model.safetensors").unlink()
    under_another_name = chatglm.load_model(tmp_path / "plain")
    assert torch.equal(under_another_name(input_ids=ids).logits, model_of(version)(input_ids=ids).logits)
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(UserError, match=r"no complete model\.safetensors"):
        chatglm.load_model(tmp_path)


def test_sharded_bin_and_first_release_config(tmp_path: Path) -> None:
    state = load_file(OWN / "v1" / "model.safetensors")
    names = sorted(state)
    parts = {"pytorch_model-00001.bin": names[::2], "pytorch_model-00002.bin": names[1::2]}
    for file, some in parts.items():
        torch.save({name: state[name] for name in some}, tmp_path / file)
    index = {name: file for file, some in parts.items() for name in some}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((OWN / "v1" / "config.json").read_text())
    # The first release names no mask tokens: they lie 3 and 4 before <sop>.
    first = {k: v for k, v in config.items() if k not in ("mask_token_id", "gmask_token_id", "pad_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(first))
    model, g = chatglm.load_model(tmp_path), outputs("v1")
    assert (model.config.gmask_token_id, model.config.mask_token_id) == (81, 80)
    assert (model(input_ids=g["0.ids"][None]).logits[0] - g["0.plain"]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        ("chatglm", {"bos_token_id": None}, "bos_token_id 130004 is not below vocab_size"),
        ("chatglm", {"num_attention_heads": 32}, "hidden_size 32 is no multiple of 4 * num_attention_heads 128"),
        ("chatglm", {"layernorm_epsilon": {}}, "'layernorm_epsilon' expected float, got dict"),
        ("chatglm2", {"multi_query_group_num": 3}, "num_attention_heads 4 is no multiple of multi_query_group_num 3"),
        ("chatglm2", {"rope_ratio": "x"}, "'rope_ratio'"),
    ],
)
def test_a_config_that_does_not_fit_together_is_one_message(
    version: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny_models.build(version, tmp_path / "m", hidden=32)
    values = {**json.loads((tmp_path / "m" / "config.json").read_text()), **changes}
    (tmp_path / "m" / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UserError, match=re.escape(message)):
        CHATGLM.load(ModelConfig(family="chatglm", model_name_or_path=str(tmp_path / "m")))


def test_rows_that_chatglm_cannot_read_are_refused() -> None:
    model = model_of("v1")
    with pytest.raises(UserError, match="no <sop>"):
        model(input_ids=torch.tensor([[9, 10, 81]]))
    with pytest.raises(UserError, match="neither"):
        model(input_ids=torch.tensor([[9, 10, 84, 12]]))
    cache = model(input_ids=torch.tensor([[9, 81, 84]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="needs position_ids"):
        model(input_ids=torch.tensor([[9]]), past_key_values=cache)
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 32))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"add_bias_linear": True}, UserError, "add_bias_linear: true, which is not supported"),
        ({"model_type": "llama"}, UserError, "not a ChatGLM"),
        ({"num_layers": 5}, UserError, "not in the checkpoint"),
        ({"quantization_bit": 3}, UserError, "4 and 8 exist"),
    ],
)
def test_unusable_checkpoints_are_refused(
    changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    shutil.copytree(OWN / "v2", tmp_path / "m")
    values = json.loads((OWN / "v2" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(error, match=words):
        chatglm.load_model(tmp_path / "m")


def test_unusable_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        chatglm.load_model(OWN / "v1", dtype="int8")
    with pytest.raises(UserError, match="no such folder"):
        chatglm.load_model(tmp_path / "none")
    for name in (str(tmp_path / "none"), "nobody/no-such-model"):
        with pytest.raises(UserError, match="neither"):
            chatglm.load_tokenizer(name)
    with pytest.raises(UserError, match="neither ice_text"):
        chatglm.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        chatglm.load_tokenizer(tmp_path)
    folder = kit.checkpoint("chatglm")
    with pytest.raises(ConfigError, match=r"model\.config\.hidden_sizes: .*did you mean 'hidden_size'"):
        CHATGLM.load(ModelConfig("chatglm", folder, config={"hidden_sizes": 3}))
    with pytest.raises(ConfigError, match="has no head"):
        CHATGLM.load(ModelConfig("chatglm", folder, head="choice"))


@pytest.fixture(scope="module", params=[1, 2, 3])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from cmexam_tune.tiny import texts

    folder = tiny_chatglm.build(tmp_path_factory.mktemp("glm") / f"v{request.param}", texts(), version=request.param)
    return SimpleNamespace(
        version=request.param, folder=folder, loaded=CHATGLM.load(ModelConfig("chatglm", str(folder)))
    )


def test_tiny_tokenizers_round_trip_and_take_no_special_token_from_text(release: Any, tmp_path: Path) -> None:
    tok = release.loaded.tokenizer
    special = {tok.eos_token_id, tok.bos_token_id, tok.gmask_token_id}
    special |= set(getattr(tok, "special_ids", {}).values())
    rows = tok(list(TEXTS), add_special_tokens=False)["input_ids"]
    for text, row in zip(TEXTS, rows, strict=True):
        assert not special & set(row)
        assert tok(text, add_special_tokens=False)["input_ids"] == row
        wanted = text
        for full, half in (("，", ","), ("⁹", "9")) if release.version == 1 else ():
            wanted = wanted.replace(full, half)
        assert tok.decode(row).strip() == wanted
    tok.save_pretrained(tmp_path)
    again = chatglm.load_tokenizer(tmp_path)
    assert type(again) is type(tok) and len(again) == len(tok)
    assert again(list(TEXTS))["input_ids"] == tok(list(TEXTS))["input_ids"]


def test_tokenizer_batches_go_into_the_model_as_they_are(release: Any) -> None:
    tok, model = release.loaded.tokenizer, release.loaded.model.eval()
    batch = tok(list(TEXTS), padding=True, return_tensors="pt")
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    together = model.generate(**batch, **how)[:, -5:]
    for i, text in enumerate(TEXTS):
        alone = tok(text, return_tensors="pt")
        assert torch.equal(together[i], model.generate(**alone, **how)[0, -5:])
        beams = {**how, "num_beams": 2}
        assert torch.equal(model.generate(**batch, **beams)[i, -5:], model.generate(**alone, **beams)[0, -5:])
        real = alone["input_ids"].shape[1]
        logits = model(**batch).logits[i, -real:]
        assert (logits - model(**alone).logits[0]).abs().max() < 1e-4


def test_training_layout_and_labels(release: Any) -> None:
    loaded: Loaded = release.loaded
    tok: Any = loaded.tokenizer
    prompt = PromptConfig("answer", 300, 20)
    question = kit.question(1, answer="B")
    row = CHATGLM.encode(loaded, [question], prompt, ModelConfig("chatglm", "")).rows[0]
    ids, labels = row["input_ids"], row["labels"]
    kept = [i for i in labels if i != -100]
    assert ids[-len(kept) :] == kept and set(labels[: -len(kept)]) == {-100}
    assert kept[-1] == tok.eos_token_id
    answer = tok.text_ids(["答案: B"])[0]
    line = tok.text_ids(["\n"])[0]
    if release.version == 1:
        # As in the original, sop is the first label, predicted from [gMASK].
        assert kept == [tok.bos_token_id, *answer, tok.eos_token_id]
        assert ids[-len(kept) - 1] == tok.gmask_token_id
    elif release.version == 2:
        assert kept == [*answer, tok.eos_token_id] and ids[:2] == [tok.gmask_token_id, tok.special_ids["sop"]]
        assert tok.decode(ids[: -len(kept)]).startswith("[Round 1]\n\n问：")
    else:
        assert kept == [*line, *answer, tok.eos_token_id]
        assert ids[2] == tok.special_ids["<|user|>"] and ids[-len(kept) - 1] == tok.special_ids["<|assistant|>"]
        assert loaded.model.generation_config.eos_token_id == tok.stop_ids and len(tok.stop_ids) == 3
    plain = PromptConfig("answer", 300, 20, template="none")
    bare = CHATGLM.encode(loaded, [question], plain, ModelConfig("chatglm", "")).rows[0]
    assert [i for i in bare["labels"] if i != -100] == ([tok.bos_token_id] * (release.version == 1)) + [
        *answer, tok.eos_token_id
    ]  # fmt: skip
    system = PromptConfig("answer", 300, 20, system="你是医生")
    if release.version == 3:
        told = CHATGLM.encode(loaded, [question], system, ModelConfig("chatglm", "")).rows[0]["input_ids"]
        assert told[2] == tok.special_ids["<|system|>"] and len(told) > len(ids)
    else:
        with pytest.raises(ConfigError, match="system"):
            CHATGLM.encode(loaded, [question], system, ModelConfig("chatglm", ""))


def test_packed_loss_equals_padded_loss(release: Any) -> None:
    loaded = release.loaded
    prompt = PromptConfig("answer", 300, 20)
    rows = CHATGLM.encode(loaded, kit.questions(6), prompt, ModelConfig("chatglm", "")).rows
    padded = CHATGLM.collate(loaded, [[row] for row in rows])
    packed = CHATGLM.collate(loaded, [rows[:2], rows[2:]])
    # Without a mask attention is causal, which the fast kernels do by themselves; ChatGLM-6B's context is not.
    assert ("attention_mask" in padded) == (release.version == 1)
    assert abs(loaded.model(**padded).loss - loaded.model(**packed).loss) < 1e-5


def test_every_way_of_answering(release: Any) -> None:
    questions = kit.questions(4)
    model = {"family": "chatglm", "model_name_or_path": str(release.folder)}
    for mode in ("generate", "constrained", "likelihood"):
        config = kit.make_config("chatglm", model=model, generation={"mode": mode}, prompt__max_target_length=8)
        got = {p.question_id: p for p in CHATGLM.answer(release.loaded, questions, config)}
        assert set(got) == {q.id for q in questions}
        if mode != "generate":
            assert all(got[q.id].answer for q in questions)
        alone = kit.make_config(
            "chatglm", model=model, generation={"mode": mode, "batch_size": 1}, prompt__max_target_length=8
        )
        for prediction in CHATGLM.answer(release.loaded, questions, alone):
            # Another batch rounds otherwise, which the last digit of a probability may show.
            other = got[prediction.question_id]
            assert replace(prediction, probabilities=None) == replace(other, probabilities=None)
            assert prediction.probabilities == (other.probabilities and pytest.approx(other.probabilities, rel=2e-3))


def test_embedding_must_hold_the_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(kit.checkpoint("chatglm2"), tmp_path / "m")
    state = load_file(tmp_path / "m" / "model.safetensors")
    for name in ("transformer.embedding.word_embeddings.weight", "transformer.output_layer.weight"):
        state[name] = state[name][:100].clone()
    save_file(state, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**values, "padded_vocab_size": 100}))
    with pytest.raises(UserError, match="100 embeddings: they belong to different releases"):
        CHATGLM.load(ModelConfig("chatglm", str(tmp_path / "m")))


def test_glm4_in_transformers_own_layout(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GlmConfig, GlmForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(kit.checkpoint("llama"))
    tokenizer.save_pretrained(tmp_path)
    config = GlmConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    GlmForCausalLM(config).save_pretrained(tmp_path)
    loaded = CHATGLM.load(ModelConfig("chatglm", str(tmp_path)))
    rows = CHATGLM.encode(loaded, kit.questions(2), PromptConfig("answer", 300, 30), ModelConfig("chatglm", "")).rows
    batch = CHATGLM.collate(loaded, [[row] for row in rows])
    tuned = ptuning.attach(loaded.model, CHATGLM, ptuning.Settings(3))
    tuned(**batch).loss.backward()
    assert float(encoder_of(tuned).embedding.weight.grad.abs().max()) > 0


REAL = kit.SHARED / "golden" / "tokenizers"


@pytest.mark.skipif(not REAL.exists(), reason=f"the original sentencepiece models are not in {REAL}")
@pytest.mark.parametrize("cls", [tokens.ChatGLMTokenizer, tokens.ChatGLM2Tokenizer])
def test_thousands_of_questions_are_encoded_in_seconds(cls: Any) -> None:
    import time

    file = "ice_text.model" if cls is tokens.ChatGLMTokenizer else "tokenizer.model"
    tokenizer = cls(str(REAL / file))
    long = [f"患者，男，{i % 80}岁，反复上腹痛{i % 9}年，餐后缓解。" * 12 for i in range(6810)]
    start = time.perf_counter()
    rows = tokenizer(long)["input_ids"]
    assert len(rows) == 6810
    assert time.perf_counter() - start < 20


def test_the_first_release_has_stop_strings_and_memory() -> None:
    """`auto` is resolved to its rounds: it ends where it would open the next one, and earlier turns are asked."""
    config = kit.make_config("chatglm")
    loaded = CHATGLM.load(config.model)
    codec = CHATGLM.codec(loaded.tokenizer, config.prompt, config.model)
    assert codec.stop == ("[Round ",) and codec.remembers
    dialogue = prompts.Dialogue("再问", prompts.rounds([Turn("先问", "先答")]))
    text = "[Round 0]\n问：先问\n答：先答\n[Round 1]\n问：再问\n答："
    assert codec.sources([dialogue])[0][:-1] == loaded.tokenizer.text_ids([text])[0]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80\x04broken", b"PK\x03\x04", {"x": torch.zeros(1)}, [1, 2], {f"{PREFIX_KEY}embedding.weight": 7},
        {f"{PREFIX_KEY}embedding.weight": torch.zeros(3)}, {f"{PREFIX_KEY}embedding.weight": torch.zeros(0, 0)},
        {f"{PREFIX_KEY}embedding.weight": torch.zeros(4, 8), f"{PREFIX_KEY}trans.0.weight": torch.zeros(8, 8)},
        {f"{PREFIX_KEY}embedding.weight": torch.zeros(4, 3)},
    ],
    ids=range(10),
)  # fmt: skip
def test_a_damaged_prefix_of_the_authors_is_one_message(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UserError, match=str(tmp_path)):
        chatglm.load_model(OWN / "v1", tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"model_type": "chatglm", "kv_channels": "x"}'),
        ("config.json", b'{"model_type": "chatglm", "inner_hidden_size": 64, "num_layers": 1e9}'),
        ("config.json", b"{" * 200_000),
        ("config.json", b'{"model_type": "chatglm", "inner_hidden_size": 64, "num_layers": "two"}'),
        ("model.safetensors", b"\x00" * 30),
    ],
)
def test_a_damaged_checkpoint_is_one_message(version: str, file: str, content: bytes, tmp_path: Path) -> None:
    shutil.copytree(OWN / version, tmp_path / "m")
    (tmp_path / "m" / file).write_bytes(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        chatglm.load_model(tmp_path / "m")


@pytest.mark.parametrize("two_channels", [True, False])
@pytest.mark.parametrize("beams", [1, 2])
def test_positions_are_found_once_and_counted_on(
    two_channels: bool, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache they are found for the whole row again."""
    model = CHATGLM.load(kit.make_config("chatglm").model).model.eval()
    model.config.position_encoding_2d = two_channels
    gmask, sop = model.config.gmask_token_id, model.config.bos_token_id
    ids = torch.tensor([[3, 3, 9, 11, gmask, sop], [9, 12, 13, 15, gmask, sop]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    found: list[int] = []
    rows = modeling_v1.PrefixLMRows.__init__

    def counted(self: Any, *given: Any) -> None:
        found.append(1)
        rows(self, *given)

    monkeypatch.setattr(modeling_v1.PrefixLMRows, "__init__", counted)

    def written(use_cache: bool) -> Any:
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False,
                              num_beams=beams, use_cache=use_cache)  # fmt: skip

    with_cache = written(True)
    assert len(found) <= 2, "once for the positions, once for the mask of the prompt"
    assert torch.equal(with_cache, written(False))
