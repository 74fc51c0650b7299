"""`cmexam-tune train`: tune a model by a recipe and leave a run folder."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cmexam_tune.config import Config, load_config
from cmexam_tune.core import cli, libraries
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.quality import contamination
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.run_directory import run as runs
from cmexam_tune.training.run_directory import starting


def train(
    config: Config | str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    trust_checkpoint: bool = False,
) -> runs.Run:
    """Train one experiment; started again it goes on where it was, and a finished run is returned as it is.

    Args:
        config: a Config, or the path or name of a recipe.
        overrides: `section.key=value` changes to a recipe.
        resume: refuse to start anew where there is nothing to resume.
        overwrite: replace another run in `out`, once the new one has taken its first step.
        trust_checkpoint: resume a DeepSpeed checkpoint that somebody else wrote; reading it can run code.

    Returns:
        The run: its folder, config and final metrics.

    Raises:
        UserError: a config, data or a run folder that cannot be used.
        TrainingStopped: training degenerated; the message says at which step, why, and what helps.

    Example:
        `run = train("lora_llama.yaml", ["model.model_name_or_path=/models/llama", "out=runs/try"])`
    """
    libraries.quiet()
    if not isinstance(config, Config):
        config = load_config(config, overrides)
    elif overrides:
        raise ConfigError("overrides change a recipe; with a Config use dataclasses.replace.")
    run = starting.resolve_run(config, overwrite=overwrite, resume=resume)
    if run.finished and not overwrite:
        if os.environ.get("RANK", "0") == "0":
            cli.note(f"{run.path}: this run has finished; nothing to do. --overwrite trains it again.")
        return run
    questions, validation = question_files(config)
    _warn_of_leaks(config)
    from cmexam_tune.training import loop

    return loop.fit(run, questions, validation, overwrite=overwrite, trusted=trust_checkpoint)


def question_files(config: Config) -> tuple[QuestionFiles, QuestionFiles]:
    """Return the training and the validation questions; nothing is read yet.

    Raises:
        UserError: a file that is missing or empty, or no training file at all.
    """
    data = config.data
    order = config.training.seed if data.shuffle_options else None
    train = QuestionFiles.of(data.train, data.max_train_samples, "train", data.mixture, order)
    return train, QuestionFiles.of(data.validation, data.max_eval_samples, "validation")


def _warn_of_leaks(config: Config) -> None:
    """Tell whose questions for validation or test are also trained on."""
    held_out = [path for path in (*config.data.validation, *config.data.test) if Path(path).is_file()]
    if held_out and os.environ.get("RANK", "0") == "0" and (text := contamination.warning(config.data.train, held_out)):
        cli.note(text)


class _PrintSchema(argparse.Action):
    """Like `--version`: prints, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from cmexam_tune.config import describing

        cli.say(json.dumps(describing.json_schema(), ensure_ascii=False, indent=1))
        parser.exit()


def _settings(argv: Sequence[str]) -> str:
    """Return what `--help` says about the keys of a recipe, which takes a moment to collect."""
    if not {"-h", "--help"} & {*argv}:
        return ""
    from cmexam_tune.config import describing

    return f"\n\n{describing.help_text()}"


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and train."""
    parser = cli.Parser(
        "train",
        "Fine-tune a model by a recipe. The same command, started again, resumes from the last checkpoint.",
        "examples:\n"
        "  cmexam-tune train --config lora_llama.yaml model.model_name_or_path=/models/llama-7b out=runs/lora\n"
        "  cmexam-tune train --config ptuning_chatglm.yaml --dry-run\n"
        "  torchrun --nproc_per_node 8 -m cmexam_tune.train --config lora_llama.yaml training.deepspeed=zero2\n"
        "  deepspeed --module cmexam_tune.train --config lora_llama.yaml training.deepspeed=zero3" + _settings(argv),
    )
    cli.add_config(parser)
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--schema", nargs=0, action=_PrintSchema, help="print the JSON Schema of recipes for editors")
    parser.add_argument("--dry-run", action="store_true", help="print parameters, memory, steps and hours, and stop")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint; never start anew")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another run in out, which is kept until the first step"
    )
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="resume another user's DeepSpeed checkpoint; it can run code",
    )
    parser.add_argument("--verbose", action="store_true", help="show what the libraries print, too")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1, help="set by the launcher")
    got = parser.parse_intermixed_args(list(argv))
    if got.verbose:
        os.environ["CMEXAM_TUNE_VERBOSE"] = "1"
    config = load_config(got.config, got.overrides)
    if got.print_config:
        from cmexam_tune.config import describing

        cli.say(describing.show_config(config).rstrip())
        return None
    if got.dry_run:
        from cmexam_tune.training import estimate

        cli.say(str(estimate.dry_run(config, question_files(config)[0])))
        return None
    run = train(config, resume=got.resume, overwrite=got.overwrite, trust_checkpoint=got.trust_checkpoint)
    if os.environ.get("RANK", "0") == "0":
        cli.say(str(run.path))
    return None


if __name__ == "__main__":
    cli.run(main)
