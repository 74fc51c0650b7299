"""Duplicates, overlap with tests and suspicious answers in question files, and files without them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.cli import File, Flag, Folder
from cmexam_tune.core.errors import UserError
from cmexam_tune.quality.findings import (
    DEFAULT_DROP,
    REASONS,
    Checked,
    check_files,
    check_reasons,
    names_of,
)

EPILOG = f"""writes to DIR, and changes nothing else:
  check.json, check.md, check.html     counts, every finding, the pairs side by side with their differences marked
  <stem>.clean.questions.jsonl         for each of --questions: the questions that are safe to train on
  <stem>.overlap.jsonl                 each pair with its score and reason; `evaluate --overlap` reads it

--questions is what you train on; --against are the tests and whatever else must not be in it. Near duplicates are
found by MinHash over character 5-grams of stem and sorted options (128 permutations), then compared exactly: a
Jaccard similarity from 0.7 on is a duplicate, 0.5 to 0.7 is for a person to judge (listed as `similar`, not
dropped). Matching questions share all options and differ in a word of the stem: where their answers differ too,
they are listed as `sibling`. A question with 16 similar ones or more is listed with the most similar and with one
that it repeats, not with all.

reasons for --drop: {", ".join(REASONS)}
`exact`, `near`, `stem` and `case` drop questions that are in an --against file; `duplicate` drops repetitions within
--questions (the first stays); `contradiction` drops both of two questions that differ in the answer only.

examples:
  cmexam-tune check --questions train.questions.jsonl --against val.questions.jsonl test.questions.jsonl --out checked
  cmexam-tune check --questions cmb.questions.jsonl --against test.questions.jsonl --drop exact,near,mojibake --out c
"""


def check(
    questions: Sequence[str | Path],
    against: Sequence[str | Path] = (),
    out: str | Path | None = None,
    *,
    drop: Annotated[Sequence[str], Flag("a,b", separator=",")] = DEFAULT_DROP,
    overwrite: bool = False,
) -> Checked:
    """Check question files, and write what was found to the folder `out` where one is given.

    Args:
        questions: files to check, for example those to train on.
        against: files whose questions must not be among them, for example the tests.
        out: folder to write to.
        drop: reasons to leave a question out of `<stem>.clean.questions.jsonl`.
        overwrite: replace files of an earlier call.

    Raises:
        UserError: a file is missing or empty, two have one name, or an output exists and `overwrite` is false.
        ConfigError: an unknown reason.
    """
    check_reasons(drop)
    checked = [files.check_input(path) for path in questions]
    references = [files.check_input(path) for path in against]
    names = names_of([*checked, *references])
    targets = [] if out is None else _targets(Path(out), list(names)[: len(checked)], overwrite)
    if taken := {path.resolve() for path in targets} & {path.resolve() for path in names.values()}:
        raise UserError(f"{taken.pop()}: would be replaced by the result of its own check. Choose another --out.")
    result = check_files(checked, references, drop)
    if out is not None:
        _write(result, names, Path(out))
    return result


def _targets(out: Path, names: Sequence[str], overwrite: bool) -> list[Path]:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, --out needs a folder.")
    of_files = [f"{name}.{part}" for name in names for part in ("clean.questions.jsonl", "overlap.jsonl")]
    return [files.check_output(out / name, overwrite) for name in (*of_files, "check.json", "check.md", "check.html")]


def _write(result: Checked, paths: dict[str, Path], out: Path) -> None:
    from cmexam_tune.quality import check_page

    for name in result.questions:
        with files.atomic_write(out / f"{name}.clean.questions.jsonl") as handle:
            dropped = result.dropped[name]
            for line, value in jsonl.read_objects(paths[name]):
                if line not in dropped:
                    handle.write(jsonl.dumps(value) + "\n")
        with files.atomic_write(out / f"{name}.overlap.jsonl") as handle:
            for pair in result.overlaps:
                if pair.file == name:
                    handle.write(jsonl.dumps(asdict(pair)) + "\n")
    texts = {
        "check.json": json.dumps(result.to_dict(), ensure_ascii=False, indent=1) + "\n",
        "check.md": check_page.markdown(result),
        "check.html": check_page.page(result, paths),
    }
    for name, text in texts.items():
        with files.atomic_write(out / name) as handle:
            handle.write(text)


@cli.program(check, EPILOG)
def main(*, questions: Sequence[File], against: Sequence[File] = (), out: Folder, **options: Any) -> None:
    """Find duplicates, overlap with tests, and suspicious questions."""
    result = check(questions, against, out, **options)
    from cmexam_tune.quality import check_page

    for table in check_page.tables(result):
        cli.say(table.text() + "\n")
    cli.say(f"written to {out}")


if __name__ == "__main__":
    cli.run(main)
