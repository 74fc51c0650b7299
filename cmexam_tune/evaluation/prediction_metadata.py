"""What `predict` recorded beside its predictions, in `predictions.jsonl.meta.json`: how a run was made and asked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cmexam_tune.core import documents
from cmexam_tune.core.errors import DataError
from cmexam_tune.prompts import STYLES

_PLACES = {"questions", "run", "versions", "result"}
# What may differ between two runs that are seeds of one experiment.
_SEEDS = {"seed", "data_seed", "shots_seed"}
_ENGINE = ("engine", "dtype", "attn_implementation")
"""Prefixes of those settings under `model` that say what computes the model and not which model it is."""
_NOT_THE_EXPERIMENT = {"out", "data", "output_dir", "logging_dir", "run_name"}


def section(values: Mapping[str, object], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key of a JSON object, an empty one where there is none.

    The file may be another tool's or edited by hand: a missing or odd section is unknown, not an error.
    """
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True)
class PredictionMetadata:
    """The metadata of one predictions file. What is None or empty is unknown, as where another tool predicted."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The JSON object as it was written."""

    @property
    def prompt(self) -> Mapping[str, object]:
        """The section `prompt` of the run's config."""
        return section(section(self.values, "config"), "prompt")

    @property
    def style(self) -> str | None:
        """The prompt style that the run was asked in, `own words` for words of its own."""
        if self.prompt.get("ask"):
            return "own words"
        name = self.prompt.get("style")
        return STYLES[name].name if isinstance(name, str) and name in STYLES else None

    @property
    def asks_for_explanations(self) -> bool | None:
        """Whether the prompt wants an explanation written."""
        target, name = self.prompt.get("write"), self.prompt.get("style")
        if not isinstance(target, str):
            target = STYLES[name].write if isinstance(name, str) and name in STYLES else None
        return None if target is None else "{explanation}" in target

    @property
    def computed_by(self) -> str | None:
        """What computed the outputs: the engine with its version, the type of the weights, and what it promises."""
        decoding = section(section(self.values, "result"), "decoding")
        if not isinstance(decoding.get("dtype"), str):
            return None
        engine, version = decoding.get("engine"), decoding.get("engine_version")
        if engine is None:  # our own decoding, whose version is that of the library below it
            engine, version = "transformers", section(self.values, "versions").get("transformers")
        facts = [decoding["dtype"], *(["batch-invariant"] if decoding.get("batch_invariant") is True else [])]
        return f"{engine} {version} ({', '.join(facts)})"

    @property
    def option_order(self) -> str | None:
        """The order in which the options were shown; None is the exam's.

        Raises:
            DataError: there is no such order.
        """
        if (order := self.prompt.get("option_order")) is None:
            return None
        from cmexam_tune.config.settings import check_order  # pydantic, for this rare setting only

        try:
            check_order(str(order))
        except ValueError as error:
            raise DataError(f"the note beside the predictions: {error}.") from None
        return str(order)

    @property
    def decoding(self) -> tuple[str, float] | None:
        """The model and the temperature at which it was sampled, 0 where it was not; None where that is unknown."""
        config = section(self.values, "config")
        model, generation = section(config, "model"), section(config, "generation")
        name, temperature = model.get("model_name_or_path"), generation.get("temperature")
        if not isinstance(name, str):
            return None
        trained_or_adapter = self.values.get("run") or model.get("adapter_name_or_path") or ""
        sampled = float(temperature) if isinstance(temperature, int | float) else 1.0
        return f"{name} {trained_or_adapter}".rstrip(), sampled if generation.get("do_sample") else 0.0

    @property
    def asked(self) -> Mapping[str, object]:
        """What two computations of one experiment have in common: the model, and all that it was asked."""
        from cmexam_tune.config.settings import SPEED  # pydantic, for this rare question only

        config = section(self.values, "config")
        model = {key: value for key, value in section(config, "model").items() if not key.startswith(_ENGINE)}
        generation = {key: value for key, value in section(config, "generation").items() if key not in SPEED}
        sums = {key: value for key, value in self.values.items() if key.endswith("sha256")}
        return {"model": model, "prompt": self.prompt, "generation": generation, **sums}

    @property
    def experiment(self) -> Mapping[str, object]:
        """What two seeds of one experiment have in common."""
        trained = self.values.get("run") is not None
        keys = {key for key in self.values if key not in _PLACES and not key.endswith("sha256")}
        # Weights that were trained differ from seed to seed; others belong to the experiment.
        model = {} if trained else {"model": self.values.get("model_sha256")}
        return _without_seeds({key: self.values[key] for key in keys}) | model


def read(predictions: str | Path) -> PredictionMetadata | None:
    """Return the metadata beside a predictions file, None where there is none.

    Raises:
        DataError: they are broken.
    """
    path = Path(f"{predictions}.meta.json")
    if not path.is_file():
        return None
    values = documents.read_json(path, "note of predict")
    return PredictionMetadata(values if isinstance(values, Mapping) else {})


def are_seeds_of_one_experiment(runs: Sequence[PredictionMetadata]) -> bool:
    """Return whether several runs differ in their seeds, weights and places only; false where metadata are missing."""
    experiments = [run.experiment for run in runs if "config" in run.values]
    return len(experiments) == len(runs) > 1 and all(experiment == experiments[0] for experiment in experiments)


def computed_differently(before: PredictionMetadata, after: PredictionMetadata) -> str | None:
    """Return `A instead of B` where two runs differ in nothing but what computed them; else, or if unknown, None."""
    old, new = before.computed_by, after.computed_by
    if old is None or new is None or old == new or before.asked != after.asked:
        return None
    return f"{new} instead of {old}"


def _without_seeds(values: Mapping[str, object]) -> dict[str, object]:
    """Return nested settings without those that are a seed or a place."""
    return {
        key: _without_seeds(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _SEEDS | _NOT_THE_EXPERIMENT
    }
