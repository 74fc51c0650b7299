"""Ollama's Modelfile of a whole model: its template and stop strings are those that the model was trained with.

Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.md. Ollama puts the BOS token in front by itself.
"""

import dataclasses

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models import families
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.generation import stopping
from cmexam_tune.prompts import Dialogue

PROMPT, SYSTEM = "{{ .Prompt }}", "{{ .System }}"
QUOTES = '"""'
OWN_TEMPLATE = (
    "The prompt is the model's own chat template. Ollama has its own form of the known ones: `FROM .` suffices."
)
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclasses.dataclass(frozen=True)
class Modelfile:
    """What a Modelfile says, apart from where the weights are."""

    template: str
    """Go template with `{{ .Prompt }}`, and with `{{ .System }}` where the prompt has a place for it."""
    system: str | None
    """The system text of training."""
    parameters: tuple[tuple[str, str | float], ...]
    """Names and values; `stop` may come several times."""

    def text(self) -> str:
        """Return the file, to be used from its folder: `ollama create NAME`."""
        lines = ["FROM .", f"TEMPLATE {_quoted(self.template)}"]
        if self.system:
            lines.append(f"SYSTEM {_quoted(self.system)}")
        for name, value in self.parameters:
            lines.append(f"PARAMETER {name} {_quoted(value) if isinstance(value, str) else f'{value:g}'}")
        return "\n".join(lines) + "\n"


def written(config: Config, loaded: Loaded) -> Modelfile | str | None:
    """Return the Modelfile of a run's whole model; why there is none; or None for a model that writes no text."""
    family = families.named(config.model.family)
    if not isinstance(family, families.Writer):
        return None
    if not family.runs_in_ollama:
        return f"Ollama does not read models of family {config.model.family}."
    if config.prompt.template == "auto" and loaded.tokenizer.chat_template:
        return OWN_TEMPLATE
    template = prompts.template("none" if config.prompt.template == "auto" else config.prompt.template)
    system = template.system if config.prompt.system is None else config.prompt.system
    bare = template.text(Dialogue(PROMPT, system=""))
    try:
        whole = template.text(Dialogue(PROMPT, system=SYSTEM))
    except ConfigError:  # a wrapper without a place for a system text
        whole = bare
    form = bare if whole == bare else f"{{{{ if .System }}}}{whole.removesuffix(bare)}{{{{ end }}}}{bare}"
    codec = family.decoder(loaded, config).codec
    texts = (form, system or "", *codec.stop)
    if any(QUOTES in text or text.endswith('"') for text in texts):
        return 'A Modelfile cannot hold texts with """ in them or " at their end.'
    stops = [("stop", stop) for stop in codec.stop]
    return Modelfile(form, system or None, (*stops, *_numbers(config, loaded)))


def _numbers(config: Config, loaded: Loaded) -> list[tuple[str, str | float]]:
    """Return decoding as `predict` does it: without these Ollama samples, and punishes words that come again."""
    chosen = stopping.settings(loaded.model, loaded.tokenizer, config)
    most = int(chosen.max_new_tokens or stopping.room(config)) + config.generation.thinking_tokens
    found: list[tuple[str, str | float]] = [
        ("num_predict", most),
        ("num_ctx", config.prompt.max_source_length + most),
        ("repeat_penalty", float(chosen.repetition_penalty or 1.0)),
    ]
    if not chosen.do_sample:
        return [*found, ("temperature", 0.0)]
    return [*found, *((name, float(value)) for name in SAMPLING if (value := getattr(chosen, name)) is not None)]


def _quoted(text: str) -> str:
    return QUOTES + text + QUOTES if "\n" in text or '"' in text else f'"{text}"'
