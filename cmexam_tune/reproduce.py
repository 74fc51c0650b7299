"""`cmexam-tune reproduce`: whole rows of the papers, from the raw file to a table beside the published numbers."""

import dataclasses
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cmexam_tune.config import Config, dump_config, load_config
from cmexam_tune.config.reading import COMMAND_ONLY
from cmexam_tune.core import cli
from cmexam_tune.core.cli import Flag, Folder
from cmexam_tune.core.errors import TrainingStopped, UserError
from cmexam_tune.core.files import atomic_write
from cmexam_tune.core.variants import suggest
from cmexam_tune.report.papers import entries, reproduced_tables
from cmexam_tune.report.table import Table

RAW = (".csv", ".xlsx", ".json", ".jsonl")
EPILOG = """Rows are recipes (lora_llama) or their published names (LLaMA-CMExam). In --out, each row has
ROW/seedN/ and, where the paper scores explanations, ROW/seedN-explain/, with run/, predictions.jsonl and report/. Rows
of CMB run in the settings that the paper prints: ROW/seedN/, seedN-answer-3shot/, seedN-cot/ and seedN-cot-3shot/.
Started again it goes on where it was; finished steps are not repeated.

settings: {settings}

examples:
  cmexam-tune reproduce ptuning_chatglm head_bert --data data/raw --out runs/paper --seeds 1,2,3
  cmexam-tune reproduce LLaMA-CMExam --out runs/paper model.model_name_or_path=/models/llama-7b
  cmexam-tune reproduce head_bert head_roberta --out runs/paper head_bert:model.model_name_or_path=/models/bert
  cmexam-tune reproduce lora_llama --out runs/paper --launch "torchrun --nproc_per_node 8 -m"
  cmexam-tune reproduce cmb/GPT-4 --data data/cmb --out runs/paper --settings answer,cot
  cmexam-tune reproduce --table3 --out runs/paper      (--table4 to --table8: by groups; --cmb: CMB's Tables 3 and 4)"""

LAYOUTS: dict[str, Callable[[Sequence[reproduced_tables.Measured]], Table]] = {
    "table3": reproduced_tables.table3,
    **{f"table{number}": partial(reproduced_tables.by_groups, number) for number in reproduced_tables.BY_GROUPS},
    "cmb": reproduced_tables.cmb,
}


@dataclasses.dataclass(frozen=True)
class Unit:
    """One training (or none, off the shelf), prediction and evaluation."""

    entry: entries.Entry
    folder: Path
    config: Config
    test: Path
    ask: tuple[str, ...] = ()
    """Overrides of the prediction alone: a trained row is trained once for all settings."""
    trained: bool = True
    """Whether the model is tuned before it answers."""
    trusted: tuple[str, ...] = ()
    """Overrides that the command has to say to each step, because a file cannot ask for them."""

    @property
    def predictions(self) -> Path:
        """What the model answered."""
        return self.folder / "predictions.jsonl"

    @property
    def published(self) -> str:
        """The name under which `evaluate` knows the published numbers of this setting."""
        if self.entry.exam != "cmb":
            return self.entry.exam
        setting = self.folder.name.partition("-")[2].removeprefix("answer").strip("-")
        return f"cmb-{setting}" if setting else "cmb"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are run."""

    seeds: Sequence[int] = (1,)
    """`training.seed` of each run; off-the-shelf rows have one run."""
    settings: Sequence[str] | None = None
    """CMB: some of `entries.SETTINGS`; None: those that the paper prints for the row."""
    launch: str | None = None
    """What starts training and prediction on several cards: `torchrun --nproc_per_node 8 -m`."""


def reproduce(
    names: Sequence[str],
    out: str | Path,
    *,
    data: str | Path = "data/raw",
    overrides: Sequence[str] = (),
    plan: Plan = Plan(),
) -> Table:
    """Preprocess, train for each seed, predict and evaluate rows, and return them beside the published numbers.

    Args:
        names: recipes, published names of rows, or YAML files.
        out: folder for everything; another call with the same one goes on there.
        data: folder with the exam's raw files, or with questions files.
        overrides: `section.key=value` changes to every recipe, `ROW:section.key=value` to one.
        plan: seeds, settings and launcher.

    Raises:
        UserError: an unknown row, an override for one, missing data, or missing weights (all of
            them, with where they come from).
        TrainingStopped: a training that was launched ended with an error.
    """
    out = Path(out)
    chosen = [entries.find(name) for name in names]
    entries.check_overrides(overrides, chosen)
    # All of them before the first row runs: a row takes hours, and whoever starts ten of them goes home.
    missing = list(
        dict.fromkeys(
            text for entry in chosen for text in _missing_weights(entry, entries.own_overrides(overrides, entry))
        )
    )
    if missing:
        raise UserError("weights are missing:\n" + "\n".join(f"  - {text}" for text in missing))
    units = [
        unit
        for entry in chosen
        for unit in _units(entry, out, plan, Path(data), entries.own_overrides(overrides, entry))
    ]
    for number, unit in enumerate(units, 1):
        cli.note(f"[{number}/{len(units)}] {unit.folder.relative_to(out)}")
        run_unit(unit, plan.launch)
    recipes = {_key(entry) for entry in chosen}
    measured = [row for row in reproduced_tables.collect(out) if row.entry.recipe in recipes]
    pages = [page for row in measured for page in row.pages]
    table = reproduced_tables.comparison(measured)
    reproduced_tables.write(table, out / "comparison", pages)
    if any(entry.exam == "cmb" for entry in chosen):
        reproduced_tables.write(reproduced_tables.cmb(measured), out / "cmb", pages)
    return table


def _key(entry: entries.Entry) -> str:
    return Path(entry.recipe).stem


def _missing_weights(entry: entries.Entry, overrides: Sequence[str]) -> Iterator[str]:
    config = load_config(entry.recipe, overrides)
    model = config.model
    if model.is_remote:
        from cmexam_tune.models.families.endpoint import Remote

        Remote(config)  # address, key and settings are checked before any row runs
        return
    needed = [(model.model_name_or_path, "config.json", "config.json, tokenizer and weights")]
    if model.adapter_name_or_path:
        needed.append((model.adapter_name_or_path, "adapter_config.json", "the adapter's config and weights"))
    for name, marker, files in needed:
        if Path(name).expanduser().exists() or _cached(name, marker):
            continue
        key = "adapter_name_or_path" if marker.startswith("adapter") else "model_name_or_path"
        on_hub = name.count("/") == 1 and not name.startswith(("models/", ".", "/"))
        where = f"hf download {name}" if on_hub else entry.source or "see the comment in the recipe"
        yield f"{entry.recipe} needs {files} of {name}; from: {where}; or name a folder: model.{key}=..."


def _cached(name: str, marker: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, marker), str)
    except HFValidationError:
        return False


def _units(entry: entries.Entry, out: Path, plan: Plan, data: Path, overrides: Sequence[str]) -> Iterator[Unit]:
    base = load_config(entry.recipe, overrides)
    settings = _settings(entry, plan)
    splits = {"test": base.data.test}
    if entry.trained or any("3shot" in setting for setting in settings):
        splits["validation"] = base.data.validation
    if entry.trained:
        splits["train"] = base.data.train
    files = {split: find_questions(entry.exam, split, paths, data, out) for split, paths in splits.items()}
    places = [f"data.{split}={file}" for split, file in files.items()]
    trusted = tuple(word for word in overrides if word.partition("=")[0] in COMMAND_ONLY)
    for seed in plan.seeds if entry.trained else plan.seeds[:1]:
        # One training serves all settings, which only ask its model otherwise: their folders lie beside its own.
        trained_folder = out / _key(entry) / f"seed{seed}"
        common = [*places, f"training.seed={seed}"]
        for setting in settings:
            prompt_changes = entries.SETTINGS[setting]
            folder = (
                trained_folder if setting == "answer" else trained_folder.with_name(f"{trained_folder.name}-{setting}")
            )
            # The user's own words come last: they win over what a setting or the explaining run changes.
            changes = () if entry.trained else prompt_changes
            config = load_config(entry.recipe, [*changes, *common, f"out={trained_folder / 'run'}", *overrides])
            yield Unit(
                entry, folder, config, files["test"], prompt_changes if entry.trained else (), entry.trained, trusted
            )
        if entry.explain is not None:
            folder = trained_folder.with_name(f"{trained_folder.name}-{reproduced_tables.EXPLAIN}")
            words = [*entry.explain, *common, f"out={folder / 'run'}", *overrides]
            yield Unit(entry, folder, load_config(entry.recipe, words), files["test"], trusted=trusted)


def _settings(entry: entries.Entry, plan: Plan) -> Sequence[str]:
    if entry.exam != "cmb" or plan.settings is None:
        return entry.settings
    if wrong := [setting for setting in plan.settings if setting not in entries.SETTINGS]:
        known = ", ".join(entries.SETTINGS)
        raise UserError(f"--settings {wrong[0]}: unknown{suggest(wrong[0], entries.SETTINGS)}; known: {known}.")
    return plan.settings


def find_questions(exam: str, split: str, paths: Sequence[str], data: Path, out: Path) -> Path:
    """Return the questions of a split, made from the raw file in `data` where there are none yet."""
    stems = [Path(path).name.removesuffix(".questions.jsonl") for path in paths]
    cleaned = any(stem.endswith(".clean") for stem in stems)  # raw questions are no stand-in for these
    released = {"validation": ["val", "validation"], "test": ["test_with_annotations", "test"]}
    stems += [] if cleaned else released.get(split, [split])
    for stem in stems:
        ready = out / "data" / exam / f"{stem}.questions.jsonl"
        for candidate in (data / ready.name, ready):
            if candidate.is_file():
                return candidate
        for raw in (data / f"{stem}{suffix}" for suffix in RAW):
            if raw.is_file():
                _preprocess(exam, raw, ready.parent, split, data)
                return ready
    if cleaned:
        raise UserError(f"{data}: no {stems[0]}.questions.jsonl. `cmexam-tune check` writes it; copy it into --data.")
    looked = ", ".join(f"{stem}{suffix}" for stem in stems for suffix in RAW[:1])
    raise UserError(f"{data}: no {split} file of {exam} (looked for {looked}, ...). Name the folder with --data.")


def _preprocess(exam: str, raw: Path, folder: Path, split: str, data: Path) -> None:
    from cmexam_tune import preprocess

    answers = sorted(data.glob("*answer*.json")) if exam == "cmb" and split == "test" else []
    preprocess.preprocess(exam, [raw], folder, answers=answers[0] if answers else None)


def run_unit(unit: Unit, launch: str | None) -> None:
    """Train where the unit says so, predict and score; `launch`: what starts a program on several cards."""
    predictions = unit.predictions
    if unit.trained:
        _train(unit, launch)
    source = unit.config.out if unit.trained else _write_config(unit)
    from cmexam_tune.evaluate import evaluate
    from cmexam_tune.predict import predict

    if launch is None or unit.config.model.is_served:
        predict(source, unit.test, predictions, [*unit.ask, *unit.trusted])
    else:
        words = ["--run-folder", source] if unit.trained else ["--config", source]
        words += ["--questions", unit.test, "--out", predictions, *unit.ask, *unit.trusted]
        _launch(launch, "predict", words)
    if not _whole(unit.folder / "report", predictions):
        profile = "cmb" if unit.entry.exam == "cmb" else "standard"
        published = unit.published if unit.entry.paper else None
        evaluate(predictions, unit.test, unit.folder / "report", profile=profile, published=published, overwrite=True)


def _whole(report: Path, predictions: Path) -> bool:
    """Return whether a report is all there and of these predictions; its page is what evaluate writes last."""
    page = report / "report.html"
    return page.is_file() and page.stat().st_mtime_ns >= predictions.stat().st_mtime_ns


def _train(unit: Unit, launch: str | None) -> None:
    if launch is None:
        from cmexam_tune.train import train

        train(unit.config)
        return
    _launch(launch, "train", ["--config", _write_config(unit), *unit.trusted])


def _launch(launch: str, program: str, words: Sequence[object]) -> None:
    command = [*shlex.split(launch), f"cmexam_tune.{program}", *map(str, words)]
    status = subprocess.run(command, env=os.environ, check=False).returncode
    if status:
        raise TrainingStopped(f"{shlex.join(command)} ended with status {status}; start again to resume.")


def _write_config(unit: Unit) -> Path:
    path = unit.folder / "recipe.yaml"
    with atomic_write(path) as handle:
        handle.write(dump_config(unit.config))
    return path


def _epilog() -> str:
    return EPILOG.format(settings=", ".join(entries.SETTINGS))


@cli.program(reproduce, _epilog)
def main(
    *rows: Annotated[str, Flag("ROW|key=value")],
    out: Folder,
    data: Folder = "data/raw",
    seeds: Annotated[str, Flag("N,N")] = "1",
    settings: Annotated[Sequence[str] | None, Flag("S,S", separator=",")] = None,
    launch: str | None = None,
    cmb: bool = False,
    table3: bool = False,
    table4: bool = False,
    table5: bool = False,
    table6: bool = False,
    table7: bool = False,
    table8: bool = False,
) -> None:
    """Reproduce rows of the papers, from the raw exam files to a table.

    Args:
        rows: rows, and changes to their recipes.
        out: folder for data, runs, predictions, reports and tables.
        data: folder with the raw exam files, or with question files.
        seeds: comma-separated training seeds, one run each.
        settings: CMB: run only these of its settings.
        launch: start training and prediction by this: 'torchrun --nproc_per_node 8 -m'.
        cmb: all finished runs in --out as CMB's Tables 3 and 4.
        table3: all finished runs in --out beside CMExam's Table 3.
        table4: beside its Table 4.
        table5: beside its Table 5.
        table6: beside its Table 6.
        table7: beside its Table 7.
        table8: beside its Table 8.
    """
    names = [word for word in rows if "=" not in word]
    overrides = [word for word in rows if "=" in word]
    flags = {"table3": table3, "table4": table4, "table5": table5, "table6": table6, "table7": table7, "table8": table8}
    layouts = [name for name, wanted in {**flags, "cmb": cmb}.items() if wanted]
    if not names and not layouts:
        raise UserError(f"name at least one row, or --table3, or --cmb. Rows: {', '.join(entries.by_recipe())}.")
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UserError(f"--seeds {seeds}: whole numbers separated by commas are needed, for example 1,2,3.") from None
    if names:
        plan = Plan(numbers, settings or None, launch)
        cli.say(str(reproduce(names, out, data=data, overrides=overrides, plan=plan)))
    for name in layouts:
        measured = reproduced_tables.collect(Path(out))
        table = LAYOUTS[name](measured)
        reproduced_tables.write(table, Path(out) / name, [page for row in measured for page in row.pages])
        cli.say(str(table))
    cli.note(f"tables: {out}/*.md, *.tex, *.html")


if __name__ == "__main__":
    cli.run(main)
