"""Run folders: what a training run leaves behind, and how it is opened again.

config.yaml          the resolved configuration
adapter/             what was tuned: PEFT's format, or a whole model in transformers' (head, full)
adapter/cmexam_tune.json  what the adapter must be used with: tokenizer, template, style, prefix length
log.jsonl            everything that was logged
loss.svg             training and validation loss as a picture
trainer_state.json   the Trainer's state at the end; its presence says that the run has finished
environment.json     versions, device and command
metrics.json         final loss, speed, padding
checkpoint-<step>/   to resume from
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune.config import Config, ModelConfig, load_config, parse_config, read_yaml
from cmexam_tune.core import documents, jsonl, variants
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.training.run_directory.log import LOG, read_log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, ADAPTER, STATE = "config.yaml", "adapter", "trainer_state.json"
ENVIRONMENT, METRICS, CARD = "environment.json", "metrics.json", "cmexam_tune.json"


@dataclass(frozen=True, repr=False)
class Run:
    """A run folder and its config; everything else is read from it when it is asked for."""

    path: Path
    config: Config

    @property
    def adapter(self) -> Path:
        """Folder of what was tuned."""
        return self.path / ADAPTER

    @property
    def finished(self) -> bool:
        """Whether training has come to its end."""
        return (self.path / STATE).is_file() and self.adapter.is_dir()

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of metrics.json; {} while training has not finished.

        Raises:
            UserError: it is damaged.
        """
        if not (self.path / METRICS).is_file():
            return {}
        values = documents.read_json(self.path / METRICS, "file of metrics")
        return {name: value for name, value in values.items() if type(value) in (int, float)}

    @property
    def log(self) -> list[dict[str, float]]:
        """The entries of log.jsonl."""
        return read_log(self.path / LOG)

    def __repr__(self) -> str:
        """Return where it is and what it trains, in a line."""
        method = f" {self.config.tuning.method}" if self.config.tuning.method else ""
        return f"Run({str(self.path)!r}: {self.config.model.family}{method})"

    def _repr_html_(self) -> str:
        cells = {"run": self.path, "family": self.config.model.family, "method": self.config.tuning.method}
        values = {**cells, **{name: f"{value:.4g}" for name, value in self.metrics.items()}}
        rows = (f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
        return f"<table>{''.join(rows)}</table>"


@dataclass(frozen=True)
class AdapterCard:
    """What an adapter must be used with; stored beside it and checked when it is loaded."""

    family: str
    method: str
    base: str
    base_adapter: str | None
    template: str
    system: str | None
    style: str
    num_virtual_tokens: int | None
    tokenizer: str
    """Checksum."""
    labels: Mapping[str, str] | None = None
    """Outputs of a classification head, which nothing else in an adapter names."""

    @classmethod
    def of(cls, config: Config, tokenizer_hash: str, labels: Mapping[Any, str] | None = None) -> "AdapterCard":
        """Return the card of what this config trains."""
        return cls(
            family=config.model.family,
            method=str(config.tuning.method),
            base=config.model.model_name_or_path,
            base_adapter=config.model.adapter_name_or_path,
            template=config.prompt.template,
            system=config.prompt.system,
            style=config.prompt.style,
            num_virtual_tokens=dataclasses.asdict(config.tuning.settings).get("num_virtual_tokens"),
            tokenizer=tokenizer_hash,
            labels=labels,
        )

    @classmethod
    def read(cls, run: Run) -> "AdapterCard":
        """Return the card of a run.

        Raises:
            UserError: training has not finished, or the card is damaged.
        """
        if not (run.adapter / CARD).is_file():
            raise UserError(f"{run.path}: training has not finished. Start the same command again to resume it.")
        return jsonl.read_one(run.adapter / CARD, cls, "card of an adapter")


def open_run(folder: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Open a run folder.

    Raises:
        UserError: there is no run at `folder`.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise UserError(f"{path}: no run folder, it has no {CONFIG}. Run folders are written by `cmexam-tune train`.")
    return Run(path, load_config((path / CONFIG).resolve(), overrides))


def look_at(folder: Path) -> Run:
    """Return a run for inspection only: nothing that its config asks for, such as running others' code, is done.

    Raises:
        UserError: its config cannot be read.
    """
    return Run(folder, parse_config(read_yaml(folder / CONFIG), str(folder / CONFIG)))


def learnt_files(adapter: str | None) -> list[str]:
    """Return the question files that an adapter of a run was trained on, with those of the adapters under it."""
    files_of_run: dict[Path, tuple[str, ...]] = {}
    # A folder that comes again ends it: a run may have replaced the one whose adapter it went on from.
    while adapter and (folder := Path(adapter).parent) not in files_of_run and (folder / CONFIG).is_file():
        config = open_run(folder).config
        files_of_run[folder], adapter = config.data.train, config.model.adapter_name_or_path
    return [path for paths in files_of_run.values() for path in paths]


def reports(path: Path) -> list[Path]:
    """Return the reports about a run, the oldest first: in its folder, or beside it as `recipes/run.sh` writes them."""
    beside = path.absolute().parent.glob("report*/report.json") if path.absolute().name == "run" else ()
    return sorted([*path.glob("**/report.json"), *beside], key=lambda file: file.stat().st_mtime)


def is_about(report: Mapping[str, object], path: Path) -> bool:
    """Return whether a report is about the run in this folder; reports of other runs may lie there as well."""
    identity = report.get("identity")
    scored = identity.get("adapter") if isinstance(identity, dict) else None
    parts, run_parts = Path(scored).parts[-2:] if isinstance(scored, str) else (), path.resolve().parts
    return run_parts[len(run_parts) - len(parts) :] == parts


def parts(config: Config) -> tuple[Family, Method]:
    """Return the config's family and tuning method."""
    family = Family.named(config.model.family)
    if config.tuning.method is None:
        names = ", ".join(variants.names("tuning"))
        raise ConfigError(f"tuning.method: required key is missing for a training; known: {names}.")
    return family, Method.named(config.tuning.method)


def load(folder: str | Path, overrides: Sequence[str] = (), device: str = "cpu") -> tuple[Config, Loaded]:
    """Return a run's config and its trained model in eval mode: base plus adapter, or the standalone model.

    Raises:
        UserError: no finished run, or another base model, tokenizer, template or prefix length than in training.
    """
    run = open_run(folder, overrides)
    config, stored = run.config, AdapterCard.read(run)
    family, method = parts(config)
    source = _whole_model(run) if method.standalone else config.model
    if stored.labels and not method.standalone:
        source = dataclasses.replace(source, config={**source.config, "id2label": dict(stored.labels)})
    model: Any
    model, tokenizer = family.load(source, device=device)
    _check_card(run, stored, tokenizer)
    if not method.standalone:
        model = method.attach(model, family, config.tuning.settings)
        method.load(model, run.adapter)
    return config, Loaded(model.eval(), tokenizer)


def _whole_model(run: Run) -> ModelConfig:
    """Return where the model of a standalone method lies."""
    place = {"model_name_or_path": str(run.adapter), "adapter_name_or_path": None, "revision": None}
    return dataclasses.replace(run.config.model, **place)  # type: ignore[arg-type]


def as_served(folder: str | Path, overrides: Sequence[str] = ()) -> tuple[ModelConfig, Path | None]:
    """Return the model of a run, and its adapter if it is one, as a server reads them.

    Raises:
        UserError: no finished run, or one whose method no server computes.
    """
    run = open_run(folder, overrides)
    AdapterCard.read(run)
    _, method = parts(run.config)
    if method.standalone:
        return _whole_model(run), None
    if not method.merges:
        raise UserError(
            f"{run.path}: tuning.method={run.config.tuning.method} is computed by this program only. Leave out "
            f"model.engine={run.config.model.engine}."
        )
    return run.config.model, run.adapter


def check_tokenizer(folder: str | Path, overrides: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer or settings that a run's adapter was not trained with.

    Raises:
        UserError: naming what is different.
    """
    run = open_run(folder, overrides)
    _check_card(run, AdapterCard.read(run), tokenizer)


def _check_card(run: Run, stored: AdapterCard, tokenizer: "PreTrainedTokenizerBase") -> None:
    from cmexam_tune.models.checkpoint import tokenizer_hash

    expected = vars(AdapterCard.of(run.config, tokenizer_hash(tokenizer)))
    keys = ("family", "method", "template", "num_virtual_tokens", "tokenizer")
    if (key := next((key for key in keys if getattr(stored, key) != expected[key]), None)) is None:
        return
    what = {"tokenizer": "the tokenizer of the base model"}.get(key, f"{key}={expected[key]}")
    was = "" if key == "tokenizer" else f" ({getattr(stored, key)})"
    raise UserError(
        f"{run.path}: {what} is not what the adapter was trained with{was}; answers would be worthless. "
        f"Use the base model {stored.base} and leave out the override."
    )
