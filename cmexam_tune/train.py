"""`cmexam-tune train`: tune a model by a recipe and leave a run folder."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cmexam_tune.config import Config, load_config
from cmexam_tune.core import cli, libraries
from cmexam_tune.core.cli import Flag, Override, Recipe
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.quality import contamination
from cmexam_tune.training.data.questions import question_files
from cmexam_tune.training.objectives import Objective
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
        config: a YAML file, or the name of a shipped recipe; from Python also a Config.
        overrides: changes to the recipe, for example `training.learning_rate=2e-4`; see below.
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
    config = decide_evaluation(config)
    run = starting.resolve_run(config, overwrite=overwrite, resume=resume)
    if run.finished and not overwrite:
        if _is_first():
            cli.note(f"{run.path}: this run has finished; nothing to do. --overwrite trains it again.")
        return run
    questions, validation = question_files(config)
    data, adapter = config.data, config.model.adapter_name_or_path
    if _is_first():
        for text in contamination.warnings(data.train, [*data.validation, *data.test], runs.learnt_files(adapter)):
            cli.note(text)
    from cmexam_tune.training import loop

    return loop.fit(run, questions, validation, overwrite=overwrite, trusted=trust_checkpoint)


def _is_first() -> bool:
    """Return whether this is the process that speaks for all that a launcher has started."""
    return os.environ.get("RANK", "0") == "0"


def decide_evaluation(config: Config) -> Config:
    """Return the config with nothing to evaluate while training where it names no validation questions, with a note.

    Raises:
        ConfigError: early stopping without validation questions, or choices of the best checkpoint that nothing would
            decide.
    """
    training = config.training
    values = training.arguments
    evaluates = values.get("eval_strategy", "no") != "no"
    metric = values.get("metric_for_best_model", "loss" if values.get("load_best_model_at_end") else None)
    known = ["loss"] * Objective.named(training.objective).has_validation_loss + ["exam_accuracy"]
    if metric is not None and str(metric).removeprefix("eval_") not in known:
        raise ConfigError(f"training.metric_for_best_model={metric}: known are {' and '.join(known)}.")
    if training.early_stopping_patience is not None:
        if metric is None or not evaluates:
            raise ConfigError(
                "training.early_stopping_patience needs training.eval_strategy (steps or epoch) and "
                "training.metric_for_best_model (loss or exam_accuracy)."
            )
        if not config.data.validation:
            raise ConfigError("training.early_stopping_patience: needs validation questions. Set data.validation.")
    dropped = [key for key in ("eval_strategy", "load_best_model_at_end") if values.get(key) not in (None, "no", False)]
    if config.data.validation or not dropped:
        return config
    names = " and ".join(f"training.{key}" for key in dropped)
    if _is_first():
        cli.note(f"note: data.validation is empty, so nothing is evaluated while training ({names} without effect)")
    arguments = {key: value for key, value in values.items() if key not in dropped}
    return replace(config, training=replace(training, arguments=arguments))


EXAMPLES = """examples:
  cmexam-tune train --config lora_llama.yaml model.model_name_or_path=/models/llama-7b out=runs/lora
  cmexam-tune train --config ptuning_chatglm.yaml --dry-run
  torchrun --nproc_per_node 8 -m cmexam_tune.train --config lora_llama.yaml training.deepspeed=zero2
  deepspeed --module cmexam_tune.train --config lora_llama.yaml training.deepspeed=zero3

"""


def _epilog() -> str:
    from cmexam_tune.config import describing

    return EXAMPLES + describing.help_text()


@cli.program(train, _epilog)
def main(
    *overrides: Override,
    config: Recipe | None = None,
    print_config: bool = False,
    schema: bool = False,
    dry_run: bool = False,
    card: Annotated[str | None, Flag("NAME")] = None,
    verbose: bool = False,
    local_rank: Annotated[int, Flag(names=("--local_rank", "--local-rank"))] = -1,
    **options: Any,
) -> None:
    """Fine-tune a model by a recipe. The same command, started again, resumes from the last checkpoint.

    Args:
        print_config: print the resolved configuration and stop.
        schema: print the JSON Schema of recipes for editors and stop.
        dry_run: check everything that training checks, print parameters, memory, steps and hours, and stop.
        card: with --dry-run: for another card than this machine's: V100-16GB, 4090, A100-80GB, H100, 910B, ...
        verbose: show what the libraries print, too.
        local_rank: set by the launcher.
    """
    if verbose:
        os.environ["CMEXAM_TUNE_VERBOSE"] = "1"
    if schema:
        from cmexam_tune.config import describing

        cli.say(json.dumps(describing.json_schema(), ensure_ascii=False, indent=1))
        return
    if config is None:
        raise cli.WrongUsage("the following arguments are required: --config")
    if card and not dry_run:
        raise cli.WrongUsage("--card belongs to --dry-run.")
    experiment = load_config(config, overrides)
    if print_config:
        from cmexam_tune.config import describing

        cli.say(describing.show_config(experiment).rstrip())
    elif dry_run:
        libraries.quiet()
        experiment = decide_evaluation(experiment)
        starting.resolve_run(experiment, **{name: options.get(name, False) for name in ("overwrite", "resume")})
        questions, _ = question_files(experiment)
        data, earlier = experiment.data, runs.learnt_files(experiment.model.adapter_name_or_path)
        for text in contamination.warnings(data.train, [*data.validation, *data.test], earlier):
            cli.note(text)
        from cmexam_tune.training import estimate

        cli.say(str(estimate.dry_run(experiment, questions, card)))
    else:
        run = train(experiment, **options)
        if _is_first():
            cli.say(str(run.path))


if __name__ == "__main__":
    cli.run(main)
