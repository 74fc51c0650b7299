"""How long it takes to lay out a validation file for one pass with `max_tokens_per_batch`.

python benchmarks/planning.py --json planning.json
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write what was printed here too")
    parser.add_argument("--count", type=int, default=27_000, help="questions of 60 to 512 tokens; default: %(default)s")
    options = parser.parse_args()
    from cmexam_tune.training.data import sampler

    chance = random.Random(0)
    lengths = [chance.randint(60, chance.choice((150, 512))) for _ in range(options.count)]
    found = []
    for processes in (1, 8):
        for tokens in (2048, 8192):
            layout = sampler.StepLayout(len(lengths), 32, max_tokens=tokens)
            started, cpu = time.perf_counter(), time.process_time()
            shares = sampler.spread(range(len(lengths)), lengths, layout, processes)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            most = max(sampler.slots(micro, lengths) for share in shares for micro in share)
            assert most <= tokens and sum(len(micro) for share in shares for micro in share) == options.count
            found.append({"processes": processes, "max_tokens_per_batch": tokens, "batches": len(shares[0]),
                          "fullest": most, "seconds": seconds, "cpu_seconds": cpu})  # fmt: skip
            print(
                "  ".join(
                    f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.3f}"
                    for name, value in found[-1].items()
                )
            )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
