"""Asking a question, in one way for all programs.

In: a question and the section `prompt` of a config. Out: what the model reads, and what it should write. Start reading
in `styles.py`, the words of a question; `asked.py` puts examples before them (`shots.py`) and options into another
order (`order.py`); `chat_template.py` is what a model's own format puts around them.
"""

from cmexam_tune.prompts.builder import (
    Asked,
    Asking,
    Dialogue,
    Message,
    plainly,
    rounds,
)
from cmexam_tune.prompts.chat_template import (
    TEMPLATES,
    ChatTemplate,
    template,
    wrap,
)
from cmexam_tune.prompts.shots import Shots
from cmexam_tune.prompts.styles import (
    STYLES,
    Style,
    Unrenderable,
    answer_head,
    prompt,
    render,
    shorten_stem,
    style_given,
    style_named,
    style_of,
)

__all__ = [
    "STYLES",
    "TEMPLATES",
    "Asked",
    "Asking",
    "ChatTemplate",
    "Dialogue",
    "Message",
    "Shots",
    "Style",
    "Unrenderable",
    "answer_head",
    "plainly",
    "prompt",
    "render",
    "rounds",
    "shorten_stem",
    "style_given",
    "style_named",
    "style_of",
    "template",
    "wrap",
]
