"""The model card (README.md) of an exported model: what was trained on what, with which prompt, scores and loading."""

from collections.abc import Sequence
from pathlib import Path

from cmexam_tune.config import Config
from cmexam_tune.core import documents, files
from cmexam_tune.interop.exporting.modelfile import Modelfile
from cmexam_tune.interop.exporting.saved_files import prompt_codec
from cmexam_tune.models import gguf
from cmexam_tune.models.families import Loaded
from cmexam_tune.prompts import Dialogue
from cmexam_tune.training.run_directory import run as runs

KINDS = {
    "hf": "the whole model",
    "released": "the whole model in the layout of its release",
    "peft": "a PEFT adapter",
    "chatglm": "a prefix in the ChatGLM authors' format",
}
TRAINING = ("train_loss", "eval_loss", "eval_exam_accuracy", "best_metric")
"""What metrics.json says about how good the model is; the rest is speed."""


Score = tuple[str, str]
"""A row of the card's table: what was measured, and its value as text."""


def card(
    config: Config,
    loaded: Loaded,
    format: str,
    ollama: Modelfile | str | None,
    *,
    scores: Sequence[Score] = (),
    averaged: int = 1,
    licence: str | None = None,
    base_id: str | None = None,
) -> str:
    """Return the text of the card.

    Args:
        config: the run's.
        loaded: the model that was exported, for the prompt.
        format: a key of `KINDS`.
        ollama: the Modelfile beside it, or why there is none.
        scores: what `read_scores` knows of the run.
        averaged: number of runs whose mean this is.
        licence: identifier of the hub, such as apache-2.0; None: the card says nothing about it.
        base_id: name of the base model on the hub; None: `hub_id` of the config's.
    """
    mean = f"\n- mean of the updates of {averaged} runs" if averaged > 1 else ""
    file = gguf.find(config.model.model_name_or_path)
    prompt, base = _prompt(config, loaded), base_id or _public_name(config.model.model_name_or_path)
    auto = "AutoModelForSequenceClassification" if prompt is None else "AutoModelForCausalLM"
    place = repr(base) if file is None else f"{file.resolve().parent.name!r}, gguf_file={file.name!r}"
    load = {
        "hf": f"{auto}.from_pretrained(folder)",
        "released": f"import cmexam_tune.models.released  # has the network\n{auto}.from_pretrained(folder)",
        "peft": f"PeftModel.from_pretrained({auto}.from_pretrained({place}), folder)",
        "chatglm": "# see the P-tuning readme of THUDM/ChatGLM-6B",
    }
    on_hub = base_id or hub_id(config)
    parts = [
        f"---\n{_metadata(config, format, writes=prompt is not None, licence=licence, base=on_hub)}\n---",
        f"# {Path(config.out).name}",
        f"{base} after {config.tuning.method} with cmexam_tune; this folder holds {KINDS[format]}.",
        f"- style of the questions: {config.prompt.style}\n- template: {config.prompt.template}{mean}",
        "## Training data\n\n" + "\n".join(_data(path) for path in config.data.train),
    ]
    if prompt is not None:
        parts.append(f"## Prompt\n\n```\n{prompt}\n```")
    if scores:
        parts.append("## Scores\n\n| | |\n| - | - |\n" + "\n".join(f"| {name} | {value} |" for name, value in scores))
    parts.append(f"## Loading\n\n```python\n{load[format]}\n```")
    if isinstance(ollama, Modelfile):
        parts.append("In this folder: `ollama create NAME` (Modelfile: the prompt of training, for single questions).")
    elif ollama is not None:
        parts.append(f"No Modelfile: {ollama}")
    return "\n\n".join([*parts, "Not for use on patients.\n"])


def _public_name(model: str) -> str:
    """Return a model's id on the hub, or the name of its folder: where that lies is nobody else's business."""
    is_place = model.startswith(("/", ".", "~")) or model.count("/") != 1 or Path(model).exists()
    return Path(model).expanduser().resolve().name if is_place else model


def hub_id(config: Config) -> str | None:
    """Return the name of the base model on the hub; None: it is a folder of this machine."""
    name = _public_name(config.model.model_name_or_path)
    return name if "/" in name else None


def _metadata(config: Config, format: str, *, writes: bool, licence: str | None, base: str | None) -> str:
    """Return what the hub reads of a card, as YAML."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base,
        base_model_relation="adapter" if format in ("peft", "chatglm") else "finetune",
        language=["zh"],
        library_name="peft" if format == "peft" else "transformers",
        license=licence,
        pipeline_tag="text-generation" if writes else "text-classification",
        tags=["medical", "chinese", "exam", "cmexam_tune", *([config.tuning.method] if config.tuning.method else [])],
    )
    return data.to_yaml(line_break="\n").strip()


def _prompt(config: Config, loaded: Loaded) -> str | None:
    """Return the prompt of training for the message MESSAGE; None: a model that writes no text."""
    codec = prompt_codec(config, loaded)
    if codec is None:
        return None
    dialogue = Dialogue("MESSAGE", (), config.prompt.system)
    if codec.template is None:
        (ids,) = codec.sources([dialogue])
        return str(loaded.tokenizer.decode([*ids, *codec.lead], clean_up_tokenization_spaces=False))
    return codec.template.render(dialogue)


def _data(path: str) -> str:
    file = Path(path)
    seen = f"sha256 `{files.sha256(file)}`" if file.is_file() else "no longer where it was at the export"
    return f"- {file.name}: {seen}"


def read_scores(run: str | Path) -> list[Score]:
    """Return how good a run is, by its metrics.json and the reports about it.

    Raises:
        UserError: one of these files is damaged.
    """
    metrics = runs.open_run(run).metrics
    training = [(f"{name} (training)", f"{metrics[name]:.4g}") for name in TRAINING if name in metrics]
    return [*training, *_reports(Path(run))]


def _reports(run: Path) -> list[Score]:
    """Return the scores of the reports about the run, percentages.

    Raises:
        DataError: a report is broken.
    """
    scores = []
    for path in runs.reports(run):
        report = documents.read_json(path, "report")
        if not runs.is_about(report, run):
            continue
        overall, question_files = report.get("overall") or {}, (report.get("provenance") or {}).get("questions") or []
        if "accuracy" in overall:
            names = ", ".join(f"{Path(file['path']).name} (sha256 `{file['sha256'][:12]}`)" for file in question_files)
            within = overall.get("accuracy_ci")
            value = f"{overall['accuracy']:.2f}%" + (f" ({within[0]:.2f} to {within[1]:.2f})" if within else "")
            scores.append((f"accuracy on {names or path.parent.name}", value))
    return scores
