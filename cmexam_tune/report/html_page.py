"""The skeleton and the style of every HTML page of this project: one file that needs no network."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).with_name("assets")


def html_page(title: str, body: str, *, style: str = "", root: str = 'lang="en"') -> str:
    """Return a whole page.

    Args:
        title: Plain text.
        body: HTML; whatever in it came from a file or a model must be escaped already.
        style: CSS of this page, after what all pages share.
        root: Attributes of the element `html`.
    """
    shared = (ASSETS / "page.css").read_text(encoding="utf-8")
    # Nothing is fetched from anywhere, also not by what a model wrote: scripts and styles are those of the page itself.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f"<!doctype html>\n<html {root}>\n<head>\n"
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{shared}{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def in_both(en: str, zh: str) -> str:
    """Return plain text in two languages as HTML; the page shows one of them."""
    if en == zh:
        return html.escape(en)
    return f'<span class="en">{html.escape(en)}</span><span class="zh">{html.escape(zh)}</span>'


@dataclass(frozen=True)
class PageSection:
    """A part of a page that the bar at its top leads to."""

    id: str
    en: str
    zh: str
    body: str
    """HTML."""


def two_languages(
    en: str, zh: str, sections: Sequence[PageSection], script: str = "startFrame();", style: str = ""
) -> str:
    """Return a page in the report's style, whose reader chooses language and light or dark.

    Args:
        en: Title.
        zh: Title.
        sections: What it shows, in order.
        script: JavaScript, after that of the frame, which it starts.
        style: CSS of this page, after the report's.
    """
    style = (ASSETS / "report.css").read_text(encoding="utf-8") + style
    frame = (ASSETS / "frame.js").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{section.id}">{in_both(section.en, section.zh)}</a>' for section in sections)
    parts = "".join(
        f'<section id="{section.id}"><h2>{in_both(section.en, section.zh)}</h2>{section.body}</section>'
        for section in sections
    )
    body = (
        f"<header><h1>{in_both(en, zh)}</h1><nav>{links}</nav>"
        '<button id="lang" type="button">中文</button>'
        '<button id="theme" type="button" aria-label="light or dark">◐</button></header>\n'
        f'<main>{parts}</main>\n<script>"use strict";\n{frame}\n{script}</script>'
    )
    return html_page(f"{en} {zh}", body, style=style, root='lang="en" data-lang="en"')
