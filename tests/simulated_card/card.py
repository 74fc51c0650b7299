"""The card's tensors, what is computed with them, and what torch is told about the card."""

import os
import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
PLACE = torch.device("cuda", 0)
READS_VALUES = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.unique_dim, aten.unique_consecutive,
    aten._unique2, aten.bincount, aten.is_nonzero,
}  # fmt: skip
"""Operations whose result the host needs to go on."""
MIXES_PLACES = {aten.copy_, aten._to_copy, aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
"""Operations that take tensors of the host beside those of a card."""


@dataclass(frozen=True)
class Model:
    """A card that people own."""

    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""


MODELS = {
    "V100": Model("Tesla V100-SXM2-16GB", (7, 0), 16_935_419_904),
    "A100": Model("NVIDIA A100-SXM4-80GB", (8, 0), 84_987_740_160),
}


@dataclass
class Record:
    """What was seen since `clear`."""

    syncs: Counter[str] = field(default_factory=Counter)
    """Source line -> how often the host waited there for the card."""
    kernels: Counter[str] = field(default_factory=Counter)
    """flash, efficient, math -> how often scaled dot-product attention would have run it; torch's formula computes."""

    def clear(self) -> None:
        """Forget all."""
        self.syncs.clear()
        self.kernels.clear()


record = Record()
capability = (0, 0)


class CardTensor(torch.Tensor):
    """A tensor on the card; `host` holds its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "CardTensor":
        wrapper: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=PLACE,
        )
        return wrapper

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    @classmethod
    def __torch_dispatch__(cls, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operation, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            record.kernels[attention_kernel(*args, **(kwargs or {}))] += 1
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:
        return f"CardTensor({self.host!r})"

    def tolist(self) -> Any:
        note_sync()
        return self.host.tolist()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.host.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made: Any = CardTensor(self.host.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made
        return made

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, CardTensor):
            raise RuntimeError("the data of a tensor on the card is set to a tensor of the host")
        torch.Tensor.data.__set__(self, value)
        self.host = value.host


class Watch(TorchDispatchMode):
    """Sees the operations that make tensors on the card out of none."""

    def __torch_dispatch__(self, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(operation, args, kwargs or {})


def compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU and give its results the place that they would have.

    Raises:
        RuntimeError: tensors of the host and of the card meet in it.
    """
    packet = operation.overloadpacket
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    cards = [tensor for tensor in tensors if isinstance(tensor, CardTensor)]
    if packet is aten._pin_memory:
        return args[0]
    if packet is aten.is_pinned:
        return False
    if cards and packet not in MIXES_PLACES:
        check_places(operation, tensors)
    if cards and waits(packet, args, kwargs):
        note_sync()
    out = operation(*tree_map(to_host, args), **tree_map(to_host, {**kwargs, **unpinned(kwargs)}))
    if operation._schema.is_mutable:
        return changed_tensors(operation, cards, out)
    target = kwargs.get("device")
    on_card = bool(cards) if target is None else torch.device(target).type == PLACE.type
    return tree_map(to_card, out) if on_card else out


def changed_tensors(operation: Any, cards: list[CardTensor], out: Any) -> Any:
    """Return the tensors of the card whose values an operation has changed in place."""
    for card in cards:
        if card.shape != card.host.shape:
            raise NotImplementedError(f"{operation} changes the shape of a tensor in place")
    of_host = {id(card.host): card for card in cards}
    return tree_map(lambda value: of_host.get(id(value)) if isinstance(value, torch.Tensor) and cards else value, out)


def check_places(operation: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors of the host beside those of the card; single numbers may be anywhere."""
    for tensor in tensors:
        if not isinstance(tensor, CardTensor) and tensor.dim() and tensor.device.type == "cpu":
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({operation}, {tuple(tensor.shape)})"
            )


def waits(packet: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the host has to wait for the card before it can go on."""
    if packet is aten._to_copy:
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu"
    if packet is aten.copy_:
        return isinstance(args[1], CardTensor) and not isinstance(args[0], CardTensor)
    if packet is aten.index:  # a mask becomes a list of places, whose number the host does not know
        return any(isinstance(index, CardTensor) and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in READS_VALUES


def note_sync() -> None:
    """Count a wait at the innermost line outside of torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and f"{os.sep}torch{os.sep}" not in name:
            short = name.split(f"site-packages{os.sep}")[-1]
            short = short[short.index("cmexam_tune" + os.sep) :] if f"{os.sep}cmexam_tune{os.sep}" in name else short
            record.syncs[f"{short}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back


def attention_kernel(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **more: Any) -> str:
    """Return which kernel would run, by the conditions of torch's `sdp_utils.cpp` that depend on the caller.

    FlashAttention wants capability 8.0, half precision and no mask; the efficient kernel no shared heads.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    if capability >= (8, 0) and half and attn_mask is None and query.shape[-1] <= 256:
        return "flash"
    return "efficient" if query.shape[1] == key.shape[1] else "math"


def unpinned(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the change that lets memory be made without a card."""
    return {"pin_memory": False} if kwargs.get("pin_memory") else {}


def to_host(value: Any) -> Any:
    """Return a tensor's values, or the CPU in place of the card; anything else as it is."""
    if isinstance(value, CardTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == PLACE.type else value


def to_card(value: Any) -> Any:
    """Put a tensor on the card; anything else as it is."""
    return CardTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, CardTensor) else value


def activate(model: Model) -> None:
    """Tell torch of the card, for the rest of this process; before transformers and accelerate are imported."""
    global capability
    capability = model.capability
    # The weights would be read by threads, in which this thread's mode does not hold.
    os.environ.update(HF_DEACTIVATE_ASYNC_LOAD="1", HF_ENABLE_PARALLEL_LOADING="0", PYTORCH_NVML_BASED_CUDA_CHECK="0")
    torch.autograd.set_multithreading_enabled(False)
    # `torch.tensor(..., device="cuda")` is then made on the CPU and moved, as fake tensors need it.
    torch._C._set_only_lift_cpu_tensors(True)
    properties = types.SimpleNamespace(
        name=model.name, major=capability[0], minor=capability[1], total_memory=model.memory, multi_processor_count=80
    )
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "set_device": None,
        "current_device_index": 0, "set_device_index": None, "init": None, "_lazy_init": None,
        "get_device_properties": properties, "get_device_name": model.name, "get_device_capability": capability,
        "mem_get_info": (model.memory, model.memory), "get_memory_info": (model.memory, model.memory),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
        "memory_stats": {}, "empty_cache": None, "ipc_collect": None, "synchronize": None,
        "reset_peak_memory_stats": None, "reset_accumulated_memory_stats": None, "manual_seed": None,
        "manual_seed_all": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8)], "set_rng_state_all": None,
        "current_accelerator": PLACE, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.accelerator):
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, lambda *args, _answer=answer, **kwargs: _answer)
    own: Any = torch
    own.cuda.is_bf16_supported = lambda including_emulation=True: capability >= (8, 0) or including_emulation
    own.cuda.amp.common.amp_definitely_not_available = lambda: False
    own.accelerator.current_accelerator = lambda check_available=False: torch.device(PLACE.type)
    own.Tensor.pin_memory = lambda tensor, *args: tensor
    own.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()
    # Moving a module between host and card makes new parameters, as between devices whose tensors differ.
    own._has_compatible_shallow_copy_type = lambda old, new: isinstance(old, CardTensor) == isinstance(new, CardTensor)
    Watch().__enter__()
