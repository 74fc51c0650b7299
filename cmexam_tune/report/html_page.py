"""The skeleton and the style of every HTML page of this project: one file that needs no network."""

import html
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
