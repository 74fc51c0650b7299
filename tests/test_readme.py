"""READMEs and guides say the same commands, name programs and recipes that exist, and link to files that do."""

import re
from pathlib import Path

import pytest

from cmexam_tune import __main__
from cmexam_tune.core import config
from cmexam_tune.paper import entries

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


def commands(path: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split("#")[0].split()) for line in lines if line.split("#")[0].strip()]


def test_two_languages_one_set_of_commands() -> None:
    assert commands(ROOT / "README.md") == commands(ROOT / "README.zh.md")
    assert commands(ROOT / "docs" / "quickstart.md") == commands(ROOT / "docs" / "quickstart.zh.md")
    assert len(commands(ROOT / "README.md")) > 10


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_programs_and_recipes_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for line in commands(path):
        for program in re.findall(r"(?:^|\s)cmexam-tune (\w+)", line):
            assert program in __main__.PROGRAMS, line
        for name in re.findall(r"--config (\w+)\.yaml", line):
            assert name in entries.known() and config.find_recipe(name), line
        for script in re.findall(r"bash (\w+/\w+\.sh)", line):
            assert (ROOT / script).is_file(), line


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
    chinese = set(commands(ROOT / "docs" / page))
    english = set(commands(ROOT / "docs" / page.replace(".zh", "")))
    if page not in ("data.zh.md", "quickstart.zh.md"):  # data.zh.md shows more, the English page says it in words
        assert chinese == english
