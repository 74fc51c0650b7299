"""The project's documents: their blocks, their commands, and what they say a command needs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("*/*/README.md")})
PAGES = [page for page in PAGES if not page.relative_to(ROOT).parts[0].startswith((".", "tests"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LANGUAGES = {"bash", "python", "yaml", "json", "text"}
NEEDS = {
    "weights": "权重",  # tests put tiny models in their place
    "a server": "服务",  # tests put a small one in its place
    "card": "显卡",  # these three are parsed only
    "the network": "联网",
    "minutes": "几分钟",
}
PARSED_ONLY = {"card", "the network", "minutes"}
MARK = re.compile(r"# (?:needs|takes|需要|耗时) ?(.*)")


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    assert text.count("\n```") % 2 == 0, f"{page}: a fence is not closed"
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def shell(page: Path) -> list[str]:
    """Return the shell blocks of a page."""
    return [block.text for block in blocks(page) if block.language == "bash"]


def needs(comment: str) -> set[str] | None:
    """Return what a comment line says that the commands below it need; None: it is another comment."""
    if not (found := MARK.fullmatch(comment.strip())):
        return None
    named = {english for english, chinese in NEEDS.items() if english in found[1] or chinese in found[1]}
    assert named, f"{comment}: names none of {NEEDS}"
    return named


def marked(block: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each line with what it needs: a mark holds to the next empty line."""
    wanted: set[str] = set()
    for line in block.splitlines():
        if not line.strip():
            wanted = set()
        wanted = named if (named := needs(line)) is not None else wanted
        yield line, wanted


def commands(page: Path) -> list[tuple[str, frozenset[str]]]:
    """Return the commands of a page, without comments, each with what it needs."""
    found, words = [], ""
    for block in shell(page):
        for line, wanted in marked(block):
            words += " " + line.removesuffix("\\").strip()
            if not line.endswith("\\"):
                if plain := " ".join(re.split(r"(?:^|\s)#", words)[0].split()):
                    found.append((plain, frozenset(wanted)))
                words = ""
    return found


def inline(page: Path) -> list[str]:
    """Return the commands that stand inside sentences and tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def split(command: str) -> list[str]:
    """Return a command's words without the dots that stand for the rest of it."""
    return [word for word in shlex.split(command) if word not in ("...", "…")]
