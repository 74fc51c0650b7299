"""Seconds that each reader takes for outputs that grow: a reader whose time grows with the square can be made to hang.

    python benchmarks/growing.py [--sizes 2000 4000 8000] [--reader standard]

Each output is one short piece repeated, alone or behind a few words; printed is the slowest piece of each reader, its
seconds at each size, and the power with which they grow between the last two sizes (1 is linear).
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import answer_parsing, scorers

QUESTION = Question("q", "下列错误的是", {letter: f"选项{letter}的内容" for letter in "ABCDE"}, "B", kind="multiple")
PIECES = (
    *(
        " ",
        "\n",
        "\t",
        "\r\n",
        "　",
        "A",
        "a",
        "B ",
        "A、",
        "AB,",
        "a,",
        "(",
        ")",
        "[",
        "{",
        '{"',
        "【",
        "*",
        "`",
        "'",
        ":",
        "：",
    ),
    *(
        "答案",
        "答案是",
        "答案：",
        "答 案",
        "答案:A",
        "答案是A,",
        "答案为",
        "选",
        "选项",
        "选择",
        "正确",
        "错误",
        "不",
        "不正确是",
    ),
    *(
        "所以答案是",
        "解释:",
        "解析：",
        "是",
        "是：",
        "为",
        "考虑",
        "如果",
        "或许",
        "A是",
        "A对",
        "B错误",
        "A正确",
        "A当选",
        "项",
        "的",
    ),
    *(
        "answer",
        "answer is",
        "Answer:",
        "the option ",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "\\boxed{",
        "boxed{{",
    ),
    *(
        "**answer**",
        "## Final Response\n\n",
        "A。",
        "A和B",
        "A and ",
        "一",
        "1",
        ".",
        "。",
        "，",
        ",",
        ";",
        "Ａ",
        "\x00",
        "<think></think>",
        "<think>A</think>",
        "<answer>A</answer>",
        "答案：A，解释：",
        "选项A的内容",
    ),
)
BEFORE = ("", "答案", "答案是", "A", "选项", "因为不", "(")
AFTER = ("", "x", "A")


def readers() -> dict[str, Callable[[str], object]]:
    found: dict[str, Callable[[str], object]] = {
        name: partial(scorers.get(name).read, question=QUESTION)
        for name in scorers.names()
        if not name.startswith("standard-")
    }
    return {**found, "explanation": answer_parsing.split_explanation}


def seconds(read: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start


def outputs(size: int, fronts: Sequence[str] = BEFORE, ends: Sequence[str] = AFTER) -> dict[str, str]:
    """Return {what it is made of: an output of about `size` characters}."""
    return {
        f"{before!r} + n * {piece!r} + {after!r}": before + piece * (size // len(piece)) + after
        for before in fronts
        for piece in PIECES
        for after in ends
    }


def slowest(read: Callable[[str], object], size: int, limit: float = 1.0) -> tuple[str, float]:
    """Return the output that takes longest, and its seconds; stops at the first that takes longer than `limit`."""
    worst = ("", 0.0)
    for name, text in outputs(size).items():
        worst = max(worst, (name, seconds(read, text)), key=lambda one: one[1])
        if worst[1] > limit:
            break
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 4000, 8000])
    parser.add_argument("--reader", choices=readers())
    arguments = parser.parse_args()
    for name, read in readers().items():
        if arguments.reader not in (None, name):
            continue
        made_of, _ = slowest(read, arguments.sizes[0])
        times = [seconds(read, outputs(size)[made_of]) for size in arguments.sizes]
        power = math.log2(max(times[-1], 1e-6) / max(times[-2], 1e-6)) / math.log2(
            arguments.sizes[-1] / arguments.sizes[-2]
        )
        print(f"{name:<18}{'  '.join(f'{one:8.4f}' for one in times)}   n^{power:.1f}   {made_of}", flush=True)


if __name__ == "__main__":
    main()
