"""`cmexam-tune leaderboard`: a static site that ranks sealed results, all of them recomputed before it is written."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cmexam_tune.core import cli, files
from cmexam_tune.core.cli import File, Flag, Folder
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.progress import Progress
from cmexam_tune.evaluation.prediction_metadata import section
from cmexam_tune.evaluation.scorers import STANDARD
from cmexam_tune.interop.sealing import verifying
from cmexam_tune.interop.sealing.verifying import Verified
from cmexam_tune.report import identity, leaderboard_page
from cmexam_tune.report.leaderboard_page import Board, System
from cmexam_tune.report.papers import published_tables

PROGRAM = "leaderboard"
PAGE, NUMBERS = "index.html", "leaderboard.json"
EPILOG = """writes SITE/index.html (one file that needs no network, English and Chinese) and SITE/leaderboard.json (its
numbers). A folder that does not reproduce is refused and nothing is written; `evaluate --verify DIR` names everything.
Systems are compared where they answered the same questions; others get a ranking of their own.

examples:
  cmexam-tune leaderboard sealed/a sealed/b sealed/c --out site
  cmexam-tune leaderboard sealed/a sealed/b --questions test.questions.jsonl --published cmexam --out site
  cmexam-tune leaderboard --published cmexam,cmb --out site"""


def leaderboard(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    questions: File | None = None,
    published: Annotated[Sequence[str], Flag("NAME,...", separator=",")] = (),
    overwrite: bool = False,
) -> list[Board]:
    """Recompute sealed results, write the site and return its rankings.

    Args:
        folders: what `export --results` wrote.
        out: folder of the site.
        questions: the questions with their texts: nothing is taken over then; all folders must be of them.
        published: published rows to show, marked as such: cmexam, cmb, cmb-cot, cmb-3shot, cmb-cot-3shot.
        overwrite: replace a site at `out`; nothing else is ever replaced.

    Raises:
        UserError: a folder that does not reproduce, two systems of one name, or nothing to show.
    """
    if not folders and not published:
        raise UserError("nothing to show: name sealed folders (`export --results`), or --published cmexam,cmb.")
    target = files.check_folder(out, PROGRAM, overwrite, keep=folders)
    steps = Progress("leaderboard", "folders", len(folders), shown=bool(folders))
    verified = [verifying.verify(folder, questions) for folder in steps.each(folders)]
    _refuse(verified)
    boards = _boards(verified, published)
    with files.new_folder(target, PROGRAM, overwrite) as folder:
        (folder / PAGE).write_text(leaderboard_page.page(boards), encoding="utf-8")
        files.write_json(folder / NUMBERS, leaderboard_page.numbers(boards))
    return boards


def _refuse(verified: Sequence[Verified]) -> None:
    """Refuse folders that do not reproduce, or that cannot stand in one ranking."""
    if broken := [item for item in verified if item.problems]:
        lines = [f"{item.folder}: does not reproduce: {item.problems[0]}" for item in broken]
        raise UserError("\n".join([*lines, "Nothing was written; `evaluate --verify DIR` names everything."]))
    heads = [item.head for item in verified if item.head is not None]
    names = Counter((head.name, head.questions_sha256) for head in heads)
    if twice := [name for (name, _), count in names.items() if count > 1]:
        raise UserError(
            f"{twice[0]}: two systems of this name. Seal one again with `export --results ... --name NAME`."
        )
    keys: dict[str, Verified] = {}
    for item, head in zip(verified, heads, strict=True):
        first = keys.setdefault(head.questions_sha256, item)
        if first.questions != item.questions:
            raise UserError(
                f"{item.folder}: other keys or facets than {first.folder}, of the same questions. One of them was "
                "changed; --questions FILE tells which."
            )


def _boards(verified: Sequence[Verified], published: Sequence[str]) -> list[Board]:
    """Return a ranking for each set of questions, and one for each paper whose questions none of them are."""
    groups: dict[str, list[Verified]] = {}
    for item in verified:
        assert item.head is not None
        groups.setdefault(item.head.questions_sha256, []).append(item)
    boards = []
    unplaced = list(dict.fromkeys(published))
    for members in groups.values():
        systems = [_system(item) for item in members]
        exam = leaderboard_page.questions_of(systems)
        beside = [published_tables.beside(name, exam) for name in unplaced]
        # Numbers of other questions never stand in one ranking with these.
        of_these = [rows for rows in beside if not rows.caveat]
        unplaced = [name for name, rows in zip(unplaced, beside, strict=True) if rows.caveat]
        title = systems[0].identity.questions.removesuffix(".questions.jsonl")
        boards.append(leaderboard_page.board(title, systems, of_these))
    boards += [Board(name, (), [published_tables.beside(name, ())]) for name in unplaced]
    return boards


def _system(item: Verified) -> System:
    assert item.head is not None and item.derived is not None
    head, derived, values = item.head, item.derived, item.metadata.values
    who = identity.identify(item.metadata, head.questions, len(item.questions), STANDARD, head.date)
    library = section(values, "versions").get("transformers")
    decoding = item.metadata.decoding
    engine = [f"transformers {library}"] if library else []
    engine += [f"temperature {decoding[1]:g}"] if decoding else []
    return System(
        name=head.name,
        identity=who,
        graded=derived.graded,
        scores=derived.scores,
        by_facet=derived.by_facet,
        option_orders=derived.option_orders,
        engine=", ".join(engine) or "-",
        code=f"cmexam_tune {head.code.get('cmexam_tune', '-')}",
        seal=item.seal,
        taken_over=None if item.with_texts else sum(map(len, derived.readings.values())),
    )


@cli.program(leaderboard, EPILOG)
def main(
    *folders: Annotated[str, Flag("DIR")],
    out: Folder,
    questions: File | None = None,
    published: Annotated[Sequence[str], Flag("NAME,...", separator=",")] = (),
    overwrite: bool = False,
) -> None:
    """Rank sealed results on a static site; every score is recomputed first."""
    boards = leaderboard(folders, out, questions=questions, published=published, overwrite=overwrite)
    for board in boards:
        if board.systems:
            cli.say(f"{leaderboard_page.ranking(board)}\n")
    cli.say(str(Path(out) / PAGE))


if __name__ == "__main__":
    cli.run(main)
