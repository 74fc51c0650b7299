"""`cmexam-tune chat`: ask a trained model questions in the terminal."""

import sys
from collections.abc import Iterator

from cmexam_tune.core import cli
from cmexam_tune.core.cli import Folder, Override, Recipe
from cmexam_tune.core.errors import UserError

EPILOG = """A message may have several lines; an empty line sends it. A question with lines of options (A ..., B ...) is
asked in the words that the model was trained on. /help lists the commands.

examples:
  cmexam-tune chat --run runs/lora_llama generation.max_new_tokens=256
  cmexam-tune chat --config zeroshot_qwen model.model_name_or_path=/models/Qwen2.5-7B-Instruct"""
HELP = """/help    this list
/reset   forget the conversation
/exit    end it (also /quit, Ctrl-D)
A message ends with an empty line. Options on lines of their own (A ..., B ...) make it an exam question."""


def decoded(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines of a text stream.

    Raises:
        UserError: they are not UTF-8.
    """
    try:
        for line in lines:
            # Where the locale is C, Python reads bytes that are no text as lone surrogates.
            line.encode()
            yield line
    except UnicodeError:
        raise UserError(
            "standard input: not UTF-8. Set the terminal to UTF-8; a file is converted by `iconv -f GB18030 -t UTF-8`."
        ) from None


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


@cli.program(None, EPILOG)
def main(*overrides: Override, run: Folder | None = None, config: Recipe | None = None) -> None:
    """Ask a trained model questions in the terminal.

    Args:
        run: a run folder of cmexam-tune train.
        config: a recipe whose model answers as it is.
    """
    from cmexam_tune.inference import conversation, loading

    settings, loaded = loading.load_writer(cli.exactly_one(run=run, config=config), overrides)
    cli.note("Ask; an empty line sends. /help lists the commands.")
    if not conversation.remembers(settings, loaded):
        cli.note("This model's template has no form for earlier turns: every message stands for itself.")
    turns: list[dict[str, str]] = []
    for text in messages_of(decoded(sys.stdin)):
        if text.strip() in ("/exit", "/quit"):
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
            answer = conversation.reply(settings, loaded, turns).text
        except UserError as error:
            # Such as more tokens than the model has positions for: what was said before is still there.
            turns.pop()
            cli.note(str(error))
            continue
        turns.append({"role": "assistant", "content": answer})
        cli.say((answer or "(The model wrote nothing.)") + "\n")


if __name__ == "__main__":
    cli.run(main)
