"""Checkpoints in the layout of their authors' code, on transformers' networks.

A layout is one list of what each module is called there and here, in transformers' own vocabulary (`WeightRenaming`,
`WeightConverter`), with plain paths of modules. Weights are read and written by it (`register`), and so are LoRA
adapters whose config names modules as the checkpoint does: on disk they have the names and the fused matrices of the
checkpoint they were trained on, as the authors' scripts and released adapters have. One that names modules as
transformers does is written by these names, and fits the same model in transformers' own layout.

A LoRA on a fused matrix is exactly a LoRA on each of its parts that share A: rows of W + BA are rows of W plus rows of
B, times A. So reading gives every part a copy of A and its rows of B, `tie` makes the copies one parameter while
training, and writing joins the rows again.
"""

# transformers and PEFT annotate their classes only in part.
# mypy: disable-error-code="no-untyped-call, misc, override"

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter, WeightRenaming

REFUSES_LORA = "refuses_lora"
"""Attribute of a module that is not linear in its weight: why W + BA is not what it computes."""
SHARED = ".lora_A."
"""The factor `[r, in]` of an adapter, which has no rows of the matrix: all parts of a fused one have the same."""


class SplitHeads(ConversionOps):
    """The rows of a fused projection `[heads * head_dim, ...]`, cut into one block of heads for each target.

    It needs nothing but the config, so that it splits matrices, biases and LoRA's B `[heads * head_dim, r]` alike.
    """

    def __init__(self, *heads: str) -> None:
        """Take the config's key for the number of heads of each target."""
        self.heads = heads

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: object
    ) -> dict[str, torch.Tensor]:
        """Return the blocks; transformers hands over `config` by keyword, and tensors alone or in lists."""
        (fused,) = input_dict.values()
        fused = fused[0] if isinstance(fused, list) else fused
        counts = [int(getattr(kwargs["config"], key)) for key in self.heads]
        blocks = fused.split([count * (fused.shape[0] // sum(counts)) for count in counts])
        return {target: block.contiguous() for target, block in zip(target_patterns, blocks, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Return what joins the blocks again."""
        return Concatenate(dim=0)


class Layout:
    """What the modules of a checkpoint are called by its authors, and what transformers' network calls them."""

    def __init__(self, *transforms: WeightRenaming | WeightConverter) -> None:
        """Take the list: plain paths of modules, each a part of whole names; a converter has several targets."""
        self.transforms = list(transforms)

    def original(self, name: str) -> str:
        """Return the authors' name of a module; all parts of a fused one have the same."""
        for transform in reversed(self._in_order()):
            name, _ = transform.reverse_transform().rename_source_key(name)
        return name

    def names(self, name: str) -> list[str]:
        """Return the names here of the modules that the checkpoint calls `name`, which may be the end of a name."""
        matching = [
            transform
            for transform in self.transforms
            if any(_ends(source, name) for source in transform.source_patterns)
        ]
        if matching:  # several: the outputs of attention and MLP may have the same name
            return [target for transform in matching for target in transform.target_patterns]
        parts = [name]
        for transform in self._in_order():
            renamed, matched = transform.rename_source_key(parts[0])
            if matched is not None:
                parts = [renamed.replace(transform.target_patterns[0], target) for target in transform.target_patterns]
        return parts

    def spells(self, config: LoraConfig, model: PreTrainedModel) -> bool:
        """Return whether a PEFT config names modules as the checkpoint does; False: only transformers has such names.

        Raises:
            ValueError: some names are the checkpoint's, others transformers'.
        """
        modules = {name: self.original(name) for name, _ in model.named_modules()}
        if isinstance(targets := config.target_modules, str):
            # Of the two readings of a pattern the one that means more: `(k|o)_proj` names one matrix of Baichuan.
            by_original = sum(bool(re.fullmatch(targets, original)) for original in modules.values())
            return targets == "all-linear" or by_original >= sum(bool(re.fullmatch(targets, name)) for name in modules)
        names = [*(targets or ()), *(config.modules_to_save or ()), *(config.rank_pattern or ())]
        in_checkpoint = {name for name in names if any(_ends(original, name) for original in modules.values())}
        in_model = {name: original for name in names for module, original in modules.items() if _ends(module, name)}
        if ours := sorted(in_model.keys() - in_checkpoint):
            if theirs := sorted(in_checkpoint - in_model.keys()):
                raise ValueError(
                    f"{theirs[0]} is the checkpoint's name and {ours[0]} that of transformers "
                    f"({in_model[ours[0]]} in the checkpoint). Take all names from one of them"
                )
            return False
        return True

    def _in_order(self) -> list[WeightRenaming | WeightConverter]:
        """Return the list as transformers reads by it: all renamings, then at most one converter."""
        return sorted(self.transforms, key=lambda transform: isinstance(transform, WeightConverter))

    def read(self, state: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        """Return the tensors of a LoRA adapter in the checkpoint's layout under the names here, fused ones split."""
        tensors = dict(state)
        for transform in self._in_order():
            source, targets = transform.source_patterns[0], transform.target_patterns
            for name in list(tensors):
                renamed, matched = transform.rename_source_key(name)
                if matched is None:
                    continue
                tensor = tensors.pop(name)
                parts = dict.fromkeys(targets, tensor)
                if isinstance(transform, WeightConverter) and SHARED not in name:
                    parts = _converted(transform, {source: tensor}, config)
                tensors.update({renamed.replace(targets[0], part): value for part, value in parts.items()})
        return tensors

    def write(self, state: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
        """Undo `read`; of tensors that all parts share (`tie`), one is enough."""
        tensors = dict(state)
        for transform in reversed(self._in_order()):
            back = transform.reverse_transform()
            fused: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
            for name in list(tensors):
                renamed, part = back.rename_source_key(name)
                if part is not None:
                    fused[renamed][part] = tensors.pop(name)
            for name, parts in fused.items():
                if isinstance(back, WeightConverter) and SHARED not in name:
                    parts = _converted(back, parts, config)
                tensors[name] = next(iter(parts.values()))
        return tensors

    def adapt(self, config: LoraConfig, model: PreTrainedModel) -> None:
        """Put the names here into a PEFT config that has the checkpoint's; patterns are matched as PEFT does.

        Raises:
            ValueError: matrices that the checkpoint has apart are fused here.
        """
        targets = config.target_modules
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if targets == "all-linear":
            head = model.get_output_embeddings()
            resolved = [name for name in linear if model.get_submodule(name) is not head]
        elif isinstance(targets, str):
            resolved = [name for name in linear if re.fullmatch(targets, self.original(name))]
        else:
            resolved = [part for name in targets or () for part in self.names(name)]
        for joined in [transform for transform in self.transforms if len(transform.source_patterns) > 1]:
            if any(name.endswith(joined.target_patterns[0]) for name in resolved):
                raise ValueError(f"{' and '.join(joined.source_patterns)} are one matrix here, which has one LoRA")
        config.target_modules = resolved
        if config.modules_to_save:
            config.modules_to_save = [part for name in config.modules_to_save for part in self.names(name)]
        for key in ("rank_pattern", "alpha_pattern"):
            ranks = vars(config)[key] or {}
            vars(config)[key] = {part: rank for name, rank in ranks.items() for part in self.names(name)}

    def tie(self, tuned: PeftModel) -> None:
        """Make A one parameter for all parts of a fused matrix, which the LoRA of the authors has only one of."""
        layers = {name: module for name, module in tuned.named_modules() if isinstance(module, LoraLayer)}
        for transform in self.transforms:
            first, *others = transform.target_patterns
            for name in [name for name in layers if name.endswith(f".{first}")]:
                for part in others:
                    other = layers[name.removesuffix(first) + part]
                    for adapter, factor in layers[name].lora_A.items():
                        other.lora_A[adapter].weight = factor.weight


def _ends(name: str, ending: str) -> bool:
    """Return whether the name of a module ends in whole parts, as PEFT compares them."""
    return f".{name}".endswith(f".{ending}")


def _converted(
    transform: WeightConverter, tensors: dict[str, torch.Tensor], config: PreTrainedConfig
) -> dict[str, torch.Tensor]:
    """Return what the operations make of `tensors`, by pattern."""
    sources, targets = transform.source_patterns, transform.target_patterns
    for operation in transform.operations:
        convert: Any = operation.convert
        tensors = convert(tensors, source_patterns=sources, target_patterns=targets, config=config)
    return tensors


LAYOUTS: dict[type[PreTrainedModel], Layout] = {}


def register(network: type[PreTrainedModel], layout: Layout) -> None:
    """Have transformers read and write the weights of `network`, a subclass of one of its own, in a layout."""
    register_checkpoint_conversion_mapping(network.__name__, layout.transforms, overwrite=True)
    LAYOUTS[network] = layout


def of(model: PreTrainedModel | PeftModel) -> Layout | None:
    """Return the layout of the checkpoint that a model comes from; None: transformers' own."""
    network: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return LAYOUTS.get(type(network))


def of_lora(tuned: PeftModel) -> Layout | None:
    """Return the layout that the LoRA of a model is written in; None: it names modules as transformers does."""
    layout = of(tuned)
    base: Any = tuned.get_base_model()
    config: Any = tuned.peft_config["default"]
    return layout if layout is not None and layout.spells(config, base) else None


def has_module(model: PreTrainedModel, ending: str) -> bool:
    """Return whether a module's name ends in `ending`, here or in the checkpoint."""
    layout = of(model)
    names = [name for name, _ in model.named_modules()]
    originals = [] if layout is None else map(layout.original, names)
    return any(_ends(name, ending) for name in (*names, *originals))


def read(model: PreTrainedModel | PeftModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that are named as in the checkpoint of `model` under the names here; see `Layout.read`."""
    layout = of(model)
    return dict(state) if layout is None else layout.read(state, model.config)


def write(model: PreTrainedModel | PeftModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo `read`."""
    layout = of(model)
    return dict(state) if layout is None else layout.write(state, model.config)


def default_targets(model: PreTrainedModel, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the checkpoint's names of the modules whose names end in `names` here, or `names` if there are none."""
    layout = of(model)
    if layout is None:
        return names
    modules = [name for name, _ in model.named_modules() if name.endswith(names)]
    return tuple(dict.fromkeys(layout.original(name).rpartition(".")[2] for name in modules)) or names


def add_lora(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Return `peft.get_peft_model` of a config that names modules as the checkpoint or transformers does.

    The adapter is of the matrices that are named: one on `W_pack` shares its A, those on `q_proj` and `v_proj` do not.

    Raises:
        ValueError: as PEFT; names of both kinds; or a module that no LoRA can stand beside.
    """
    layout = of(model)
    if layout is None or not layout.spells(config, model):
        return _without_refusals(get_peft_model(model, config))
    keys = ("target_modules", "modules_to_save", "rank_pattern", "alpha_pattern")
    written = {key: vars(config)[key] for key in keys}
    layout.adapt(config, model)
    tuned = _without_refusals(get_peft_model(model, config))
    layout.tie(tuned)
    # What is saved names modules as the checkpoint does, whatever they are called here.
    vars(config).update(written)
    return tuned


def _without_refusals(tuned: PeftModel) -> PeftModel:
    for name, module in tuned.named_modules():
        if isinstance(module, LoraLayer) and (reason := getattr(module.get_base_layer(), REFUSES_LORA, None)):
            raise ValueError(f"{name.removeprefix('base_model.model.')} {reason}")
    return tuned


def open_lora(model: PreTrainedModel, folder: str) -> PeftModel:
    """Return `PeftModel.from_pretrained` of an adapter in the layout of the model's checkpoint.

    Raises:
        ValueError: the adapter has other layers than its config says, or another kind than LoRA.
    """
    if of(model) is None:
        # Else PEFT puts every process's adapter on the first card.
        return PeftModel.from_pretrained(model, folder, torch_device=str(model.device))
    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"a {config.peft_type} adapter, only LoRA can be put on this checkpoint")
    config.inference_mode = True
    tuned = add_lora(model, config)
    read_lora(tuned, folder)
    return tuned


def read_lora(tuned: PeftModel, folder: str) -> None:
    """Copy an adapter, in the layout of the model's checkpoint, into the LoRA layers of a model.

    Raises:
        ValueError: the adapter has other layers than the model.
        RuntimeError: or other ranks.
    """
    weights, layout = load_peft_weights(folder, device="cpu"), of_lora(tuned)
    weights = weights if layout is None else layout.read(weights, tuned.config)
    expected = get_peft_model_state_dict(tuned, save_embedding_layers=False)
    if unmatched := sorted(set(expected) ^ set(weights)):
        raise ValueError(f"{len(unmatched)} tensors differ in name, the first is {unmatched[0]}")
    set_peft_model_state_dict(tuned, weights)


def write_lora(tuned: PeftModel, folder: Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` as PEFT does, in the layout of the checkpoint.

    `state_dict`, with the names here, replaces the model's own parameters, as under ZeRO-3.
    """
    # PEFT would ask the hub whether the base's vocabulary changed; modules_to_save holds embeddings that were tuned.
    tuned.save_pretrained(str(folder), state_dict=state_dict, save_embedding_layers=False)
    if (layout := of_lora(tuned)) is not None:
        path = folder / "adapter_model.safetensors"
        # Read as bytes: `load_file` maps the file, which is written over here.
        save_file(layout.write(load(path.read_bytes()), tuned.config), path, {"format": "pt"})
