"""How long preprocess takes for all of CMExam's and CMB's training questions, beside pandas that only reads the files.

The rows are those of the shipped sample (CMExam's also those of `--like`), again and again with a number in the stem.
"""

import argparse
import csv
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SAMPLE = Path(__file__).resolve().parents[1] / "cmexam_tune" / "sample"


def write_cmexam(path: Path, count: int, like: Path) -> None:
    """Write rows of a CMExam file again and again."""
    with like.open(encoding="utf-8-sig", newline="") as handle:
        head, *rows = csv.reader(handle)
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(head)
        writer.writerows([f"{i}{rows[i % len(rows)][0]}", *rows[i % len(rows)][1:]] for i in range(count))


def write_cmb(path: Path, count: int) -> None:
    """Write items in CMB's layout."""
    items = json.loads((SAMPLE / "cmb/train.json").read_text(encoding="utf-8"))
    made = [{**items[i % len(items)], "question": f"{i}{items[i % len(items)]['question']}"} for i in range(count)]
    path.write_text(json.dumps(made, ensure_ascii=False, indent=1), encoding="utf-8")


def measure(command: list[str]) -> dict[str, Any]:
    """Run a command in a process of its own; return its wall time, CPU time and peak memory."""
    code = (
        "import resource, subprocess, sys, time; t = time.perf_counter(); "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); w = time.perf_counter() - t; "
        "u = resource.getrusage(resource.RUSAGE_CHILDREN); print(w, u.ru_utime + u.ru_stime, u.ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    wall, cpu, peak = map(float, done.stdout.split())
    return {"seconds": round(wall, 2), "cpu_seconds": round(cpu, 2), "peak_mib": round(peak / 1024)}


def main() -> None:
    """Print both sides, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cmexam", type=int, default=54_497)
    parser.add_argument("--like", type=Path, default=SAMPLE / "cmexam/val.csv", help="the CMExam file to repeat")
    parser.add_argument("--cmb", type=int, default=269_359)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    figures: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    with tempfile.TemporaryDirectory() as folder:
        raw = {"cmexam": Path(folder) / "cmexam.csv", "cmb": Path(folder) / "cmb.json"}
        write_cmexam(raw["cmexam"], args.cmexam, args.like)
        write_cmb(raw["cmb"], args.cmb)
        reads = {"cmexam": "pandas.read_csv", "cmb": "pandas.read_json"}
        for exam, path in raw.items():
            ours = [sys.executable, "-m", "cmexam_tune.preprocess", exam, "--input", str(path), "--out"]
            pandas = [sys.executable, "-c", f"import pandas, sys; {reads[exam]}(sys.argv[1])", str(path)]
            figures[exam] = {
                "mib": round(path.stat().st_size / 2**20),
                "preprocess": measure([*ours, str(Path(folder) / exam)]),
                f"{reads[exam]} (reads only)": measure(pandas),
            }
    text = json.dumps(figures, ensure_ascii=False, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
