"""What vLLM answers to prompts of token ids, computed by transformers: one question at a time, nothing shared."""

from typing import Any

import torch
from fake_openai import Answer, Fault, Said, Script

from cmexam_tune.models import Loaded


def script(loaded: Loaded, *, scores: bool = True, token_ids: bool = True) -> Script:
    """Return a script that takes the fields that this project sends, and refuses any other.

    Args:
        loaded: the model.
        scores: whether `logprob_token_ids` is known; older versions ignore it.
        token_ids: whether `return_token_ids` is known.
    """
    model: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    known = {
        "model", "prompt", "max_tokens", "temperature", "stop", "stop_token_ids", "logprobs", "logprob_token_ids",
        "return_tokens_as_token_ids", "return_token_ids", "skip_special_tokens", "structured_outputs",
        "guided_choice", "regex", "grammar",
    }  # fmt: skip

    def answer(body: dict[str, Any], count: int) -> Answer:
        if strange := body.keys() - known:
            return Fault(400, f"unknown fields {sorted(strange)}")
        if body["temperature"] != 0:
            return Fault(400, "only greedy")
        prompt, new = list(body["prompt"]), []
        tops: list[dict[str, float]] = []
        choices = body.get("structured_outputs", {}).get("choice")
        finish = "length"
        for _ in range(body["max_tokens"]):
            with torch.inference_mode():
                logs = model(input_ids=torch.tensor([prompt + new])).logits[0, -1].float().log_softmax(-1)
            if choices is not None:
                said = tokenizer.decode(new)
                fits = [
                    i for i in range(len(tokenizer)) if any(c.startswith(said + tokenizer.decode([i])) for c in choices)
                    and tokenizer.decode([i])
                ]  # fmt: skip
                if not fits:
                    finish = "stop"
                    break
                token = max(fits, key=lambda i: float(logs[i]))
            else:
                token = int(logs.argmax())
            new.append(token)
            if "logprobs" in body:
                wanted = body["logprob_token_ids"] if scores and "logprob_token_ids" in body else None
                shown = wanted or logs.topk(body["logprobs"]).indices.tolist()
                as_ids = body.get("return_tokens_as_token_ids")
                name = (lambda i: f"token_id:{i}") if as_ids else (lambda i: tokenizer.decode([i]))
                tops.append({name(i): float(logs[i]) for i in [token, *shown]})
            text = tokenizer.decode(new, skip_special_tokens=True)
            if token in body.get("stop_token_ids", ()) or any(stop in text for stop in body.get("stop", ())):
                finish = "stop"
                break
        return Said(
            tokenizer.decode(new, skip_special_tokens=True),
            finish,
            logprobs=tops or None,
            prompt_tokens=len(prompt),
            token_ids=new if token_ids and body.get("return_token_ids") else None,
        )

    return answer
