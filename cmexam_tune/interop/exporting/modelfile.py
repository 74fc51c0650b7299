"""Ollama's Modelfile of a whole model: its template and stop strings are those that the model was trained with.

Format: https://github.com/ollama/ollama/blob/main/docs/modelfile.md. Ollama puts the BOS token in front by itself.
"""

import dataclasses

from cmexam_tune.config import Config
from cmexam_tune.interop.exporting.saved_files import prompt_codec
from cmexam_tune.models import layouts, released
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.generation import sampling
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
    codec = prompt_codec(config, loaded)
    if codec is None:
        return None
    if not Family.named(config.model.family).runs_in_ollama:
        return f"Ollama does not read models of family {config.model.family}."
    if isinstance(loaded.tokenizer, released.RoleTokenizer):
        return f"Ollama was not tried with the tokenizer of {loaded.model.config.model_type}."
    if layouts.of(loaded.model) is not None:
        return f"Ollama does not read {loaded.model.config.model_type} in the layout of its authors."
    if codec.template is None or codec.template.is_models_own:
        return OWN_TEMPLATE
    system = codec.template.system if config.prompt.system is None else config.prompt.system
    form = codec.template.render(Dialogue(PROMPT, system=""))
    if codec.template.system is not None:
        # Ollama puts nothing for a system text that is not there. Templates that write words around it have to leave
        # those out as well, which only a condition in Go's language can say.
        whole = codec.template.render(Dialogue(PROMPT, system=SYSTEM))
        keeps_place = whole.replace(SYSTEM, "") == form
        form = whole if keeps_place else f"{{{{ if .System }}}}{whole.removesuffix(form)}{{{{ end }}}}{form}"
    if any(QUOTES in text or text.endswith('"') for text in (form, system or "", *codec.stop)):
        return 'A Modelfile cannot hold texts with """ in them or " at their end.'
    stops = [("stop", stop) for stop in codec.stop]
    return Modelfile(form, system or None, (*stops, *_numbers(config, loaded)))


def _numbers(config: Config, loaded: Loaded) -> list[tuple[str, str | float]]:
    """Return decoding as `predict` does it: else Ollama samples, and older ones punish repetition."""
    chosen = sampling.generation_config(loaded.model, loaded.tokenizer, config)
    most = int(chosen.max_new_tokens or sampling.default_max_new_tokens(config)) + config.generation.thinking_tokens
    parameters: list[tuple[str, str | float]] = [
        ("num_predict", most),
        ("num_ctx", config.prompt.max_source_length + most),
        ("repeat_penalty", float(chosen.repetition_penalty or 1.0)),
    ]
    if not chosen.do_sample:
        return [*parameters, ("temperature", 0.0)]
    return [*parameters, *((name, float(value)) for name in SAMPLING if (value := getattr(chosen, name)) is not None)]


def _quoted(text: str) -> str:
    return QUOTES + text + QUOTES if "\n" in text or '"' in text else f'"{text}"'
