"""Asking a question, in one way for all programs.

In: a question and the section `prompt` of a config. Out: what the model reads, and what it should write. Start reading
in `styles.py`, the words of a question; `builder.py` puts examples before them (`shots.py`) and options into another
order (`order.py`); `chat_template.py` is what a model's own format puts around them, `dialogue.py` asks the
turns of a case, `formats.py` has other tools' keys.
"""

from cmexam_tune.prompts.builder import (
    Dialogue,
    Message,
    PromptBuilder,
    PromptRequest,
    default_prompts,
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
    resolve_style,
    shorten_stem,
)

__all__ = [
    "STYLES",
    "TEMPLATES",
    "ChatTemplate",
    "Dialogue",
    "Message",
    "PromptBuilder",
    "PromptRequest",
    "Shots",
    "Style",
    "Unrenderable",
    "answer_head",
    "default_prompts",
    "prompt",
    "render",
    "resolve_style",
    "rounds",
    "shorten_stem",
    "template",
    "wrap",
]
