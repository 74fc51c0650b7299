"""Where scores come from: checksums of the files, how predictions were made, and versions."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cmexam_tune import __version__
from cmexam_tune.core import documents, files
from cmexam_tune.core.errors import DataError
from cmexam_tune.evaluation import notes
from cmexam_tune.report.identity import portable

_LIBRARIES = ("rapidfuzz", "sacrebleu", "rouge-score", "jieba")


def collect(sources: Mapping[str, Sequence[str | Path]]) -> dict[str, Any]:
    """Return what report.json says under `provenance`; folders of this machine are left out.

    Args:
        sources: `questions`, `predictions` and `baseline` -> files.

    Raises:
        DataError: the note beside a predictions file is broken.
    """
    versions = {"cmexam_tune": __version__, "python": platform.python_version()}
    return {
        **{name: [_origin(Path(path)) for path in paths] for name, paths in sources.items()},
        "versions": versions | {name: version(name) for name in _LIBRARIES},
    }


def made_by(path: str | Path) -> Any:
    """Return the note that predict left beside its predictions; None where there is none.

    Raises:
        DataError: it is broken.
    """
    note = Path(f"{path}.meta.json")
    return documents.read_json(note, "note of predict") if note.is_file() else None


def option_order(note: object) -> str | None:
    """Return the order in which predict showed the options, by its note.

    Raises:
        DataError: there is no such order.
    """
    if (found := notes.prompt(note).get("option_order")) is None:
        return None
    from cmexam_tune.config.schema import check_order  # pydantic, for this rare setting only

    try:
        check_order(str(found))
    except ValueError as error:
        raise DataError(f"the note beside the predictions: {error}.") from None
    return str(found)


def _origin(path: Path) -> dict[str, Any]:
    origin: dict[str, Any] = {"path": portable(str(path)), "sha256": files.sha256(path)}
    if (note := made_by(path)) is not None:
        origin["made_by"] = portable(note)
    return origin


def names(paths: Sequence[str | Path]) -> list[str]:
    """Return what files are called where nobody has named them: as given, absolute paths from where they differ."""
    given = [str(path) for path in paths]
    absolute = [Path(path) for path in given if Path(path).is_absolute()]
    if not absolute:
        return given
    parents = [set(path.parent.parents) | {path.parent} for path in absolute]
    shared = max(set.intersection(*parents), key=lambda path: len(path.parts))
    return [str(Path(path).relative_to(shared)) if Path(path).is_absolute() else path for path in given]
