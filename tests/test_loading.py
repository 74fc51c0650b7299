"""On a card weights go straight to it: followed up to the library's call, since there is no card here."""

import contextlib
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config, questions
from transformers import PreTrainedModel

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.inference import loading, merging
from cmexam_tune.models import device as devices
from cmexam_tune.models import layouts
from cmexam_tune.models.families import Family, chatglm
from cmexam_tune.models.families.chatglm import quantization
from cmexam_tune.train import train
from cmexam_tune.training import loop
from cmexam_tune.training.run_directory import run as runs

CHATGLM = chatglm.ChatGLM()


class Asked(BaseException):
    """The library was called."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of `from_pretrained` of models, which loads nothing."""
    seen: list[dict[str, Any]] = []

    def from_pretrained(cls: type, *_: Any, **options: Any) -> Any:
        seen.append(options)
        raise Asked

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen", "chatglm", "chatglm2", "bert"])
def test_every_family_names_the_device(family: str, calls: list[dict[str, Any]]) -> None:
    name = {"qwen": "llama", "chatglm2": "chatglm"}.get(family, family)
    config = make_config(name, model__model_name_or_path=checkpoint(family))
    for device, wanted in (("cuda:3", {"": "cuda:3"}), ("cpu", None)):
        with pytest.raises(Asked):
            Family.named(name).load(config.model, device=device)
        assert calls.pop()["device_map"] == wanted


@pytest.mark.parametrize(("deepspeed", "wanted"), [(None, "cuda:3"), ("zero3", "cpu")])
def test_training_loads_onto_its_own_card(deepspeed: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-3 transformers shares the weights out while it loads."""
    seen = []

    def load(model: Any, questions: Any, device: str) -> Any:
        seen.append(device)
        raise Asked

    stage = SimpleNamespace(is_zero3=lambda: deepspeed == "zero3")
    args: Any = SimpleNamespace(seed=0, deepspeed=deepspeed, hf_deepspeed_config=stage, device=torch.device("cuda", 3))
    family: Any = SimpleNamespace(load=load)
    questions: Any = []
    with contextlib.suppress(Asked):
        loop.load_base(family, make_config().model, questions, args)
    assert seen == [wanted]


def test_prediction_loads_onto_its_own_card(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "place", lambda: "cuda:5")
    with pytest.raises(Asked):
        loading.load(loading.open_source(make_config()))
    assert calls.pop()["device_map"] == {"": "cuda:5"}


def test_packed_weights_are_unpacked_on_the_card(
    tmp_path: Path, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((Path(checkpoint("chatglm")) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_bit": 8}), encoding="utf-8")
    config = make_config("chatglm", model__model_name_or_path=str(tmp_path))
    places: list[str] = []
    monkeypatch.setattr(quantization, "read_state", lambda *words: places.append(words[-1]) or {})
    with pytest.raises(Asked):
        CHATGLM.load(config.model, device="cuda:3")
    assert places == ["cuda:3"] and calls.pop()["device_map"] == {"": "cuda:3"}
    # Under ZeRO-3 only the first process has values.
    monkeypatch.setattr(chatglm, "is_deepspeed_zero3_enabled", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        with pytest.raises(Asked):
            CHATGLM.load(config.model)
    assert places[1:] == ["cpu", "meta"]


def test_weights_that_merging_spoils_are_read_again_when_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card has room for one model, and the host for none."""
    jsonl.write(tmp_path / "q.jsonl", questions(4))
    run = train(make_config(
        data={"train": [str(tmp_path / "q.jsonl")]}, out=str(tmp_path / "run"), model__dtype="bfloat16",
        training={"max_steps": 1, "learning_rate": 1e-2, "report_to": "none"},
    ))  # fmt: skip
    expected = {name: value.clone() for name, value in runs.load(run.path)[1].model.state_dict().items()}
    before: list[weakref.ref[Any]] = []
    alive = []
    read = runs.load

    def watched(*words: Any) -> Any:
        alive.append([ref() is not None for ref in before])
        config, loaded = read(*words)
        before.append(weakref.ref(loaded.model.get_base_model().get_input_embeddings().weight))
        return config, loaded

    monkeypatch.setattr(runs, "load", watched)
    monkeypatch.setattr(merging, "TOLERANCE", -1.0)
    loaded = loading.load(loading.open_source(run.path))
    assert alive == [[], [False]]
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


REMOTE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class WardConfig(LlamaConfig):
    model_type = "ward"

class WardForCausalLM(LlamaForCausalLM):
    config_class = WardConfig
    _supports_sdpa = False

    @classmethod
    def from_pretrained(cls, *words, **options):
        if isinstance(options.get("dtype"), str):  # as in Baichuan2's released code
            options["dtype"] = getattr(torch, options["dtype"])
        return super().from_pretrained(*words, **options)
"""


def test_a_checkpoint_that_brings_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code without SDPA, whose `from_pretrained` knows no `dtype="auto"`: foreseen, trained whole, read back."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = tmp_path / "ward"
    shutil.copytree(checkpoint("llama"), base)
    content = json.loads((base / "config.json").read_text(encoding="utf-8"))
    names = {"AutoConfig": "modeling_ward.WardConfig", "AutoModelForCausalLM": "modeling_ward.WardForCausalLM"}
    content |= {"model_type": "ward", "auto_map": names}
    (base / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (base / "modeling_ward.py").write_text(REMOTE, encoding="utf-8")
    config = make_config(
        model={"family": "llama", "model_name_or_path": str(base), "trust_remote_code": True}, tuning={"method": "full"}
    )
    family, method = runs.parts(config)
    for device in ("meta", "cpu"):
        model: Any = family.load(config.model, device=device).model
        assert type(model).__name__ == "WardForCausalLM" and model.config._attn_implementation == "eager"
        assert "model.attn_implementation=eager" in capsys.readouterr().err
    method.attach(model, family, config.tuning.settings)
    method.save(model, tmp_path / "saved")
    method.load(model, tmp_path / "saved")

    def gone(*_: Any, **__: Any) -> Any:
        raise AttributeError("'WardForCausalLM' object has no attribute 'all_tied_weights_keys'")

    monkeypatch.setattr(type(model), "from_pretrained", gone)
    with pytest.raises(UserError, match=r"saved: holds no weights for this model .*all_tied_weights_keys"):
        method.load(model, tmp_path / "saved")


def test_weights_too_large_for_the_card_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.49 GiB.")

    config = make_config()
    monkeypatch.setattr(PreTrainedModel, "to", crowded)
    with pytest.raises(UserError, match=r"do not fit the card's memory .*2\.49 GiB.*model.load_in_4bit=true"):
        loading.load(loading.Source(config))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", crowded)
    with pytest.raises(UserError, match="do not fit the card's memory"):
        Family.named("llama").load(config.model)


def test_an_adapter_goes_to_the_card_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT would put it on the first card, in every process."""
    asked: list[str] = []
    monkeypatch.setattr(
        layouts.PeftModel, "from_pretrained", lambda model, folder, torch_device: asked.append(torch_device)
    )
    place = SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr(layouts, "of", lambda model: None)
    layouts.open_lora(place, "adapter")  # type: ignore[arg-type]
    assert asked == ["cuda:3"]
