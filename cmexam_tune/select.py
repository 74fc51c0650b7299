"""Training data made of sampled answers that the answer key has judged."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.cli import File, Flag, Folder
from cmexam_tune.core.errors import UserError
from cmexam_tune.quality.selection import OUTCOMES, Make, Preference, Selection, SelectionRules
from cmexam_tune.quality.selection import select as judged

NAMES: dict[Make, str] = {
    "sft": "sft.questions.jsonl",
    "pairs": "pairs.questions.jsonl",
    "pool": "pool.questions.jsonl",
}
"""The file of each kind; all of them hold questions, which `check`, `stats` and `train` read."""

EPILOG = """writes to DIR:
  sft.questions.jsonl    --make sft: right outputs, their explanation in place of the question's
  pairs.questions.jsonl  --make pairs: a right (`chosen`) and a wrong output (`rejected`) of the same question
  pool.questions.jsonl   --make pool: questions that are sometimes answered right, with their `pass_rate`
  funnel.json, .html     what became of every question and output, by reason and by facet; outputs to look at

An output is right if it is finished, states exactly one answer in the form of the style that it was asked in, this is
the key's, and its explanation does not conclude with other letters. Questions that are in an --against file, or whose
key `check` doubts, are refused. `source` in each row says which model, prompt, seed and sample it comes from.

examples:
  cmexam-tune predict --run runs/lora_qwen --questions train.questions.jsonl --out votes.jsonl \\
      generation.votes=8 generation.do_sample=true generation.temperature=1.0
  cmexam-tune select --votes votes.jsonl --questions train.questions.jsonl --make sft --out selected/sft \\
      --against test.questions.jsonl
  cmexam-tune select --votes votes.jsonl --questions train.questions.jsonl --make pairs --out selected/pairs
  cmexam-tune select --votes votes.jsonl --questions train.questions.jsonl --make pool --out selected/pool \\
      --pass-rate 0.125,0.875 --easy-first
  cmexam-tune train --config sft_selected_qwen.yaml data.train=selected/sft/sft.questions.jsonl"""


def select(
    votes: str | Path,
    questions: str | Path,
    make: Make,
    out: str | Path,
    against: Sequence[str | Path] = (),
    *,
    per_question: int = 1,
    prefer: Preference = "shortest",
    length_ratio: float = 1.5,
    pass_rate: Annotated[Sequence[str], Flag("LOW,HIGH", separator=",")] = ("0.125", "0.875"),
    easy_first: bool = False,
    overwrite: bool = False,
) -> Selection:
    """Make training data of sampled outputs, and write it with its funnel to the folder `out`.

    Args:
        votes: predictions with several outputs for each question, as `predict` writes them with generation.votes.
        questions: the questions file that was asked.
        make: `sft` (right outputs), `pairs` (right against wrong ones) or `pool` (questions worth asking).
        out: folder to write to.
        against: files whose questions must not be trained on, for example the tests.
        per_question: outputs (pairs) kept of one question.
        prefer: with --make sft: the shortest right outputs, or the most diverse ones.
        length_ratio: with --make pairs: how many times as long as the shorter output the longer one may be.
        pass_rate: with --make pool: lowest and highest share of right outputs.
        easy_first: with --make pool: questions that are answered right most often come first.
        overwrite: replace files of an earlier call.

    Raises:
        UserError: a file that is missing or empty, an output that exists, limits that cannot be, or nothing selected.
    """
    if per_question < 1:
        raise UserError(f"--per-question {per_question}: at least 1 is needed.")
    if length_ratio < 1:
        raise UserError(f"--length-ratio {length_ratio}: the longer of two outputs is at least as long as the other.")
    rules = SelectionRules(make, per_question, prefer, length_ratio, _rates(pass_rate), easy_first)
    inputs = [files.check_input(path) for path in (votes, questions, *against)]
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, --out needs a folder.")
    targets = {
        name: files.check_output(folder / name, overwrite) for name in (NAMES[make], "funnel.json", "funnel.html")
    }
    if taken := {path.resolve() for path in targets.values()} & {path.resolve() for path in inputs}:
        raise UserError(f"{taken.pop()}: would be replaced by what is made of it. Choose another --out.")
    selection = judged(inputs[0], inputs[1], inputs[2:], rules)
    if not selection.rows:
        reasons = ", ".join(f"{OUTCOMES[name]}: {count}" for name, count in selection.funnel.questions.most_common(3))
        raise UserError(f"{votes}: nothing can be selected ({reasons}). Nothing was written.")
    _write(selection, folder, make)
    return selection


def _rates(given: Sequence[str]) -> tuple[float, float]:
    try:
        low, high = map(float, given)
    except ValueError:
        raise UserError(f"--pass-rate {','.join(given)}: two numbers are needed, for example 0.125,0.875.") from None
    if not 0 <= low <= high <= 1:
        raise UserError(f"--pass-rate {low:g},{high:g}: shares from 0 to 1 are needed, the lower one first.")
    return low, high


def _write(selection: Selection, folder: Path, make: Make) -> None:
    from cmexam_tune.quality import selection_page

    jsonl.write(folder / NAMES[make], selection.rows, overwrite=True)
    texts = {
        "funnel.json": json.dumps(selection.funnel.to_dict(), ensure_ascii=False, indent=1) + "\n",
        "funnel.html": selection_page.page(selection),
    }
    for name, text in texts.items():
        with files.atomic_write(folder / name) as handle:
            handle.write(text)


@cli.program(select, EPILOG)
def main(
    *,
    votes: File,
    questions: File,
    make: Make,
    out: Folder,
    against: Sequence[File] = (),
    **options: Any,
) -> None:
    """Make training data of sampled answers: right ones, right against wrong ones, or questions worth asking."""
    selection = select(votes, questions, make, out, against, **options)
    from cmexam_tune.quality import selection_page

    for table in selection_page.tables(selection.funnel):
        cli.say(table.text() + "\n")
    cli.say(f"{selection.funnel.rows:,} rows written to {Path(out) / NAMES[make]}")


if __name__ == "__main__":
    cli.run(main)
