"""READMEs and guides say the same commands in both languages and link to files that exist."""

import re
from pathlib import Path

import pytest
from docs_blocks import NAMES, PAGES, ROOT, commands

from cmexam_tune.report.papers import entries


def test_two_languages_one_set_of_commands() -> None:
    assert commands(ROOT / "README.md") == commands(ROOT / "README.zh.md")
    assert len(commands(ROOT / "README.md")) > 10


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_the_map_names_every_part() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    parts = {path.parent.name for path in ROOT.glob("cmexam_tune/*/__init__.py")}
    assert {part for part in parts if f"`{part}/`" not in text} == set()


def test_published_numbers_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"`(\w+)` \| ([\d.]+), ([\d.]+|-)", text)
    assert len(found) == 8
    for recipe, accuracy, f1 in found:
        published = entries.find(recipe).published
        assert float(accuracy) == published.get("accuracy", published.get("accuracy_macro"))
        assert f1 == "-" or float(f1) == published["weighted_f1"]


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.zh.md")))
def test_a_guide_in_chinese_has_the_commands_of_the_english_one(page: str) -> None:
    assert commands(ROOT / "docs" / page) == commands(ROOT / "docs" / page.replace(".zh", ""))
