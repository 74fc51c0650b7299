"""Asking a question, in one way for all programs.

In: a question and a style. Out: what the model reads, and what it should write. Start reading in `styles.py`, the words
of a question; `templates.py` is what a model's own format puts around them.
"""

from cmexam_tune.prompts.asked import Asked, Dialogue
from cmexam_tune.prompts.styles import (
    STYLES,
    Style,
    Unrenderable,
    answer_head,
    fewshot,
    plainly,
    prompt,
    render,
    shorten_stem,
    style_named,
)
from cmexam_tune.prompts.templates import TEMPLATES, Template, template, wrap

__all__ = [
    "STYLES",
    "TEMPLATES",
    "Asked",
    "Dialogue",
    "Style",
    "Template",
    "Unrenderable",
    "answer_head",
    "fewshot",
    "plainly",
    "prompt",
    "render",
    "shorten_stem",
    "style_named",
    "template",
    "wrap",
]
