"""`cmexam-tune recipes`: which recipes there are, and which of them is the one that is looked for."""

from typing import Annotated

from cmexam_tune.core import cli
from cmexam_tune.core.cli import Flag
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.variants import suggest
from cmexam_tune.report.papers import recipe_list
from cmexam_tune.report.papers.recipe_list import RecipeLine
from cmexam_tune.report.table import Table

HEAD = ("recipe", "base model", "exam", "method", "prompt", "hardware", "row of a paper", "published")
FEW = 3
"""So many recipes are shown with what their files say about them."""
EPILOG = """A word is looked for in all columns: a model, an exam (cmexam, cmb), a method (lora, ptuning, head, full), a
row of a paper, a card. Several words have to stand in the same line. With three recipes or fewer, what their files say
about them is printed too. `cmexam-tune train --config RECIPE --print-config` shows all settings of one.

examples:
  cmexam-tune recipes
  cmexam-tune recipes qwen
  cmexam-tune recipes huatuo cmb
  cmexam-tune recipes api"""


def recipes(*words: str) -> list[RecipeLine]:
    """Return the recipes in which all words occur, in the order of the papers; without words every recipe.

    Args:
        words: parts of a recipe's name, model, exam, method, prompt, hardware or row, in either case.

    Raises:
        UserError: there is none; the message suggests the nearest name.
    """
    known = [line for lines in recipe_list.lines().values() for line in lines]
    chosen = [line for line in known if all(line.matches(word) for word in words)]
    if not chosen:
        near = suggest(words[0], [name for line in known for name in (line.recipe, line.row, line.model)])
        raise UserError(
            f"no recipe has {' and '.join(map(repr, words))} in it{near or '.'} `cmexam-tune recipes` lists all."
        )
    return chosen


@cli.program(recipes, EPILOG)
def main(*words: Annotated[str, Flag("WORD")]) -> None:
    """List the recipes: base model, exam, method, prompt, hardware, and the row of a paper that each reproduces.

    Args:
        words: show only recipes that have all of these in their line.
    """
    chosen = recipes(*words)
    shown = [tuple(vars(line).values()) for line in chosen]
    # Published numbers are eight columns wide, and the question here is which recipe.
    cli.say(Table(HEAD[:-1], tuple(line[:-1] for line in shown)).text())
    for line in chosen if len(chosen) <= FEW else ():
        comment = " ".join(recipe_list.about(line.recipe))
        cli.say(f"\n{line.recipe}: {comment}" if comment else f"\n{line.recipe}")
        if line.published != "-":
            cli.say(f"  published: {line.published}")
        program = "predict" if line.method == recipe_list.NOT_TUNED else "train"
        cli.say(f"  cmexam-tune {program} --config {line.recipe} ...")


if __name__ == "__main__":
    cli.run(main)
