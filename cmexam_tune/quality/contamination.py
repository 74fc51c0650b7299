"""Questions of one file that are in another: what `check` wrote, and a quick look before training."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.normalise import question_text
from cmexam_tune.evaluation.breakdowns import Subset, subset
from cmexam_tune.evaluation.comparison import Comparison
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.prompts import question_checks
from cmexam_tune.quality.errata import Erratum, by_erratum, known_problems
from cmexam_tune.quality.findings import WRONG_KEYS, Overlap, names_of, readable

SAME = ("exact", "contradiction", "near", "stem")
"""Reasons for which a question counts as seen; `similar`, `sibling` and `case` ask something else."""


def touched(path: str | Path, questions: str | Path) -> tuple[set[str], set[str]]:
    """Return the ids of a questions file that a file of `check` pairs with another, and the files that it speaks of.

    The file may be either side of the pairs: the tests that were held against, or what was checked.

    Raises:
        UserError: the file is missing.
        DataError: a line is no pair.
    """
    (name,) = names_of([Path(questions)])
    ids, files = set[str](), set[str]()
    for pair in _pairs(Path(path)):
        files |= {pair.file, pair.other_file}
        if pair.reason in SAME:
            ids |= {i for i, file in ((pair.id, pair.file), (pair.other_id, pair.other_file)) if file == name}
    return ids, files


def subsets(
    graded: Sequence[Graded],
    comparison: Comparison | None,
    questions: Sequence[str | Path],
    path: str | Path | None,
    errata: Sequence[Erratum] = (),
) -> tuple[Subset, ...]:
    """Return the scores with and without what `check` found elsewhere (file `path`) and known errors of the exam.

    `errata` are further ones.

    Raises:
        UserError: there is a file of pairs and no file of questions that it could be about.
    """
    groups = {
        f"{name} ({text})": ids for (name, text), ids in by_erratum((item.question for item in graded), errata).items()
    }
    if path is not None:
        if len(questions) != 1:
            raise UserError(f"{path}: pairs are of files, so the questions must be given as one file.")
        ids, named = touched(path, questions[0])
        if not ids:
            cli.note(f"{path}: no pair of {questions[0]}; it is about {', '.join(sorted(named)) or 'nothing'}.")
        groups = {f"also in the files of {Path(path).name}": ids, **groups}
    return tuple(subset(name, graded, ids, comparison) for name, ids in groups.items())


def _pairs(path: Path) -> Iterator[Overlap]:
    if path.is_file() and not path.stat().st_size:
        return  # no pair was found
    for line, value in jsonl.read_objects(path):
        try:
            yield Overlap(**value)
        except TypeError:
            keys = ", ".join(Overlap.__dataclass_fields__)
            raise DataError(f"{path}:{line}: no pair of `cmexam-tune check` (needed: {keys}).") from None


def warnings(
    train: Sequence[str | Path], held_out: Sequence[str | Path], earlier: Sequence[str | Path] = ()
) -> list[str]:
    """Return what to tell about training questions: held out, with a doubtful key, or trained on in `earlier` files.

    Files held out or earlier that are not there are left out: test files often lie elsewhere than where one trains,
    and a warning is no reason to ask for them.
    """
    clean = f"Write a clean file with: cmexam-tune check --questions {' '.join(map(str, train))} --out checked"
    present = [path for path in dict.fromkeys(map(str, (*held_out, *earlier))) if Path(path).is_file()]
    repeated, doubtful_keys = look_through(train, present)
    texts = []
    if tests := [path for path in map(str, held_out) if path in repeated]:
        counts = ", ".join(f"{repeated[path]:,} of {path}" for path in tests)
        texts.append(
            f"warning: questions held out are also trained on: {counts}. Scores on them are partly memory. "
            f"{clean} --against {' '.join(tests)}"
        )
    if doubtful_keys:
        by_finding = ", ".join(f"{count:,} {name}" for name, count in doubtful_keys.items())
        texts.append(
            f"warning: the answer key of training questions is doubtful ({by_finding}), and what it says is learnt. "
            f"{clean} --drop {','.join(doubtful_keys)}"
        )
    if learnt := [path for path in map(str, earlier) if path in repeated]:
        counts = ", ".join(f"{repeated[path]:,} of {path}" for path in learnt)
        texts.append(
            f"warning: questions that model.adapter_name_or_path was trained on are trained on again: {counts}. "
            "Outputs for them are partly memory, and verdicts on them say little; leave them out with "
            "`select --against`."
        )
    return texts


def look_through(train: Iterable[str | Path], others: Sequence[str]) -> tuple[dict[str, int], Counter[str]]:
    """Return how many questions of each other file are trained on too, and how often each of `WRONG_KEYS` is found.

    Equal are questions with the same words and options, in any order; `check` finds near ones too. Lines that are no
    questions are left to whoever reads the files in earnest.
    """
    # Numbers in place of texts: the other files may be all of CMB-train.
    elsewhere: dict[int, set[tuple[str, int]]] = {}
    for path in others:
        for line, question in readable(Path(path)):
            elsewhere.setdefault(hash(question_text(question.stem, question.options)), set()).add((path, line))
    checks = {name: question_checks.CHECKS[name] for name in WRONG_KEYS if name in question_checks.CHECKS}
    repeated: set[tuple[str, int]] = set()
    findings: Counter[str] = Counter()
    for train_path in train:
        for _, question in readable(Path(train_path)):
            if elsewhere:
                repeated |= elsewhere.get(hash(question_text(question.stem, question.options)), set())
            findings.update(name for name, finds in checks.items() if finds(question) is not None)
            findings.update(name for name, _ in known_problems(question))
    return Counter(path for path, _ in repeated), findings
