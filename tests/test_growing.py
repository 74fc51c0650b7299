"""No reader takes time by the square of the length: outputs of one piece repeated, then four times as long."""

import sys
from pathlib import Path

import pytest

from cmexam_tune.evaluation.answer_parsing import parse

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import growing

SMALL, LARGE = 3000, 12_000


@pytest.mark.parametrize("reader", growing.readers())
def test_time_grows_with_the_length(reader):
    read = growing.readers()[reader]
    times = {name: growing.seconds(read, text) for name, text in growing.outputs(SMALL, ("", "答案A"), ("x",)).items()}
    assert max(times.values()) < 2  # cubic rules take minutes here
    worst = max(times, key=times.get)
    first, second = (
        min(growing.seconds(read, growing.outputs(size, ("", "答案A"), ("x",))[worst]) for _ in range(3))
        for size in (SMALL, LARGE)
    )
    # Four times the length: 4 if linear, 16 if quadratic; below a few milliseconds the clock decides.
    assert second < max(9 * first, 0.02), (worst, first, second)


@pytest.mark.parametrize(
    "text", ["答案" + 100 * " " + "x", "答案" + 150 * " ", 1000 * "\n", 50_000 * "\n", 200_000 * " "]
)
def test_the_outputs_that_hung(text):
    assert growing.seconds(lambda one: parse(one, growing.QUESTION), text) < 0.5


def test_an_answer_at_either_end_of_an_endless_output_is_read():
    middle = "患者可以考虑进一步检查。" * 10_000
    assert parse(f"{middle}\n答案: B", growing.QUESTION) == "B"
    assert parse(f"答案: B\n解析: {middle}", growing.QUESTION) == "B"
