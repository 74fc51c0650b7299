"""`cmexam-tune compare`: a model before and after tuning, on questions of one's own, in one report."""

from collections.abc import Sequence
from pathlib import Path

from cmexam_tune import reproduce
from cmexam_tune.config import load_config
from cmexam_tune.core import cli
from cmexam_tune.core.cli import Folder, Override, Recipe
from cmexam_tune.core.errors import UserError
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.papers import entries

SPLITS = {"train": ("train",), "validation": ("val", "validation", "dev"), "test": ("test", "test_with_annotations")}
"""Key of the section `data` -> what its files are called: `train.questions.jsonl`, `bank.train.questions.jsonl`."""
BEFORE, AFTER = "zeroshot", "tuned"
EPILOG = """--data holds questions as preprocess writes them: train.questions.jsonl, test.questions.jsonl and, if there
is one, val.questions.jsonl; `preprocess table ... --split train=0.8,val=0.1,test=0.1` makes all three of one table. The
same model answers the test questions before and after training, asked in the same words. OUT/zeroshot/ and
OUT/tuned/ hold predictions and reports, OUT/tuned/run the model, OUT/report both side by side. Started again it goes on
where it was.

examples:
  cmexam-tune preprocess table --map auto --input bank.xlsx --split train=0.8,val=0.1,test=0.1 --out data/bank
  cmexam-tune compare --config lora_qwen --data data/bank --out runs/bank
  cmexam-tune compare --config lora_qwen --data data/bank --out runs/bank --launch "torchrun --nproc_per_node 8 -m" """


def compare(
    config: str | Path,
    data: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    launch: str | None = None,
) -> FullReport:
    """Let a model answer test questions, tune it, let it answer them again, and return the report of both.

    Args:
        config: a recipe that tunes something, by path or name.
        data: folder of question files.
        out: folder for everything; another call with the same one goes on there.
        overrides: changes to the recipe: `section.key=value`; `cmexam-tune train --help` lists them.
        launch: start training and prediction by this: 'torchrun --nproc_per_node 8 -m'.

    Raises:
        UserError: a recipe that tunes nothing or whose model cannot answer before, files that are missing, or settings
            that cannot be used.
        TrainingStopped: training degenerated, or ended with an error.
    """
    out, files = Path(out), _questions(Path(data))
    places = [f"data.{split}=[{', '.join(map(str, paths))}]" for split, paths in files.items()]
    experiment = load_config(config, [*places, f"out={out / AFTER / 'run'}", *overrides])
    entry, (test,) = entries.Entry(Path(config).stem), files["test"]
    if experiment.tuning.method is None or not entry.trained:
        raise UserError(f"{config}: tunes nothing, so there is no second model. `cmexam-tune recipes lora` lists some.")
    before, after = (
        reproduce.Unit(entry, out / name, experiment, test, trained=name == AFTER) for name in (BEFORE, AFTER)
    )
    for number, unit in enumerate((before, after), 1):
        cli.note(f"[{number}/2] {unit.folder.name}")
        reproduce.run_unit(unit, launch)
    from cmexam_tune.evaluate import evaluate

    return evaluate(
        [after.predictions], test, out / "report", name=[AFTER, BEFORE], baseline=before.predictions, overwrite=True
    )


def _questions(data: Path) -> dict[str, list[Path]]:
    """Return the question files in a folder by the key of the section `data`; there may be none to validate with.

    Raises:
        UserError: no folder, no file of a split, or several to test with.
    """
    if not data.is_dir():
        raise UserError(f"{data}: no such folder. Name the one that `cmexam-tune preprocess --out` wrote to.")
    files = {
        split: [
            path
            for path in sorted(data.glob("*.questions.jsonl"))
            if path.name.removesuffix(".questions.jsonl").rpartition(".")[2] in stems
        ]
        for split, stems in SPLITS.items()
    }
    for split in ("train", "test"):
        if not files[split]:
            raise UserError(
                f"{data}: no {split}.questions.jsonl. `cmexam-tune preprocess ... --split train=0.8,val=0.1,test=0.1` "
                "divides one table into such files."
            )
    if len(files["test"]) > 1:
        names = ", ".join(path.name for path in files["test"])
        raise UserError(
            f"{data}: several files to test with ({names}), and a report is about one. Move the others away."
        )
    return files


@cli.program(compare, EPILOG)
def main(*overrides: Override, config: Recipe, data: Folder, out: Folder, launch: str | None = None) -> None:
    """Compare a model before and after tuning, on questions of one's own: one command, one report."""
    from cmexam_tune.evaluate import show

    report = compare(config, data, out, overrides, launch=launch)
    show(report)
    cli.say(f"report: {Path(out) / 'report' / 'report.html'}")


if __name__ == "__main__":
    cli.run(main)
