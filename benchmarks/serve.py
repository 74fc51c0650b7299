"""Requests a second of `cmexam-tune serve`: one client after the other, and 16 at once, which are answered as batches.

    python benchmarks/serve.py [--requests 32] [--tokens 32] [--at-once 16]

The model is random (hidden 512, 8 layers, vocabulary 32,000) and writes exactly `--tokens` tokens to each request. The
texts must be the same both ways. Everything runs on this machine, client and server in one process.
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn

from cmexam_tune import serve, tiny
from cmexam_tune.inference import loading
from cmexam_tune.inference.serving.app import application


def recipe(folder: Path, tokens: int) -> Path:
    model = tiny.build("llama", folder / "model", hidden=512, layers=8, vocab=32_000)
    values = {
        "prompt": {"style": "answer", "max_source_length": 256, "max_target_length": 64},
        "model": {"family": "llama", "model_name_or_path": str(model)},
        "tuning": {"method": "full"},
        "generation": {"max_new_tokens": tokens, "min_new_tokens": tokens},
        "out": "unused",
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def ask(address: str, number: int) -> str:
    message = {
        "role": "user",
        "content": f"第{number}题：患者男，{20 + number}岁，反复上腹痛三年，最可能的诊断是什么？",
    }
    body = json.dumps({"messages": [message]}).encode()
    with urllib.request.urlopen(f"{address}/v1/chat/completions", body) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=16)
    got = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve.listen("127.0.0.1", 0) as opened:
        config, loaded = loading.load_writer(recipe(Path(folder), got.tokens))
        server = uvicorn.Server(uvicorn.Config(application(config, loaded, "tiny"), log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True).start()
        address = f"http://127.0.0.1:{opened.getsockname()[1]}"
        ask(address, 0)
        seconds, texts = {}, {}
        for clients in (1, got.at_once):
            start = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                texts[clients] = list(pool.map(lambda number: ask(address, number), range(got.requests)))
            seconds[clients] = time.perf_counter() - start
            print(f"{clients:>3} at once: {got.requests / seconds[clients]:.2f} requests a second")
        print(f"ratio {seconds[1] / seconds[got.at_once]:.2f}, same texts: {texts[1] == texts[got.at_once]}")
        server.should_exit = True


if __name__ == "__main__":
    main()
