"""The exams' own files where this machine has them: in data/raw, where the README puts them, or beside the project."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "data" / "raw", *(ROOT.parent / "shared" / "data" / exam for exam in ("cmexam", "cmb")))


def find(name: str) -> Path:
    """Return a released file; it does not exist where no folder has it."""
    places = [folder / name for folder in FOLDERS]
    return next((place for place in places if place.is_file()), places[0])
