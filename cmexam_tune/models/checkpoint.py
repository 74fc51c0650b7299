"""Opening checkpoints: every way in which a path can be wrong becomes one clear message."""

import functools
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from cmexam_tune.config import ModelConfig
from cmexam_tune.core import cli, libraries
from cmexam_tune.core.errors import ConfigError, UserError, first_line
from cmexam_tune.core.variants import suggest
from cmexam_tune.models import attention, checkpoint_validation, device, gguf, released

if not device.is_accelerated():
    # DeepSpeed would look for a card at its first import and print a warning among the results.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

LOADING = (
    OSError, RuntimeError, ValueError, LookupError, ImportError, SafetensorError, UnpicklingError,
    TypeError, AttributeError, AssertionError, ArithmeticError, EOFError, StrictDataclassError, struct.error,
)  # fmt: skip
"""What transformers, PEFT and torch raise for files that are missing, damaged, or hold something of another kind."""

Made = TypeVar("Made", PreTrainedModel, tuple[PreTrainedModel, Mapping[str, Any]])
"""A model, or a model and transformers' loading info."""
VOLATILE = ("name_or_path", "is_local", "_commit_hash", "local_files_only")
"""What a saved tokenizer says of where it came from."""


class Checkpoint:
    """What `model.model_name_or_path` names, found once: a folder, a GGUF file, or a model of the hub."""

    def __init__(self, model: ModelConfig) -> None:
        """Find it; nothing is read yet.

        Raises:
            UserError: there is no such folder or hub name, or a file that cannot be read here.
        """
        self.model = model
        self.gguf = checkpoint_validation.check_place(model.model_name_or_path)
        """The GGUF file, if it is one."""
        folder = Path(model.model_name_or_path).expanduser()
        self.place = str(folder) if folder.is_dir() else model.model_name_or_path
        """The folder or hub name, as the libraries take it."""

    @functools.cached_property
    def raw_config(self) -> dict[str, Any]:
        """The unmodified config.json, or its equivalent in a GGUF file.

        Raises:
            UserError: a folder that holds no model, or a name that the hub does not know.
        """
        name = self.model.model_name_or_path
        if self.gguf is not None:
            try:
                return gguf.read_config(self.gguf)
            except LOADING as error:
                raise UserError(
                    f"model.model_name_or_path={self.gguf}: cannot be read ({first_line(error)}). The file is damaged "
                    "or not whole, or transformers does not read GGUF files of this architecture."
                ) from None
        path = Path(self.place)
        if path.is_dir():
            if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
                raise UserError(
                    f"model.model_name_or_path={name}: holds an adapter, not a model. Name its base model here and the "
                    f"adapter in model.adapter_name_or_path."
                )
            if not (path / "config.json").is_file():
                raise UserError(f"model.model_name_or_path={name}: holds no config.json, so it is no checkpoint.")
            checkpoint_validation.check(path)
        try:
            values, _ = PreTrainedConfig.get_config_dict(self.place, revision=self.model.revision)
        except LOADING as error:
            raise UserError(
                f"model.model_name_or_path={name}: neither a folder here (looked from {Path.cwd()}) nor a model that "
                f"can be fetched from the hub or its local cache ({first_line(error)})."
            ) from None
        return dict(values)

    def config(self) -> PreTrainedConfig:
        """Return its config with the changes of `model.config` in it.

        Raises:
            UserError: an unusable path or an architecture that transformers does not have.
            ConfigError: `model.config` names something that this config does not have.
        """
        model, kind = self.model, self.raw_config.get("model_type", "")
        if kind == "chatglm":  # family chatglm reads it by itself
            raise UserError(f"{model.model_name_or_path}: is a ChatGLM checkpoint. Set model.family=chatglm.")
        if kind not in (*CONFIG_MAPPING, *released.KINDS) and not model.trust_remote_code:
            raise UserError(
                f"{model.model_name_or_path}: transformers has no model type {kind!r}. If the checkpoint brings its "
                f"own Python code and you trust its author, set model.trust_remote_code=true."
            )
        try:
            config: PreTrainedConfig
            if self.gguf is None:
                config = AutoConfig.from_pretrained(self.place, **_source(model))
            else:
                config = AutoConfig.for_model(**self.raw_config)
        except LOADING as error:
            raise UserError(f"{model.model_name_or_path}: config.json cannot be used ({first_line(error)}).") from None
        change(config, model)
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer, with a padding token.

        Raises:
            UserError: it has none that can be used.
        """
        return read_tokenizer(self.place, self.model, self.gguf)

    def weights(
        self,
        auto: Any,
        config: PreTrainedConfig,
        device: str = "cpu",
        may_miss: Callable[[str], bool] = lambda key: False,
    ) -> PreTrainedModel:
        """Return the model with its weights on `device`; on `meta` it has every shape and no weights.

        Args:
            auto: a class of transformers with `from_pretrained`: the network's own, or an `AutoModelFor...`.
            config: what the network is made of.
            device: where the weights are read to.
            may_miss: whether a weight of this name may be new.

        Raises:
            UserError: files are missing or damaged, or a weight that `may_miss` does not allow to be new is not there.
        """
        if device == "meta":
            return _read_shapes(auto, self.model, config)
        verbosity = logging.get_verbosity()
        # Its report of missing weights is replaced by the check below.
        quiet: Any = logging
        quiet.set_verbosity_error()
        if Path(self.place).is_dir():
            hide_bars()
        try:
            loaded, info = _with_attention(self.model, functools.partial(self._load, auto, config, device))
        except LOADING as error:
            raise unloadable(self.model.model_name_or_path, error) from None
        finally:
            logging.set_verbosity(verbosity)
            hide_bars()
        if missing := sorted(key for key in info["missing_keys"] if not may_miss(key)):
            raise UserError(
                f"{self.model.model_name_or_path}: {len(missing)} weights that {type(loaded).__name__} needs are not "
                f"in the checkpoint, the first is {missing[0]}. It is incomplete or a model of another kind than "
                f"model.family={self.model.family}."
            )
        make_savable(loaded)
        return loaded

    def _load(
        self, auto: Any, config: PreTrainedConfig, device: str, **attention: str
    ) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """Return the model and transformers' loading info."""
        load = functools.partial(
            auto.from_pretrained,
            config=config,
            dtype=dtype(self.model),
            # Straight to a card, so that processes that share a machine do not fill its memory first.
            device_map=None if device == "cpu" else {"": device},
            output_loading_info=True,
            **_quantised(self.model, self.gguf),
            **_source(self.model),
            **attention,
        )
        loaded: tuple[PreTrainedModel, Mapping[str, Any]]
        loaded = load(self.place) if self.gguf is None else gguf.read_weights(load, self.gguf)
        return loaded


def change(config: PreTrainedConfig, model: ModelConfig) -> None:
    """Put the values of `model.config` into a config.

    Raises:
        ConfigError: a key that the config does not have.
    """
    keys = config.to_dict()
    for key, value in model.config.items():
        if key not in keys:
            raise ConfigError(
                f"model.config.{key}: {model.model_name_or_path} has no such config key{suggest(key, keys)}."
            )
        setattr(config, key, value)


def read_tokenizer(place: str, model: ModelConfig, file: Path | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub name, with a padding token.

    Args:
        place: where it lies: the checkpoint, or an adapter that brings one of its own.
        model: the section `model` of a config.
        file: the GGUF file that holds it, if one does.

    Raises:
        UserError: there is none that can be used.
    """
    try:
        tokenizer: PreTrainedTokenizerBase | None
        tokenizer = gguf.read_tokenizer(file) if file else released.read_tokenizer(place, model.revision)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(place, **_source(model))
        # One that cannot read this cannot read a question.
        if not tokenizer("答案: A", add_special_tokens=False)["input_ids"]:
            raise ValueError("it makes no tokens of a text")
    except Exception as error:  # noqa: BLE001 - all that the tokenizers library raises
        raise UserError(f"{place}: no usable tokenizer ({first_line(error)}).") from None
    if tokenizer.pad_token is None:
        # Labels go by position and padding has an attention mask, so EOS may serve as padding without harm.
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a checksum of everything the tokenizer would write to disk except where it came from."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if not path.is_file():
                continue
            content = path.read_bytes()
            if path.suffix == ".json":
                values = json.loads(content)
                # Fast tokenizers also save the truncation and padding of their last call.
                for key in (*VOLATILE, "truncation", "padding"):
                    values.pop(key, None)
                content = json.dumps(values, sort_keys=True).encode()
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def unloadable(name: str, error: BaseException) -> UserError:
    """Return the error for weights of `name` that could not be read, or that the card cannot hold."""
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(
            f"{name}: its weights do not fit the card's memory ({first_line(error)}). "
            f"{'Set model.load_in_4bit=true. ' * device.computes_4bit()}To train on several cards set "
            "training.deepspeed=zero3; end other programs on this card, or take a larger one."
        )
    return UserError(f"{name}: the weights cannot be loaded ({first_line(error)}).")


def _read_shapes(auto: Any, model: ModelConfig, config: PreTrainedConfig) -> PreTrainedModel:
    if issubclass(auto, PreTrainedModel):
        make = auto._from_config
    else:
        make = functools.partial(auto.from_config, trust_remote_code=model.trust_remote_code)
    try:
        with torch.device("meta"):
            shapes: PreTrainedModel = _with_attention(model, functools.partial(make, config, dtype=dtype(model)))
    except LOADING as error:
        raise UserError(f"{model.model_name_or_path}: no model can be made of it ({first_line(error)}).") from None
    return shapes


def _with_attention(model: ModelConfig, make: Callable[..., Made]) -> Made:
    """Call `make` with the config's attention, or with `eager` if the checkpoint's own Python supports nothing else.

    What suits the card is set afterwards: a class is asked only for attention that it knows whether it has.
    """
    implementation = model.attn_implementation
    try:
        result = make(attn_implementation=implementation)
        loaded: PreTrainedModel = result[0] if isinstance(result, tuple) else result
        if loaded._can_set_attn_implementation():
            loaded.set_attn_implementation(attention.suited(implementation))
        return result
    except ValueError as error:
        if not model.trust_remote_code or implementation == "eager" or "scaled_dot_product_attention" not in str(error):
            raise
    name = model.model_name_or_path
    cli.note(f"note: {name} brings code without {implementation}; model.attn_implementation=eager is used")
    return make(attn_implementation="eager")


def make_savable(model: PreTrainedModel) -> None:
    """Mend generation settings that transformers reads with the weights and would refuse to write again.

    Vicuna-1.5 and Llama-2-chat were released with temperature and top_p but without do_sample. Turning that on keeps
    the authors' values; prediction takes its settings from the recipe and never looks at it. Where that is not enough
    only the special tokens are kept.
    """
    # Classifiers have none.
    settings: Any = getattr(model, "generation_config", None)
    if settings is None or _is_valid(settings):
        return
    settings.do_sample = True
    if not _is_valid(settings):
        make: Any = GenerationConfig.from_model_config
        model.generation_config = make(model.config)


def _is_valid(settings: Any) -> bool:
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True


def _quantised(model: ModelConfig, file: Path | None) -> dict[str, object]:
    """Return what makes transformers load the weights in 4 bits (Dettmers et al. 2023, arXiv:2305.14314)."""
    if not model.load_in_4bit:
        return {}
    import transformers

    if not device.computes_4bit():
        raise device.no_4bit(device.name())
    make: Any = transformers.BitsAndBytesConfig
    if file is not None:
        raise ConfigError(
            f"model.load_in_4bit: {model.model_name_or_path} is a GGUF file, whose weights are unpacked when they are "
            "read. Leave it out, or name a folder with safetensors."
        )
    if model.adapter_name_or_path is not None:
        raise ConfigError(
            "model.load_in_4bit: an adapter (model.adapter_name_or_path) cannot be merged into weights of 4 bits "
            "without loss. Export it merged first and name that folder in model.model_name_or_path."
        )
    try:
        return {
            "quantization_config": make(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype(model),
            )
        }
    except ImportError:
        raise ConfigError("model.load_in_4bit: pip install 'cmexam_tune[4bit]'") from None


def dtype(model: ModelConfig) -> torch.dtype:
    """Return the type of the frozen weights: bfloat16 where the card computes in it, else float16, float32 on CPU."""
    if model.dtype != "auto":
        chosen: torch.dtype = getattr(torch, model.dtype)
        return chosen
    return device.half_precision() or torch.float32


def hide_bars() -> None:
    """Show no more bars of reading and writing weights; those of a download come before and are of use."""
    if not libraries.verbose():
        hide: Any = logging.disable_progress_bar
        hide()


def _source(model: ModelConfig) -> dict[str, object]:
    return {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
