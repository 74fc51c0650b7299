"""Let a tuned or off-the-shelf model answer questions; predictions are appended as they come, and it can be resumed."""

from collections.abc import Sequence
from pathlib import Path

from cmexam_tune.config import Config
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question


def predict(
    source: str | Path | Config,
    questions: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
    limit: int | None = None,
) -> Path:
    """Answer a questions file and return the predictions file; lines come in the order in which they were answered.

    Args:
        source: a run folder; or a Config, or the path or name of a recipe, whose model answers as it is.
        questions: questions or CMB-Clin cases, as `cmexam-tune preprocess` writes them.
        out: predictions; if it exists and comes from the same experiment, only what is missing is answered.
        overrides: `section.key=value` changes to a run's config or a recipe.
        overwrite: start again instead of continuing.
        limit: answer only the first so many questions.

    Raises:
        UserError: a file or run that cannot be used, or `out` holds predictions of something else.
    """
    from cmexam_tune.cmb_clin import cases
    from cmexam_tune.inference import answering, loading
    from cmexam_tune.inference.provenance import provenance
    from cmexam_tune.inference.records import ResumableFile
    from cmexam_tune.prompts import dialogue

    # All of the file is read, so that a mistake further down is found before anything is answered.
    opened = loading.open_source(source, overrides)
    if dialogue.is_cases(questions):
        return cases.predict(opened, questions, out, overwrite, limit)
    every = list(jsonl.read(questions, Question))
    asking = answering.asking_of(opened.config, every)
    meta = provenance(opened.config, questions, opened.run, answering.shot_files(opened.config))
    with ResumableFile(out, meta, overwrite) as file:
        answering.answer_missing(file, opened, asking, every[:limit])
        if file.processes.first:
            cli.note(answering.summary(file.result))
    return Path(out)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        "predict",
        "Let a model answer questions. Started again with the same --out it continues where it stopped.",
        "examples:\n"
        "  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out predictions.jsonl\n"
        "  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out legal.jsonl \\\n"
        "      generation.mode=likelihood generation.batch_size=32\n"
        "  cmexam-tune predict --config zeroshot_qwen.yaml --questions test.questions.jsonl --out zeroshot.jsonl\n"
        "  cmexam-tune predict --config zeroshot_qwen_cmb.yaml --questions test.questions.jsonl --out shots.jsonl \\\n"
        "      prompt.shots=3 prompt.shots_from=val.questions.jsonl\n"
        "  torchrun --nproc_per_node 8 -m cmexam_tune.predict --run-folder runs/lora_llama \\\n"
        "      --questions test.questions.jsonl --out predictions.jsonl\n\n"
        "Several processes (torchrun) share the questions; a later start may use another number. torchrun would take\n"
        "--run for an option of its own: write --run-folder there.\n"
        "generation.mode: generate (free text), constrained (only legal answers can be written) or likelihood (the\n"
        "most probable legal answer). Beside OUT, OUT.meta.json says what the predictions came from.",
    )
    cli.add_config(parser, required=False)
    parser.add_argument("--run", "--run-folder", dest="run", metavar="DIR", help="folder of a training run")
    parser.add_argument("--questions", required=True, metavar="FILE", help="as `cmexam-tune preprocess` writes them")
    parser.add_argument("--out", metavar="FILE", help="predictions, one JSON object a line")
    parser.add_argument("--limit", type=int, metavar="N", help="answer only the first N questions")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the number of requests and tokens, and send nothing"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="with --dry-run: count tokens by it (default: characters)")
    parser.add_argument("--overwrite", action="store_true", help="replace the predictions instead of continuing")
    return parser


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and answer the questions."""
    got = _parser().parse_intermixed_args(list(argv))
    if (got.run is None) == (got.config is None):
        raise UserError("predict: give either --run (a trained model) or --config (a model as it is).")
    if got.run is not None and not Path(got.run).is_dir():
        raise UserError(f"--run {got.run}: no such folder. Run folders are written by `cmexam-tune train`.")
    if got.limit is not None and got.limit < 1:
        raise UserError(f"--limit {got.limit}: at least 1 is needed.")
    source = got.run or got.config
    if not got.dry_run and not got.out:
        raise UserError("predict: --out names the predictions file (or --dry-run says what would be asked).")
    if got.dry_run:
        from cmexam_tune.inference import loading, request_estimate

        opened = loading.open_source(source, got.overrides)
        cli.say(str(request_estimate.estimate(opened, got.questions, got.limit, got.tokenizer)))
        return None
    from cmexam_tune.inference import sharing

    with sharing.speaking_once():
        out = predict(source, got.questions, got.out, got.overrides, overwrite=got.overwrite, limit=got.limit)
    if sharing.Processes().first:
        cli.say(str(out))
    return None


if __name__ == "__main__":
    cli.run(main)
