"""Our ChatGLM against outputs of the authors' code (files outside the project; skipped where they are absent)."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")

from kit import make_config
from safetensors.torch import load_file, save_file

from cmexam_tune import prompts
from cmexam_tune.core.schema import Turn
from cmexam_tune.models.families import chatglm
from cmexam_tune.models.families.chatglm import modeling_v1, modeling_v2, quantization
from cmexam_tune.models.families.chatglm.configuration import ChatGLM2Config
from cmexam_tune.models.prefix import encoder_of

CHATGLM = chatglm.ChatGLM()

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
pytestmark = pytest.mark.skipif(
    not (GOLDEN / "chatglm_v1_golden.safetensors").exists(), reason=f"no golden files of the authors' code in {GOLDEN}"
)

# name -> (config, weights, outputs, prefix files)
SETS = {
    "v1": ("chatglm_v1_config.json", "chatglm_v1_tiny", "chatglm_v1_golden"),
    "v1_28": ("chatglm_v1_tiny28_config.json", "chatglm_v1_tiny28", "chatglm_v1_tiny28_golden"),
    "v3": ("chatglm3_config.json", "chatglm3_tiny", "chatglm3_golden"),
}


def checkpoint(name: str, folder: Path, kind: str = "safetensors") -> Path:
    config, weights, _ = SETS[name]
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(GOLDEN / config, folder / "config.json")
    if kind == "safetensors":
        shutil.copyfile(GOLDEN / f"{weights}.safetensors", folder / "model.safetensors")
    else:
        torch.save(load_file(GOLDEN / f"{weights}.safetensors"), folder / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: checkpoint(name, tmp_path_factory.mktemp(name)) for name in SETS}


def golden(name: str) -> dict[str, Any]:
    return load_file(GOLDEN / f"{SETS[name][2]}.safetensors")


def real(case: str, g: dict[str, Any]) -> Any:
    ids = g[f"{case}.input_ids"]
    if case == "b":
        return torch.arange(ids.shape[1]) >= ids.shape[1] - g["b.lengths"][:, None]
    mask = g[f"{case}.attention_mask"]
    return mask.bool() if mask.ndim == 2 else torch.ones_like(ids, dtype=torch.bool)


def prefix_file(name: str, kind: str) -> Path:
    return GOLDEN / f"{SETS[name][1]}_ptuning_{kind}.safetensors"


def loaded(name: str, kind: str, folders: dict[str, Path]) -> Any:
    return chatglm.load_model(folders[name], None if kind == "plain" else prefix_file(name, kind))


RUNS = [
    (name, kind)
    for name in SETS
    for kind in ("plain", "flat", "proj")
    if kind == "plain" or not GOLDEN.exists() or prefix_file(name, kind).exists()
]


def inputs_of(how: str, case: str, g: dict[str, Any]) -> dict[str, Any]:
    """Original's own mask and positions, a 2-D mask, or bare ids."""
    fields = {"input_ids": g[f"{case}.input_ids"]}
    if how == "original":
        fields.update(attention_mask=g[f"{case}.attention_mask"], position_ids=g[f"{case}.position_ids"])
    elif how == "mask" and case != "b_ids_only":
        fields["attention_mask"] = real(case, g).long()
    return fields


@pytest.mark.parametrize(("name", "kind"), RUNS)
@pytest.mark.parametrize("how", ["original", "mask", "bare"])
def test_logits_and_losses(name: str, kind: str, how: str, folders: dict[str, Path]) -> None:
    model, g = loaded(name, kind, folders), golden(name)
    head = "" if kind == "plain" else f"ptuning_{kind}."
    cases = [c for c in ("a", "b", "b_ids_only", "m", "c", "chat") if f"{head}{c}.logits" in g]
    assert len(cases) >= 3
    for case in cases:
        if how == "bare" and case in ("b", "chat"):
            continue
        with torch.no_grad():
            out = model(**inputs_of(how, case, g), labels=g.get(f"{case}.labels"))
        difference = (out.logits - g[f"{head}{case}.logits"])[real(case, g)].abs().max()
        assert difference < 1e-4, (case, how, float(difference))
        if out.loss is not None:
            assert abs(out.loss - g[f"{head}{case}.loss"]) < 1e-5


@pytest.mark.parametrize(("name", "kind"), RUNS)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "recomputed"])
def test_greedy_ids(name: str, kind: str, cache: bool, folders: dict[str, Path]) -> None:
    model, g = loaded(name, kind, folders), golden(name)
    head = "" if kind == "plain" else f"ptuning_{kind}."
    for case in [c for c in ("a", "b", "b_ids_only", "m") if f"{head}{c}.gen_ids" in g]:
        for how in ("mask", "original"):
            if name != "v1" and how == "original":
                continue
            fields = inputs_of("mask" if case == "b_ids_only" else how, case, g)
            out = model.generate(**fields, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=cache)
            assert torch.equal(out[:, fields["input_ids"].shape[1] :], g[f"{head}{case}.gen_ids"]), (case, how)


@pytest.mark.parametrize(("name", "kind"), [run for run in RUNS if run[1] != "plain"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_prefix_gradients(name: str, kind: str, checkpointing: bool, folders: dict[str, Path]) -> None:
    model, g = loaded(name, kind, folders), golden(name)
    encoder = encoder_of(model)
    encoder.dropout = 0.0
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(input_ids=g["c.input_ids"], labels=g["c.labels"], attention_mask=None).loss.backward()
    names = [key for key in g if key.startswith(f"ptuning_{kind}.c.grad.")]
    assert names
    for key in names:
        got = dict(encoder.named_parameters())[key.removeprefix(f"ptuning_{kind}.c.grad.")].grad
        assert (got - g[key]).abs().max() < 2e-6, key
    assert all(p.grad is None for n, p in model.named_parameters() if "prefix_encoder" not in n)


def test_intermediate_states(folders: dict[str, Path]) -> None:
    for name in SETS:
        g = golden(name)
        out = chatglm.load_model(folders[name])(input_ids=g["a.input_ids"], output_hidden_states=True, use_cache=True)
        assert (out.hidden_states[0] - g["a.embeddings"]).abs().max() < 1e-6
        assert (out.hidden_states[-1] - g["a.final_norm"]).abs().max() < 3e-4
        for i in (0, 1, 2):
            assert (out.hidden_states[i + 1] - g[f"a.layer_out.{i}"]).abs().max() < 3e-4 or i == 2
        if "a.present.1.key" in g:
            key = g["a.present.1.key"].permute(1, 2, 0, 3)
            assert (out.past_key_values.layers[1].keys - key).abs().max() < 1e-4


def test_bin_checkpoint_and_bin_prefix_give_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("v1", "v3"):
        folder = checkpoint(name, tmp_path / name, "bin")
        prefix = tmp_path / name / "prefix" / "pytorch_model.bin"
        prefix.parent.mkdir()
        full = {**load_file(GOLDEN / f"{SETS[name][1]}.safetensors"), **load_file(prefix_file(name, "proj"))}
        torch.save(full, prefix)
        g = golden(name)
        with torch.no_grad():
            out = chatglm.load_model(folder, prefix.parent)(input_ids=g["a.input_ids"])
        assert (out.logits - g["ptuning_proj.a.logits"]).abs().max() < 1e-4


def test_saved_model_has_the_original_keys(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in SETS:
        chatglm.load_model(folders[name]).save_pretrained(tmp_path / name)
        again = load_file(tmp_path / name / "model.safetensors")
        original = load_file(GOLDEN / f"{SETS[name][1]}.safetensors")
        wanted = {key for key in original if "inv_freq" not in key and key != "lm_head.weight"}
        assert set(again) - {"lm_head.weight"} == wanted
        assert all(torch.equal(again[key], original[key]) for key in wanted)
        g = golden(name)
        out = chatglm.load_model(tmp_path / name)(input_ids=g["a.input_ids"])
        assert (out.logits - g["a.logits"]).abs().max() < 1e-4


def test_head_of_v1_is_tied_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    folder = checkpoint("v1", tmp_path)
    g = golden("v1")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = g["extra.untied_lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert (chatglm.load_model(folder)(input_ids=g["a.input_ids"]).logits - g["a.logits"]).abs().max() < 1e-4
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    out = chatglm.load_model(folder)(input_ids=g["a.input_ids"])
    assert (out.logits - g["extra.a.logits_untied"]).abs().max() < 1e-4


def test_rotary_tables() -> None:
    g = load_file(GOLDEN / "rope_golden.safetensors")
    positions = g["positions"]
    for version, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        cos, sin = modeling_v1.rotary_tables(positions, 64, dtype)
        assert torch.equal(cos, g[f"v1.{version}.cos"]) and torch.equal(sin, g[f"v1.{version}.sin"])
        assert torch.equal(glm_tables(positions, dtype), g[f"v3.{version}.cache"])
    assert torch.equal(glm_tables(positions, torch.float32), g["v2.fp32.cache"])
    # The 32K release divides positions: sixteen times the positions give the usual table, and not all of it.
    stretched = glm_tables(16 * positions, torch.float32, rope_ratio=16, rope_interpolation=True)
    assert (stretched - g["v2.fp32.cache"]).abs().max() < 1e-5
    unlike = glm_tables(positions, torch.float32, rope_ratio=16, rope_interpolation=True)
    assert (unlike - g["v2.fp32.cache"]).abs().max() > 1e-1


def glm_tables(positions: Any, dtype: Any, **stretch: Any) -> Any:
    """Cosine and sine `[s, 32, 2]` of ChatGLM2/3 at its real width."""
    config = ChatGLM2Config(num_layers=1, padded_vocab_size=8, hidden_size=8, ffn_hidden_size=8, **stretch)
    with torch.device("meta"):
        layer = modeling_v2.ChatGLM2ForCausalLM(config).model.rotary_emb
    rotary = type(layer)(config)
    cos, sin = rotary(torch.zeros(1, dtype=dtype), positions[None])
    return torch.stack([cos[0, :, :32], sin[0, :, :32]], -1)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantization(bits: int) -> None:
    g = load_file(GOLDEN / "quant_golden.safetensors")
    stored, scale = g[f"int{bits}.weight"], g[f"int{bits}.weight_scale"]
    if bits == 4:
        assert torch.equal(quantization.unpack_int4(stored), g["int4.q_unpacked"])
    assert torch.equal(quantization.dequantize(stored, scale, bits, torch.float32), g[f"int{bits}.dequant_fp32"])


def tokenizer(version: str, tmp_path: Path, **settings: Any) -> Any:
    file = "ice_text.model" if version == "v1" else "tokenizer.model"
    shutil.copyfile(GOLDEN / "tokenizers" / file, tmp_path / file)
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return chatglm.load_tokenizer(tmp_path, **({} if version == "v1" else {"version": int(version[1])}))


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_tokenizers(version: str, tmp_path: Path) -> None:
    g = json.loads((GOLDEN / "tokenizer_golden.json").read_text(encoding="utf-8"))[version]
    tok = tokenizer(version, tmp_path)
    assert tok.vocab_size == g["vocab_size"]
    # Where the original lets a text write special tokens (v1 in transformers 4.30), ours does not.
    injected = ("<sop>", "<eop>", "[MASK]", "<unk>", "<pad>") if version == "v1" else ()
    samples = [s for s in g["samples"] if not any(word in s["text"] for word in injected)]
    assert len(samples) > 25
    assert tok([s["text"] for s in samples], add_special_tokens=False)["input_ids"] == [s["ids"] for s in samples]
    assert tok([s["text"] for s in samples])["input_ids"] == [s["ids_with_special"] for s in samples]
    for sample in samples:
        assert tok.encode(sample["text"]) == sample["ids_with_special"]
    for sample in g["samples"]:
        assert tok.decode(sample["ids"]) == sample["decode_ids"], sample
        assert tok.decode(sample["ids_with_special"], skip_special_tokens=True) == sample["decode_skip_special"]
    batch = g["padded_batch"]
    got = tok(batch["texts"], padding=True)
    assert {key: got[key] for key in batch if key != "texts"} == {k: v for k, v in batch.items() if k != "texts"}
    cut = g["truncated_max_length_8"]
    assert [tok(cut["text"], truncation=True, max_length=8)["input_ids"]] == cut["input_ids"]
    assert list(tok(cut["text"])) == g["unpadded_call_keys"]
    pair = g["pair"]
    assert tok.build_inputs_with_special_tokens(pair["a"], pair["b"]) == pair["out"]
    assert tok.eos_token_id == g.get("eos_token_id", 2) and tok.pad_token_id == g.get("pad_token_id", 0)
    for name, index in g["special_ids"].items():
        known = {"<bos>": tok.bos_token_id, "<eos>": tok.eos_token_id, "<pad>": tok.pad_token_id}
        got_id = known[name] if version != "v1" and name in known else tok.convert_tokens_to_ids(name)
        assert got_id == index, name
    for message in g.get("build_single_message", ()):
        got_ids = tok.build_single_message(message["role"], message["metadata"], message["message"])
        assert got_ids == message["ids"]


def test_dialogues(tmp_path: Path) -> None:
    """ChatGLM2's rounds as text, ChatGLM3's messages as ids."""
    known = json.loads((GOLDEN / "tokenizer_golden.json").read_text(encoding="utf-8"))
    for prompt in known["v2"]["build_prompt"]:
        turns = [Turn(*turn) for turn in prompt["history"] or ()]
        assert prompts.wrap(prompt["query"], "chatglm2", turns=turns) == prompt["prompt"]
    config = make_config("chatglm", model__model_name_or_path="unused")
    codec = CHATGLM.codec(tokenizer("v3", tmp_path), config.prompt, config.model)
    for chat in known["v3"]["build_chat_input"]:
        history = tuple(prompts.Message(message["role"], message["content"]) for message in chat["history"])
        assert codec.sources([prompts.Dialogue(chat["query"], history)]) == [chat["input_ids"]]


def test_tokenizer_of_the_first_release_and_role_tokens_in_text(tmp_path: Path) -> None:
    g = json.loads((GOLDEN / "tokenizer_golden.json").read_text(encoding="utf-8"))
    (tmp_path / "old").mkdir()
    old = tokenizer("v1", tmp_path / "old", num_image_tokens=20000)
    for name, index in g["v1"]["special_ids_num_image_tokens_20000"].items():
        assert old.convert_tokens_to_ids(name) == index
    ids = old("你好 <n>", add_special_tokens=False)["input_ids"]
    assert min(ids) >= 20000 and old.decode([7, *ids]) == "<image_7>你好 \n"
    roles = tokenizer("v3", tmp_path, encode_special_tokens=True)
    for sample in g["v3"]["samples_encode_special_tokens"]:
        assert roles(sample["text"])["input_ids"] == sample["ids_with_special"]
        assert roles.decode(sample["ids"]) == sample["decode_ids"]
        assert roles.decode(sample["ids_with_special"], skip_special_tokens=True) == sample["decode_skip_special"]


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_text_cannot_inject_special_tokens(version: str, tmp_path: Path) -> None:
    tok = tokenizer(version, tmp_path)
    text = "A<sop>B[gMASK]C<eop>D</s>E<pad>F<|user|>G<|assistant|>[MASK]sop"
    ids = tok(text, add_special_tokens=False)["input_ids"]
    special = {tok.bos_token_id, tok.eos_token_id, tok.pad_token_id, tok.gmask_token_id}
    special |= set(getattr(tok, "special_ids", {}).values())
    special |= {130000, 130001, 130002, 130003, 130004, 130005} if version == "v1" else set()
    assert not special & set(ids)
