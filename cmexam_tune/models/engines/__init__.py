"""Models of family llama computed by vLLM or SGLang (`model.engine`) instead of transformers in this process.

The engine is a server that is started as a child of this program and ends with it; nothing of it is imported, because
it needs versions of torch and transformers of its own. Start reading with `served_model.py`, how it is asked;
`server.py` is the child, `watch.py` what ends it even if this program is killed, `launchers.py` its command line.
Whether one is used at all is decided in `inference/loading.py`.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models import Loaded, checkpoint, device
from cmexam_tune.models.engines.launchers import LAUNCHERS, MERGE, Served, lora_rank
from cmexam_tune.models.engines.served_model import ServedModel
from cmexam_tune.models.engines.server import EngineServer

__all__ = ["ElsewhereModel", "ServedModel", "load"]


@dataclass(frozen=True)
class ElsewhereModel:
    """Takes the place of a loaded model (`Loaded.model`)."""

    server: EngineServer
    positions: int | None
    generation_config: GenerationConfig | None
    """The authors' settings: of them only the ids that end a text are used."""


def load(model: ModelConfig, adapter: Path | None, log: Path) -> Loaded:
    """Return a model that its engine will compute, and its tokenizer; the server is started with the first question.

    Args:
        model: the section `model` of a config, or that of a run with the folder of a whole model in it.
        adapter: PEFT folder of a run that is an adapter.
        log: where the server's words go.

    Raises:
        UserError: a path that is none, an engine that is not installed, or a model that it cannot compute.
    """
    key = f"model.engine={model.engine}"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{key}: one server uses all cards of a machine. Start one process, without torchrun.")
    if model.load_in_4bit:
        raise ConfigError(f"{key}: the engine has no weights of 4 bits that are rounded as here. {MERGE}.")
    source = checkpoint.Checkpoint(model)
    if source.gguf is not None:
        raise ConfigError(
            f"{key}: {model.model_name_or_path} is a GGUF file, which the engine would unpack in its own way. Name "
            "a folder with safetensors."
        )
    if adapter is not None and model.adapter_name_or_path is not None:
        raise ConfigError(
            f"{key}: an adapter on {model.adapter_name_or_path} is an adapter on an adapter, which the engine does not "
            f"compute. {MERGE}."
        )
    config = source.config()
    tokenizer = source.tokenizer()
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model.model_name_or_path}: its tokenizer has no EOS token, so answers would never end.")
    if adapter is None and model.adapter_name_or_path is not None:
        adapter = Path(model.adapter_name_or_path).expanduser()
        if any((adapter / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
            extended = checkpoint.read_tokenizer(str(adapter), model)
            if (new := len(extended) - len(tokenizer)) > 0:
                raise UserError(f"{adapter}: brings {new} new words, which {key} lacks. {MERGE}.")
            tokenizer = extended
    served = Served(
        replace(model, model_name_or_path=source.place),
        str(checkpoint.dtype(model)).removeprefix("torch."),
        device.count(),
        adapter,
        0 if adapter is None else lora_rank(adapter),
    )
    server = EngineServer(LAUNCHERS[str(model.engine)](), served, log)
    positions = getattr(config, "max_position_embeddings", None)
    elsewhere: Any = ElsewhereModel(server, positions, _generation_config(source))
    return Loaded(elsewhere, tokenizer)


def _generation_config(source: checkpoint.Checkpoint) -> GenerationConfig | None:
    read: Any = GenerationConfig.from_pretrained
    try:
        settings: GenerationConfig = read(source.place, revision=source.model.revision)
    except checkpoint.LOADING:  # most base models have none
        return None
    return settings
