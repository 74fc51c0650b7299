"""vLLM and SGLang: what each is started by, under the names of its own options, and what it cannot compute."""

import importlib.util
import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cmexam_tune.config import ModelConfig
from cmexam_tune.core import documents
from cmexam_tune.core.errors import ConfigError, UserError

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""
SPLITS = ("tensor_parallel_size", "tp_size", "pipeline_parallel_size", "pp_size")
"""Options over whose product of cards one copy of a model is split; SGLang has two names for each."""
MERGE = (
    "`cmexam-tune export --merge --run RUN --out DIR` writes a whole model, which model.model_name_or_path=DIR names; "
    "or leave out model.engine"
)


@dataclass(frozen=True)
class Served:
    """What a server is to compute."""

    model: ModelConfig
    dtype: str
    cards: int
    adapter: Path | None = None
    rank: int = 0
    """Of the adapter."""

    @property
    def name(self) -> str:
        """What the model is called at the server."""
        return Path(self.model.model_name_or_path).name

    @property
    def adapter_name(self) -> str:
        """What the adapter is called there."""
        return f"{self.name}-lora"


class Launcher:
    """A server: how it is started and asked for its version."""

    module: ClassVar[str]
    """What is run by `python -m`."""
    python: ClassVar[str]
    """Environment variable that names the Python that has it."""
    version_path: ClassVar[str]
    """Where the server tells its version, under the key `version`."""
    batch_invariant: ClassVar[str | None] = None
    """Environment variable that makes outputs independent of the batch, if there is one."""
    model_option: ClassVar[str]
    """The server's name for: path or name of the model."""
    config_option: ClassVar[str]
    """...: changes to its config.json."""
    adapters_option: ClassVar[str]
    """...: its adapters, `name=folder`."""
    copies_option: ClassVar[str]
    """...: copies of the model."""
    negates: ClassVar[bool]
    """Whether each flag has a twin with `no-` before it; else a flag that is left out means False."""

    def command(self, served: Served, port: int) -> list[str]:
        """Return the command that starts the server.

        Raises:
            UserError: no Python that has it is known.
        """
        options = {**self.options(served), "host": "127.0.0.1", "port": port}
        for name, value in served.model.engine_arguments.items():
            if name in ("host", "port"):
                raise ConfigError(f"model.engine_arguments: {name} is chosen here. Leave it out.")
            options[name] = value
        return [*self._start(served.model), *itertools.chain(*itertools.starmap(self._words, options.items()))]

    def _start(self, model: ModelConfig) -> list[str]:
        if model.engine_command:
            return shlex.split(model.engine_command)
        package = self.module.partition(".")[0]
        if importlib.util.find_spec(package) is not None:
            return [sys.executable, "-m", self.module]
        if python := os.environ.get(self.python):
            return [python, "-m", self.module]
        raise UserError(
            f"model.engine={model.engine}: {package} is not installed here. It needs versions of torch and "
            f"transformers of its own: python -m venv ENV; ENV/bin/pip install {package}; "
            f"export {self.python}=ENV/bin/python"
        )

    def _words(self, name: str, value: object) -> list[str]:
        """Return an option as words: True is a bare flag, a list has a word for each item, None is left out."""
        flag = f"--{name.replace('_', '-')}"
        if value is None or (value is False and not self.negates):
            return []
        if isinstance(value, bool):
            return [flag if value else flag.replace("--", "--no-", 1)]
        if isinstance(value, list | tuple):
            return [flag, *map(str, value)]
        return [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]

    def options(self, served: Served) -> dict[str, object]:
        """Return the server's own options, without dashes -> values; None is left out."""
        model = served.model
        options: dict[str, object] = {
            self.model_option: model.model_name_or_path,
            "served_model_name": served.name,
            "dtype": served.dtype,
            "revision": model.revision,
            "trust_remote_code": model.trust_remote_code or None,
            self.config_option: json.dumps(dict(model.config)) if model.config else None,
        }
        split = math.prod(int(model.engine_arguments.get(name) or 1) for name in SPLITS)
        if (copies := served.cards // split) > 1:
            options[self.copies_option] = copies
        if served.adapter is not None:
            options["enable_lora"] = True
            options[self.adapters_option] = f"{served.adapter_name}={served.adapter.resolve()}"
            options["max_lora_rank"] = served.rank
        return options

    def model_name(self, served: Served) -> str:
        """Return what is asked for: the model, or the adapter on it."""
        return served.name if served.adapter is None else served.adapter_name


class VLLM(Launcher):
    """vLLM's OpenAI server."""

    module = "vllm.entrypoints.openai.api_server"
    python = "CMEXAM_TUNE_VLLM_PYTHON"
    version_path = "/version"
    batch_invariant = "VLLM_BATCH_INVARIANT"
    model_option, config_option, adapters_option = "model", "hf_overrides", "lora_modules"
    copies_option, negates = "data_parallel_size", True

    def options(self, served: Served) -> dict[str, object]:
        """Return vLLM's options."""
        options = super().options(served) | {
            # As long as the model's own positions and the memory allow.
            "max_model_len": "auto",
            # The authors' sampling settings would be added to what is asked.
            "generation_config": "vllm",
            "tokenizer_revision": served.model.revision,
        }
        if served.adapter is not None:
            options["max_lora_rank"] = next((rank for rank in RANKS if rank >= served.rank), served.rank)
        return options


class SGLang(Launcher):
    """SGLang's OpenAI server."""

    module = "sglang.launch_server"
    python = "CMEXAM_TUNE_SGLANG_PYTHON"
    version_path = "/server_info"
    model_option, config_option, adapters_option = "model_path", "json_model_override_args", "lora_paths"
    copies_option, negates = "dp_size", False

    def options(self, served: Served) -> dict[str, object]:
        """Return SGLang's options."""
        return super().options(served) | {"sampling_defaults": "openai"}

    def model_name(self, served: Served) -> str:
        """Return what is asked for; SGLang puts the model's name in front of an adapter's."""
        return served.name if served.adapter is None else f"{served.name}:{served.adapter_name}"


LAUNCHERS: Mapping[str, type[Launcher]] = {"vllm": VLLM, "sglang": SGLang}
"""`model.engine` -> how it is started."""


def lora_rank(folder: Path) -> int:
    """Return the highest rank in a PEFT adapter.

    Raises:
        UserError: it is no adapter, or one that vLLM and SGLang would refuse or compute without a part of it.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"{folder}: holds no adapter_config.json, so it is no PEFT adapter.")
    values = documents.read_json(path, "config of an adapter")
    wrong = [name for name, refused in REFUSED.items() if refused(values)]
    if wrong:
        raise UserError(f"{folder}: no server computes {wrong[0]}. {MERGE}.")
    ranks: list[int] = [values.get("r"), *(values.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise UserError(f"{path}: the rank r must be a whole number above 0, found {ranks[0]!r}.")
    return max(ranks)


REFUSED: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    "an adapter that is no LoRA": lambda values: values.get("peft_type") != "LORA",
    "DoRA (use_dora)": lambda values: values.get("use_dora"),
    "trained biases (bias)": lambda values: values.get("bias", "none") != "none" or values.get("lora_bias"),
    "modules that are trained whole (modules_to_save)": lambda values: values.get("modules_to_save"),
}
"""What is named in the message -> whether an adapter's config asks for it."""
