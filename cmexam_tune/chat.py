"""`cmexam-tune chat`: ask a trained model questions in the terminal."""

import argparse
import dataclasses
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core import cli, variants
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams._cells import Cells, Unreadable

if TYPE_CHECKING:
    from cmexam_tune.models.families import Loaded

EPILOG = """A message may have several lines; an empty line sends it. A question with lines of options (A ..., B ...) is
asked in the words that the model was trained on. /help lists the commands.

examples:
  cmexam-tune chat --run runs/lora_llama generation.max_new_tokens=256
  cmexam-tune chat --config zeroshot_qwen model.model_name_or_path=/models/Qwen2.5-7B-Instruct"""
HELP = """/help    this list
/reset   forget the conversation
/exit    end it (also Ctrl-D)
A message ends with an empty line. Options on lines of their own (A ..., B ...) make it an exam question."""
Messages = Sequence[Mapping[str, str]]
"""Turns as `{"role": "system" | "user" | "assistant", "content": text}`, the last one by the user."""


class Reply(NamedTuple):
    """What the model wrote, and how long prompt and reply were in tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class TooLong(UserError):
    """A conversation for which the model has no positions left."""


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add `--run DIR` or `--config NAME_OR_PATH`, and overrides."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="DIR", help="a run folder of cmexam-tune train")
    source.add_argument("--config", metavar="NAME_OR_PATH", help="a recipe whose model answers as it is")
    cli.add_overrides(parser)


def load(run: str | Path, overrides: Sequence[str] = ()) -> "tuple[Config, Loaded]":
    """Return the config and model of a run, or of a recipe whose model answers as it is, on the card if there is one.

    Raises:
        UserError: no finished run, or one whose model chooses among options and cannot write.
    """
    from cmexam_tune.inference import loading

    source = loading.open_source(run, overrides)
    family = source.config.model.family
    module: Any = variants.load("families", family)
    if module.task != "generate":
        raise UserError(f"{run}: a model of family {family} chooses an option and writes no text. Use predict.")
    if family == "endpoint":
        raise UserError(f"{run}: the model is behind an address already; talk to it there.")
    return source.config, loading.load(source)


def reply(config: Config, loaded: "Loaded", messages: Messages) -> Reply:
    """Return what the model says to the last message of a conversation.

    Earlier turns count where the model's template has a form for them, see `remembers`.

    Raises:
        TooLong: more tokens than the model has positions for.
        UserError: the last message is not the user's, or unusable generation settings.
    """
    prompt = asked(messages, prompts.style_of(config.prompt))
    # Where it samples, a conversation is not to be repeated.
    anew = dataclasses.replace(config.generation, seed=random.getrandbits(32))
    decoder = _decoder(dataclasses.replace(config, generation=anew), loaded)
    if not decoder.codec.remembers:
        prompt = dataclasses.replace(prompt, history=())
    _check_length(decoder, prompt)
    written = next(decoder.write([prompt]))
    return Reply(written.text.strip(), written.prompt_tokens, written.tokens)


def _check_length(decoder: Any, prompt: prompts.Asked) -> None:
    """Refuse more than the model has positions for: its attention would need memory without end."""
    (item,) = decoder.ask([prompt])
    most = getattr(decoder.model.config, "max_position_embeddings", None)
    if most is not None and len(item.ids) > most:
        raise TooLong(
            f"the conversation takes {len(item.ids):,} tokens, this model has {most:,} positions. Say it shorter, or "
            "forget what was said before with /reset."
        )


def remembers(config: Config, loaded: "Loaded") -> bool:
    """Return whether the model's template has a form for earlier turns; else every message stands for itself."""
    return bool(_decoder(config, loaded).codec.remembers)


def _decoder(config: Config, loaded: "Loaded") -> Any:
    family: Any = variants.load("families", config.model.family)
    return family.decoder(loaded, config)


def asked(messages: Messages, style: str | prompts.Style | None = None) -> prompts.Asked:
    """Return a conversation as the model is asked.

    Args:
        messages: they keep their roles and order, so that a template that has no form for them can refuse.
        style: puts the user's exam questions into its words; None: every message goes to the model as it is.

    Raises:
        UserError: the last message is not the user's.
    """
    if not messages or messages[-1]["role"] != "user":
        raise UserError("the last message must have the role user.")
    history: list[prompts.Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "user" and style is not None:
            content = in_style(content, style)
        history.append(prompts.Message(message["role"], content))
    last = history.pop()
    # Published wrappers have a place for a system text at the start, and only there.
    system = history.pop(0).content if history and history[0].role == "system" else None
    nothing = Question("chat", "?", {"A": "?", "B": "?"}, None)
    return prompts.Asked(nothing, lambda question: last.content, tuple(history), system)


def in_style(text: str, style: str | prompts.Style) -> str:
    """Return an exam question in the words of a style, and any other text as it is."""
    start = re.search(r"^\s*[(（]?[AaＡａ][\s.．、:：)）]", text, re.MULTILINE)
    if start is None or not text[: start.start()].strip():
        return text
    try:
        options = Cells().options(text[start.start() :].strip())
    except Unreadable:
        return text
    return prompts.prompt(Question("chat", text[: start.start()].strip(), options, None), style)


def messages_of(lines: Iterator[str]) -> Iterator[str]:
    """Yield messages of one or more lines that an empty line, a command or the end of the input ends."""
    message: list[str] = []
    for line in lines:
        if line.strip():
            message.append(line.rstrip("\n"))
        if message and (not line.strip() or message[0].startswith("/")):
            yield "\n".join(message)
            message = []
    if message:
        yield "\n".join(message)


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and talk until the input ends."""
    parser = cli.Parser("chat", "Ask a trained model questions in the terminal.", EPILOG)
    add_source(parser)
    got = parser.parse_intermixed_args(list(argv))
    config, loaded = load(got.run or got.config, got.overrides)
    cli.note("Ask; an empty line sends. /help lists the commands.")
    if not remembers(config, loaded):
        cli.note("This model's template has no form for earlier turns: every message stands for itself.")
    turns: list[dict[str, str]] = []
    for text in messages_of(sys.stdin):
        if text.strip() == "/exit":
            break
        if text.strip() == "/reset":
            turns.clear()
            cli.note("The conversation is forgotten.")
            continue
        if text.startswith("/"):
            cli.say(HELP if text.strip() == "/help" else f"{text.strip()}: unknown.\n{HELP}")
            continue
        turns.append({"role": "user", "content": text})
        try:
            answer = reply(config, loaded, turns).text
        except TooLong as error:
            turns.pop()
            cli.note(str(error))
            continue
        turns.append({"role": "assistant", "content": answer})
        cli.say((answer or "(The model wrote nothing.)") + "\n")
    return None


if __name__ == "__main__":
    cli.run(main)
