"""How near to the server's own speed a model behind an address is asked.

A server on the loopback address, in a process of its own, takes 200 ms for every request; 16 are under way at once.
With nothing lost 1,000 questions take 1000 / 16 * 0.2 = 12.5 s; the goal is at most 1.15 times that, from the first
request to the last answer in the file. The whole call, imports of the libraries included, is printed beside it.

    python benchmarks/endpoint.py
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fake_openai import serving

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.predict import predict

DELAY, LIMIT = 0.2, 1.15


def serve(pipe: Connection) -> None:
    """Serve until the other end says something."""
    with serving(lambda body, count: "答案是B。", delay=DELAY) as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> int:
    """Measure and return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    got = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    url = here.recv()
    with tempfile.TemporaryDirectory() as folder:
        asked = [Question(str(n), f"第{n}题", {"A": "甲", "B": "乙"}, "B") for n in range(got.questions)]
        jsonl.write(Path(folder) / "q.jsonl", asked)
        words = [f"model.base_url={url}", f"generation.concurrency={got.concurrency}"]
        start = time.monotonic()
        out = predict("zeroshot_vllm", Path(folder) / "q.jsonl", Path(folder) / "p.jsonl", words)
        whole = time.monotonic() - start
        seconds = json.loads(Path(f"{out}.meta.json").read_text(encoding="utf-8"))["result"]["seconds"]
        assert sum(one.answer == "B" for one in jsonl.read(out, Prediction)) == got.questions
    here.send(None)
    ideal = got.questions / got.concurrency * DELAY
    print(f"{got.questions} questions, {got.concurrency} at once, {DELAY * 1000:.0f} ms each")
    print(f"{seconds:.2f} s; with imports {whole:.2f} s")
    print(f"ideal {ideal:.2f} s, ratio {seconds / ideal:.3f} (goal: at most {LIMIT})")
    return int(seconds / ideal > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
