"""Maintainers' script: tiny ChatGLM weights and what they must give, by plain formulas in float64.

It imports nothing of the package: the second opinion that tests/test_chatglm.py compares with, written from the same
facts (docs/chatglm.md) row by row, without caches, batches or fused attention. Run it from the repository's root when
a formula turns out to be wrong; it rewrites the files beside it:

    python tests/golden_chatglm/recompute.py
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
PREFIX = 5
V1 = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "vocab_size": 96, "hidden_size": 32, "num_layers": 3,
    "num_attention_heads": 2, "inner_hidden_size": 64, "max_sequence_length": 64, "layernorm_epsilon": 1e-5,
    "position_encoding_2d": True, "pad_token_id": 3, "mask_token_id": 80, "gmask_token_id": 81, "bos_token_id": 84,
    "eos_token_id": 85, "use_cache": True, "torch_dtype": "float32",
}  # fmt: skip
V2 = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "padded_vocab_size": 96, "hidden_size": 32,
    "num_layers": 2, "num_attention_heads": 4, "kv_channels": 8, "multi_query_attention": True,
    "multi_query_group_num": 2, "ffn_hidden_size": 48, "seq_length": 64, "layernorm_epsilon": 1e-5,
    "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False, "rope_ratio": 1, "pad_token_id": 0, "eos_token_id": 2,
    "tie_word_embeddings": False, "use_cache": True, "torch_dtype": "float32",
}  # fmt: skip
Weights = dict[str, torch.Tensor]


def weights_v1(c: dict) -> Weights:
    h, inner = c["hidden_size"], c["inner_hidden_size"]
    n = torch.randn
    w = {"transformer.word_embeddings.weight": 0.2 * n(c["vocab_size"], h)}
    for i in range(c["num_layers"]):
        p = f"transformer.layers.{i}."
        sizes = {"attention.query_key_value": (3 * h, h, 0.35), "attention.dense": (h, h, 1.0),
                 "mlp.dense_h_to_4h": (inner, h, 0.15), "mlp.dense_4h_to_h": (h, inner, 0.6)}  # fmt: skip
        for name, (out, width, spread) in sizes.items():
            w[f"{p}{name}.weight"], w[f"{p}{name}.bias"] = spread * n(out, width), 0.05 * n(out)
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"], w[f"{p}{name}.bias"] = 1 + 0.1 * n(h), 0.05 * n(h)
    w["transformer.final_layernorm.weight"], w["transformer.final_layernorm.bias"] = n(h), 0.05 * n(h)
    return w


def weights_v2(c: dict) -> Weights:
    h, ffn, d = c["hidden_size"], c["ffn_hidden_size"], c["kv_channels"]
    rows = (c["num_attention_heads"] + 2 * c["multi_query_group_num"]) * d
    n = torch.randn
    w = {"transformer.embedding.word_embeddings.weight": 0.3 * n(c["padded_vocab_size"], h),
         "transformer.output_layer.weight": 0.25 * n(c["padded_vocab_size"], h),
         "transformer.encoder.final_layernorm.weight": 1 + 0.1 * n(h)}  # fmt: skip
    for i in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{i}."
        w[f"{p}self_attention.query_key_value.weight"] = 0.3 * n(rows, h)
        w[f"{p}self_attention.query_key_value.bias"] = 0.1 * n(rows)
        w[f"{p}self_attention.dense.weight"] = 0.3 * n(h, c["num_attention_heads"] * d)
        w[f"{p}mlp.dense_h_to_4h.weight"], w[f"{p}mlp.dense_4h_to_h.weight"] = 0.2 * n(2 * ffn, h), 0.2 * n(h, ffn)
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"] = 1 + 0.1 * n(h)
    return w


def prefix_weights(c: dict) -> tuple[Weights, Weights]:
    h, first = c["hidden_size"], "inner_hidden_size" in c
    width = c["num_layers"] * 2 * (h if first else c["multi_query_group_num"] * c["kv_channels"])
    inner = h if first else width
    key, n = "transformer.prefix_encoder.", torch.randn
    projected = {f"{key}embedding.weight": n(PREFIX, inner),
                 f"{key}trans.0.weight": 0.2 * n(h, inner), f"{key}trans.0.bias": 0.1 * n(h),
                 f"{key}trans.2.weight": 0.4 * n(width, h), f"{key}trans.2.bias": 0.1 * n(width)}  # fmt: skip
    return {f"{key}embedding.weight": n(PREFIX, width)}, projected


def prefix_states(p: Weights) -> torch.Tensor:
    """[tokens, width], by hand."""
    p = {name.removeprefix("transformer.prefix_encoder."): value.double() for name, value in p.items()}
    states = p["embedding.weight"]
    if "trans.0.weight" in p:
        states = torch.tanh(states @ p["trans.0.weight"].T + p["trans.0.bias"])
        states = states @ p["trans.2.weight"].T + p["trans.2.bias"]
    return states


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """One head: q [s, d], keys and values [prefix + s, d], visible [s, prefix + s]."""
    scores = (q @ keys.T / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ values


def layer_norm(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def turn_v1(x: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Rotate [s, r] at `places`: element j with element j + r/2, frequencies rounded to float16."""
    r = x.shape[-1]
    out = x.clone()
    for j in range(r // 2):
        frequency = float(torch.tensor(10000.0 ** (-2 * j / r)).half())
        for t, place in enumerate(places):
            cos, sin = math.cos(place * frequency), math.sin(place * frequency)
            a, b = x[t, j], x[t, j + r // 2]
            out[t, j], out[t, j + r // 2] = a * cos - b * sin, b * cos + a * sin
    return out


def logits_v1(c: dict, w: Weights, ids: list[int], prefix: torch.Tensor | None = None) -> torch.Tensor:
    """[s, vocabulary] of one row."""
    w = {name: value.double() for name, value in w.items()}
    s, h, heads = len(ids), c["hidden_size"], c["num_attention_heads"]
    d, context = h // heads, ids.index(c["bos_token_id"])
    mark = ids.index(c["gmask_token_id"] if c["gmask_token_id"] in ids else c["mask_token_id"])
    first = [t if t < context else mark for t in range(s)]
    second = [0 if t < context else t - context + 1 for t in range(s)]
    n = 0 if prefix is None else PREFIX
    visible = torch.tensor([[k < n or k - n <= q or k - n < context for k in range(n + s)] for q in range(s)])
    x, alpha = w["transformer.word_embeddings.weight"][ids], math.sqrt(56)
    for i in range(c["num_layers"]):
        p = f"transformer.layers.{i}."
        a = layer_norm(x, w, f"{p}input_layernorm")
        mixed = a @ w[f"{p}attention.query_key_value.weight"].T + w[f"{p}attention.query_key_value.bias"]
        outs = []
        for head in range(heads):
            q, k, v = mixed[:, 3 * d * head : 3 * d * (head + 1)].split(d, dim=-1)
            q, k = (torch.cat([turn_v1(t[:, : d // 2], first), turn_v1(t[:, d // 2 :], second)], -1) for t in (q, k))
            if prefix is not None:
                pair = prefix.view(PREFIX, c["num_layers"], 2, heads, d)[:, i, :, head]
                k, v = torch.cat([pair[:, 0], k]), torch.cat([pair[:, 1], v])
            outs.append(attend(q, k, v, visible))
        x = alpha * a + torch.cat(outs, -1) @ w[f"{p}attention.dense.weight"].T + w[f"{p}attention.dense.bias"]
        b = layer_norm(x, w, f"{p}post_attention_layernorm")
        up = b @ w[f"{p}mlp.dense_h_to_4h.weight"].T + w[f"{p}mlp.dense_h_to_4h.bias"]
        up = 0.5 * up * (1 + torch.tanh(0.7978845608028654 * up * (1 + 0.044715 * up * up)))
        x = alpha * b + up @ w[f"{p}mlp.dense_4h_to_h.weight"].T + w[f"{p}mlp.dense_4h_to_h.bias"]
    return layer_norm(x, w, "transformer.final_layernorm") @ w["transformer.word_embeddings.weight"].T


def turn_v2(x: torch.Tensor, ratio: float) -> torch.Tensor:
    """Rotate the first half of [s, d]: pairs (2j, 2j + 1)."""
    r = x.shape[-1] // 2
    out = x.clone()
    for j in range(r // 2):
        for t in range(len(x)):
            angle = t * (10000 * ratio) ** (-2 * j / r)
            a, b = x[t, 2 * j], x[t, 2 * j + 1]
            out[t, 2 * j] = a * math.cos(angle) - b * math.sin(angle)
            out[t, 2 * j + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def logits_v2(c: dict, w: Weights, ids: list[int], prefix: torch.Tensor | None = None) -> torch.Tensor:
    """[s, vocabulary] of one row."""
    w = {name: value.double() for name, value in w.items()}
    s, d, heads, groups = len(ids), c["kv_channels"], c["num_attention_heads"], c["multi_query_group_num"]
    n = 0 if prefix is None else PREFIX
    visible = torch.tensor([[k < n or k - n <= q for k in range(n + s)] for q in range(s)])
    x = w["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(c["num_layers"]):
        p = f"transformer.encoder.layers.{i}."
        a = rms(x, w[f"{p}input_layernorm.weight"])
        mixed = a @ w[f"{p}self_attention.query_key_value.weight"].T + w[f"{p}self_attention.query_key_value.bias"]
        parts = mixed.view(s, heads + 2 * groups, d)
        outs = []
        for head in range(heads):
            group = head // (heads // groups)
            q, k = turn_v2(parts[:, head], c["rope_ratio"]), turn_v2(parts[:, heads + group], c["rope_ratio"])
            v = parts[:, heads + groups + group]
            if prefix is not None:
                pair = prefix.view(PREFIX, c["num_layers"], 2, groups, d)[:, i, :, group]
                k, v = torch.cat([pair[:, 0], k]), torch.cat([pair[:, 1], v])
            outs.append(attend(q, k, v, visible))
        x = x + torch.cat(outs, -1) @ w[f"{p}self_attention.dense.weight"].T
        up = rms(x, w[f"{p}post_attention_layernorm.weight"]) @ w[f"{p}mlp.dense_h_to_4h.weight"].T
        gate, value = up.chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * value) @ w[f"{p}mlp.dense_4h_to_h.weight"].T
    return rms(x, w["transformer.encoder.final_layernorm.weight"]) @ w["transformer.output_layer.weight"].T


def main() -> None:
    """Write weights, prefixes and outputs of both versions."""
    for name, c, weights, logits in (("v1", V1, weights_v1, logits_v1), ("v2", V2, weights_v2, logits_v2)):
        torch.manual_seed(0 if name == "v1" else 1)
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        w = weights(c)
        flat, projected = prefix_weights(c)
        out: Weights = {}
        for i, length in enumerate((6, 11, 3)):
            words = torch.randint(8, 78, (length,)).tolist()
            row = [*words, 81, 84, *words[:2]] if name == "v1" else [81, 83, *words]
            if name == "v1" and i == 2:
                # [MASK] in the middle of the context.
                row = [words[0], 80, *words[1:], 84, 9]
            out[f"{i}.ids"] = torch.tensor(row)
            for kind, prefix in (("plain", None), ("flat", flat), ("proj", projected)):
                states = None if prefix is None else prefix_states(prefix)
                out[f"{i}.{kind}"] = logits(c, w, row, states).float()
                written = list(row)
                for _ in range(6):
                    written.append(int(logits(c, w, written, states)[-1].argmax()))
                out[f"{i}.{kind}.greedy"] = torch.tensor(written[len(row) :])
            if name == "v2":
                out[f"{i}.ratio50"] = logits({**c, "rope_ratio": 50}, w, row).float()
        (folder / "config.json").write_text(json.dumps(c, indent=2) + "\n")
        for file, tensors in (("model", w), ("prefix_flat", flat), ("prefix_proj", projected), ("outputs", out)):
            save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{file}.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
