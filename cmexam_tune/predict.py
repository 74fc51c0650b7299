"""Let a tuned or off-the-shelf model answer questions; predictions are appended as they come, and it can be resumed."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cmexam_tune import __version__
from cmexam_tune.core import cli, files, jsonl, variants
from cmexam_tune.core.config import Config, load_config
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Prediction, Question

if TYPE_CHECKING:
    from cmexam_tune.families import Loaded

T = TypeVar("T")
WINDOW = 64
"""Batches that are sorted by length together."""


def meta_path(out: str | Path) -> Path:
    """Return the file beside `out` that says what its predictions came from."""
    return Path(f"{out}.meta.json")


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
        questions: as `cmexam-tune preprocess` writes them.
        out: predictions; if it exists and comes from the same experiment, only what is missing is answered.
        overrides: `section.key=value` changes to a run's config or a recipe.
        overwrite: start again instead of continuing.
        limit: answer only the first so many questions.

    Raises:
        UserError: a file or run that cannot be used, or `out` holds predictions of something else.
    """
    asked = list(_first(jsonl.read(questions, Question), limit))
    run = Path(source) if not isinstance(source, Config) and Path(source).is_dir() else None
    config = _config(source, overrides)
    out = Path(out)
    meta = provenance(config, questions, run)
    known = _answered(out, meta, overwrite)
    rest = [question for question in asked if question.id not in (known or ())]
    if known:
        cli.note(f"{out}: {len(asked) - len(rest)} questions are answered already, {len(rest)} to go")
    if rest:
        answers = _answers(config, _load(config, run, overrides), rest)
        # The model has answered once before anything is replaced: a wrong path or setting costs no old file.
        first = next(answers)
        if known is None:
            _begin(out, meta)
        _append(out, itertools.chain([first], answers), len(asked), len(asked) - len(rest))
    return out


def _first(items: Iterable[T], limit: int | None) -> Iterator[T]:
    """Yield at most `limit` items, but read all of them, so that errors further down are found."""
    for number, item in enumerate(items):
        if limit is None or number < limit:
            yield item


def _config(source: str | Path | Config, overrides: Sequence[str]) -> Config:
    if isinstance(source, Config):
        if overrides:
            raise ConfigError("overrides change a recipe; with a Config use dataclasses.replace.")
        return source
    if Path(source).is_dir():
        from cmexam_tune.runfolder import runs

        return runs.open_run(source, overrides).config
    return load_config(source, overrides)


def _load(config: Config, run: Path | None, overrides: Sequence[str]) -> "Loaded":
    import torch

    from cmexam_tune.families import Loaded

    if run is not None:
        from cmexam_tune.runfolder import runs

        _, loaded = runs.load(run, overrides)
    else:
        family: Any = variants.load("families", config.model.family)
        loaded = family.load(config.model)
    model: Any = loaded.model
    return Loaded(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), loaded.tokenizer)


def _answers(config: Config, loaded: "Loaded", questions: Sequence[Question]) -> Iterator[Prediction]:
    """Answer in windows of many batches, so that the order of the file is roughly kept and lengths are still alike."""
    family: Any = variants.load("families", config.model.family)
    size = WINDOW * config.generation.batch_size
    for start in range(0, len(questions), size):
        yield from family.answer(loaded, questions[start : start + size], config)


def provenance(config: Config, questions: str | Path, run: Path | None) -> dict[str, Any]:
    """Return what the predictions come from: config, decoding, model, questions and versions."""
    from importlib.metadata import version

    plain = config.to_dict()
    adapter = None if run is None else _fingerprint(run / "adapter")
    return {
        "config": plain,
        "mode": config.generation.mode,
        "run": None if run is None else str(run),
        "adapter_sha256": adapter,
        "questions": str(questions),
        "questions_sha256": files.sha256(questions),
        "versions": {
            "cmexam_tune": __version__,
            **{name: version(name) for name in ("torch", "transformers", "peft", "tokenizers")},
        },
    }


def _fingerprint(folder: Path) -> dict[str, str]:
    return {path.name: files.sha256(path) for path in sorted(folder.glob("*.safetensors"))}


def _different(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two experiments differ; what changes only speed or place does not count."""
    odd = [key for key in ("adapter_sha256", "questions_sha256") if old.get(key) != new[key]]
    for section in ("prompt", "model", "tuning", "generation"):
        before, after = old.get("config", {}).get(section, {}), new["config"][section]
        changed = (key for key in {*before, *after} - {"batch_size"} if before.get(key) != after.get(key))
        odd += [f"{section}.{key}" for key in changed]
    return sorted(odd)


def _answered(out: Path, meta: Mapping[str, Any], overwrite: bool) -> set[str] | None:
    """Return the ids that `out` already answers, or None where it is to be begun; nothing is replaced here.

    Raises:
        UserError: `out` holds something else and `overwrite` is false.
    """
    note = meta_path(out)
    if out.is_dir():
        raise UserError(f"{out}: is a folder, a file is needed.")
    if overwrite or not out.exists() or not out.stat().st_size:
        return None
    if not note.is_file():
        raise UserError(
            f"{out}: exists and was not written by predict (no {note.name}). Add --overwrite to replace it."
        )
    if odd := _different(json.loads(note.read_text(encoding="utf-8")), json.loads(json.dumps(meta))):
        raise UserError(
            f"{out}: holds predictions of another experiment; other {', '.join(odd)}. "
            "Add --overwrite to replace it, or choose another --out."
        )
    _repair(out)
    return {prediction.question_id for prediction in jsonl.read(out, Prediction)} if out.stat().st_size else set()


def _begin(out: Path, meta: Mapping[str, Any]) -> None:
    """Write what the predictions come from, and an empty file for them."""
    with files.atomic_write(meta_path(out)) as handle:
        json.dump(meta, handle, ensure_ascii=False, indent=1)
        handle.write("\n")
    with files.atomic_write(out):
        pass


def _repair(out: Path) -> None:
    """Take off a last line that a killed run left half-written."""
    with out.open("rb+") as handle:
        content = handle.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            cli.note(f"{out}: the last line was half-written and is answered again")
            handle.truncate(end)


def _append(out: Path, predictions: Iterable[Prediction], total: int, done: int) -> None:
    from tqdm import tqdm

    with out.open("ab") as handle:
        for prediction in tqdm(predictions, desc="predict", total=total, initial=done, unit="question"):
            # Line by line: a killed run leaves at most one that is incomplete.
            handle.write((jsonl.dumps(prediction) + "\n").encode())
            handle.flush()


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and answer the questions."""
    parser = cli.Parser(
        "predict",
        "Let a model answer questions. Started again with the same --out it continues where it stopped.",
        "examples:\n"
        "  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out predictions.jsonl\n"
        "  cmexam-tune predict --run runs/lora_llama --questions test.questions.jsonl --out legal.jsonl \\\n"
        "      generation.mode=likelihood generation.batch_size=32\n"
        "  cmexam-tune predict --config zeroshot_qwen.yaml --questions test.questions.jsonl --out zeroshot.jsonl\n\n"
        "generation.mode: generate (free text), constrained (only legal answers can be written) or likelihood (the\n"
        "most probable legal answer). Beside OUT, OUT.meta.json says what the predictions came from.",
    )
    cli.add_config(parser, required=False)
    parser.add_argument("--run", metavar="DIR", help="folder of a training run")
    parser.add_argument("--questions", required=True, metavar="FILE", help="as `cmexam-tune preprocess` writes them")
    parser.add_argument("--out", required=True, metavar="FILE", help="predictions, one JSON object a line")
    parser.add_argument("--limit", type=int, metavar="N", help="answer only the first N questions")
    parser.add_argument("--overwrite", action="store_true", help="replace the predictions instead of continuing")
    got = parser.parse_intermixed_args(list(argv))
    if (got.run is None) == (got.config is None):
        raise UserError("predict: give either --run (a trained model) or --config (a model as it is).")
    if got.run is not None and not Path(got.run).is_dir():
        raise UserError(f"--run {got.run}: no such folder. Run folders are written by `cmexam-tune train`.")
    if got.limit is not None and got.limit < 1:
        raise UserError(f"--limit {got.limit}: at least 1 is needed.")
    source = got.run or got.config
    out = predict(source, got.questions, got.out, got.overrides, overwrite=got.overwrite, limit=got.limit)
    cli.say(str(out))
    return None


if __name__ == "__main__":
    cli.run(main)
