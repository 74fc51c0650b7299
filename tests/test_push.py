"""An export put on a model hub: what arrives there, and what is refused before anything leaves."""

from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest
import yaml

pytest.importorskip("torch")

import training_kit

from cmexam_tune.__main__ import main
from cmexam_tune.core.errors import TrainingStopped, UserError
from cmexam_tune.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training_kit.world(tmp_path_factory.mktemp("push"), 6)
    return train(training_kit.recipe(folder, training__max_steps=1, training__save_strategy="no")).path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    """A hub in place of huggingface.co, whose address a library reads at its import."""
    with fake_hub.serving() as hub:
        import huggingface_hub.constants as constants

        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of that hub's own; the other is open
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


WORDS = ["--push", "me/exam", "--license", "apache-2.0", "--base-model", "huggyllama/llama-7b"]


def test_a_folder_with_a_valid_card_arrives(
    run: Path, hub: fake_hub.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.large = 1 << 10
    assert not main(["export", "--run", str(run), "--out", str(tmp_path / "out"), *WORDS])
    written = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    assert hub.files == written and "adapter_model.safetensors" in written
    assert hub.private == {"exam": True}  # public only with --public
    card = yaml.safe_load(hub.files["README.md"].decode().split("---")[1])
    assert card["base_model"] == "huggyllama/llama-7b" and card["license"] == "apache-2.0"
    assert card["library_name"] == "peft" and card["base_model_relation"] == "adapter"
    assert {"medical", "lora"} < set(card["tags"]) and card["pipeline_tag"] == "text-generation"
    assert str(run.parent) not in hub.files["README.md"].decode()
    printed = capsys.readouterr()
    assert f"pushed to {hub.url}/me/exam" in printed.err and hub.token not in printed.out + printed.err


def test_a_hub_that_fails_leaves_the_export(run: Path, hub: fake_hub.Hub, tmp_path: Path) -> None:
    hub.refuses = 403
    with pytest.raises(TrainingStopped, match=r"did not take me/exam.*hf upload me/exam"):
        main(["export", "--run", str(run), "--out", str(tmp_path / "out"), *WORDS, "--public"])
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file() and not hub.files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--push", "exam", *WORDS[2:]], "say whose it is"),
        (["--push", "a b/c", *WORDS[2:]], "--push a b/c"),
        (WORDS[:2] + WORDS[4:], "--license is missing"),
        (WORDS[:4], "--base-model OWNER/NAME"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_written(
    run: Path, hub: fake_hub.Hub, tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        main(["export", "--run", str(run), "--out", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists() and not hub.private
