"""What `demo_real.sh` ends with: what the real model had learnt of each exam, and what of it is only form.

python recipes/demo_real.py demo-real
"""

import json
import sys
from pathlib import Path
from typing import Any

from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.training.run_directory.log import LOG, points, read_log

SHOWN = 2
"""Questions whose outputs are printed."""


def scores(values: dict[str, Any]) -> str:
    """Return accuracy with its interval."""
    low, high = values["accuracy_ci"]
    return f"{values['accuracy']:.1f}% ({low:.1f} to {high:.1f})"


def tell(folder: Path, exam: Path) -> None:
    """Print what training has changed in one exam."""
    report = json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))
    after, compared = report["overall"], report["comparison"]
    before, guess = compared["scores"], report["baselines"]["uniform_single"]["expected"]
    losses = [loss for _, loss in points(read_log(folder / "run" / LOG), "loss")]
    rows = (
        ("", "before", f"after {len(losses)} steps"),
        ("training loss", f"{losses[0]:.2f}", f"{losses[-1]:.2f}"),
        ("readable answers", f"{before['answered']} of {before['n']}", f"{after['answered']} of {after['n']}"),
        ("accuracy (95%)", scores(before), scores(after)),
    )
    cli.say(f"\n{folder.name}: {folder / 'report' / 'report.html'}")
    for name, *values in rows:
        cli.say(f"  {name:<18}" + "".join(f"{value:<24}" for value in values).rstrip())
    outputs = [
        {line.question_id: line.text for line in jsonl.read(folder / f"{side}.jsonl", Prediction)}
        for side in ("before", "after")
    ]
    for question in list(jsonl.read(exam, Question))[:SHOWN]:
        cli.say(f"  {question.stem[:60]} (key: {question.answer})")
        for side, texts in zip(("before", "after"), outputs, strict=True):
            cli.say(f"    {side:<7}{' '.join(texts[question.id].split())[:90]}")
    low, high = after["accuracy_ci"]
    within = low <= guess <= high
    cli.say(
        f"  Guessing one letter gets {guess:.1f}% (the interval {'holds' if within else 'leaves out'} this). "
        + ("Nothing shows that it knows more than how to answer." if within else "")
    )


def main() -> None:
    """Print every exam in the folder of the demo."""
    out = Path(sys.argv[1])
    for folder, stem in (("sample", "train"), ("cmexam", "val")):
        if (out / folder / "report").is_dir():
            tell(out / folder, out / f"{stem}.test.jsonl")
    cli.say(
        "\nThis model has 135 million parameters and has read little Chinese: its loss falls since it learns the form\n"
        "of an answer. For medicine take a larger one, with --config lora_qwen. More: docs/measured.md"
    )


if __name__ == "__main__":
    main()
