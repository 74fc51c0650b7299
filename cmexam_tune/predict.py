"""Let a tuned or off-the-shelf model answer questions; predictions are appended as they come, and it can be resumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cmexam_tune.config import Config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.cli import File, Flag, Folder, Override, Recipe
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import prediction_metadata


def predict(
    source: str | Path | Config,
    questions: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
    limit: int | None = None,
    shard: str | None = None,
    join: bool = False,
) -> Path:
    """Answer a questions file and return the predictions file; lines come in the order in which they were answered.

    Args:
        source: a run folder; or a Config, or the path or name of a recipe, whose model answers as it is.
        questions: questions or CMB-Clin cases, as `cmexam-tune preprocess` writes them.
        out: predictions; if it exists and comes from the same experiment, only what is missing is answered.
        overrides: changes to the config: `section.key=value`; `cmexam-tune train --help` lists them.
        overwrite: start again instead of continuing.
        limit: answer only the first so many questions.
        shard: answer only this share of them, such as 2/4, into a file of its own beside OUT.
        join: ask nothing; put the files that all shards have written together as OUT.

    Raises:
        UserError: a file or run that cannot be used, or `out` holds predictions of something else.
    """
    if join and shard is not None:
        raise UserError("--join puts all shards together: leave out --shard.")
    from cmexam_tune.cmb_clin import cases
    from cmexam_tune.inference import answering, loading
    from cmexam_tune.inference.provenance import provenance
    from cmexam_tune.inference.records import ResumableFile
    from cmexam_tune.inference.shards import Shard, join_shards
    from cmexam_tune.prompts import dialogue

    # All of the file is read, so that a mistake further down is found before anything is answered.
    part = Shard.parse(shard)
    path = part.path(out)
    opened = loading.open_source(source, overrides).beside(path)
    if dialogue.is_cases(questions):
        return cases.predict(opened, questions, path, overwrite=overwrite, limit=limit, shard=part, join=join)
    exam = list(jsonl.read(questions, Question))
    builder = answering.prompt_builder(opened.config, exam)
    meta = provenance(opened.config, questions, opened.run, answering.shot_files(opened.config))
    asked = [question for question in exam[:limit] if part.holds(question.id)]
    with ResumableFile(path, meta, overwrite) as file:
        if join:
            join_shards(file, {question.id: question.id for question in asked})
        else:
            answering.answer_missing(file, opened, builder, asked)
        if file.processes.first:
            cli.note(answering.summary(file.result))
    return path


EXAMPLES = """examples:
  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out predictions.jsonl
  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out legal.jsonl \\
      generation.mode=likelihood generation.batch_size=32
  cmexam-tune predict --config zeroshot_qwen.yaml --questions test.questions.jsonl --out zeroshot.jsonl
  cmexam-tune predict --config zeroshot_qwen_cmb.yaml --questions test.questions.jsonl --out shots.jsonl \\
      prompt.shots=3 prompt.shots_from=val.questions.jsonl
  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out predictions.jsonl --shard 2/4
  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out predictions.jsonl --join
  torchrun --nproc_per_node 8 -m cmexam_tune.predict --run-folder runs/lora_llama \\
      --questions test.questions.jsonl --out predictions.jsonl

Several processes (torchrun) share the questions; a later start may use another number. torchrun would take
--run for an option of its own: write --run-folder there. Jobs that do not know of each other (Slurm, Ray,
Kubernetes, several machines) take one --shard each, and --join ends it: OUT is what one process would write.
generation.mode: generate (free text), constrained (only legal answers can be written) or likelihood (the
most probable legal answer). Beside OUT, OUT.meta.json says what the predictions came from."""


@cli.program(predict, EXAMPLES)
def main(
    *overrides: Override,
    run: Annotated[Folder | None, Flag("DIR", names=("--run", "--run-folder"))] = None,
    config: Recipe | None = None,
    questions: File,
    out: File | None = None,
    dry_run: bool = False,
    tokenizer: Annotated[str | None, Flag("NAME")] = None,
    limit: int | None = None,
    **options: Any,
) -> int:
    """Let a model answer questions. Started again with the same --out it continues where it stopped.

    Exit status: 1 if questions are left that could not be asked (a server failed); the same command asks them again.

    Args:
        run: folder of a training run.
        config: a YAML file, or the name of a shipped recipe, whose model answers as it is.
        dry_run: print the number of requests and tokens, and send nothing.
        tokenizer: with --dry-run: count tokens by it (default: characters).
    """
    if (run is None) == (config is None):
        raise UserError("predict: give either --run (a trained model) or --config (a model as it is).")
    if run is not None and not Path(run).is_dir():
        raise UserError(f"--run {run}: no such folder. Run folders are written by `cmexam-tune train`.")
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: at least 1 is needed.")
    source = str(run or config)
    if dry_run:
        from cmexam_tune.inference import loading, request_estimate

        opened = loading.open_source(source, overrides)
        cli.say(str(request_estimate.estimate(opened, questions, limit, tokenizer)))
        return 0
    if out is None:
        raise UserError("predict: --out names the predictions file (or --dry-run says what would be asked).")
    from cmexam_tune.inference import sharing

    with sharing.speaking_once():
        written = predict(source, questions, out, overrides, limit=limit, **options)
    if not sharing.Processes().first:
        return 0
    cli.say(str(written))
    note = prediction_metadata.read(written)
    # A script that goes on would score questions that nobody was asked.
    return 1 if note and prediction_metadata.section(note.values, "result").get("failed") else 0


if __name__ == "__main__":
    cli.run(main)
