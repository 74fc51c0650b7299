"""A model before and after tuning, on questions of one's own; and the list of recipes to choose one from."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import training_kit

from cmexam_tune import compare, recipes
from cmexam_tune.core.errors import UserError

FEW = ["training.max_steps=1", "generation.max_new_tokens=3", "training.save_strategy=no"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training_kit.world(tmp_path_factory.mktemp("compare"))
    (folder / "data").mkdir()
    for name, count in (("bank.train", 12), ("bank.test", 4)):
        training_kit.questions(folder / "data" / f"{name}.questions.jsonl", count, seed=count)
    return folder


def test_one_command_from_questions_to_both_scores(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = world / "out"
    words = ["--config", "lora_qwen", "--data", str(world / "data"), "--out", str(out), *FEW]
    words.append(f"model.model_name_or_path={world / 'llama'}")
    assert not compare.main(words)
    printed = capsys.readouterr()
    assert "zeroshot | tuned" in printed.out and "second minus first" in printed.out
    assert "data.validation is empty" in printed.err
    report = json.loads((out / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["name"] == "tuned" and report["comparison"]["name"] == "zeroshot"
    # The same words are asked; only the second model was trained.
    made = {name: json.loads((out / name / "predictions.jsonl.meta.json").read_text(encoding="utf-8"))
            for name in ("zeroshot", "tuned")}  # fmt: skip
    assert made["zeroshot"]["run"] is None and Path(made["tuned"]["run"]) == out / "tuned" / "run"
    assert made["zeroshot"]["config"]["prompt"] == made["tuned"]["config"]["prompt"]
    stamp = (out / "tuned" / "run" / "trainer_state.json").stat().st_mtime_ns
    assert not compare.main(words)  # nothing is done twice
    assert (out / "tuned" / "run" / "trainer_state.json").stat().st_mtime_ns == stamp
    assert "this run has finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "remove", "message"),
    [
        ("zeroshot_qwen", None, "tunes nothing"),
        ("lora_qwen", "bank.test", r"no test\.questions\.jsonl.*--split"),
        ("lora_qwen", "folder", "no such folder"),
    ],
)
def test_what_cannot_be_compared(world: Path, tmp_path: Path, config: str, remove: str | None, message: str) -> None:
    data = tmp_path / "data"
    if remove != "folder":
        data.mkdir()
    for path in (world / "data").glob("*.jsonl") if data.is_dir() else ():
        if remove is None or not path.name.startswith(remove):
            (data / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=message):
        compare.main(["--config", config, "--data", str(data), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_recipes_are_found_by_any_of_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert not recipes.main([])
    lines = capsys.readouterr().out.splitlines()
    shipped = {path.stem for path in Path(compare.__file__).parents[1].joinpath("recipes").rglob("*.yaml")}
    assert {line.split()[0] for line in lines[1:]} == shipped
    named = {word: [line.recipe for line in recipes.recipes(*word.split())] for word in ("bert-cmexam", "api gpt cmb")}
    assert named == {"bert-cmexam": ["head_bert"], "api gpt cmb": [
        "zeroshot_gpt4_cmb", "zeroshot_chatgpt_cmb", "zeroshot_jianpeigpt_cmb", "zeroshot_shukungpt_cmb"]}  # fmt: skip
    assert not recipes.main(["head_roberta"])
    assert "published: Acc 37.1, F1 36.7" in capsys.readouterr().out
    # The base tells apart what the names do not, and a model behind an address needs no card.
    qwen = {line.recipe: line for line in recipes.recipes("zeroshot_qwen")}
    assert "Qwen2.5" in qwen["zeroshot_qwen_cmb"].model and qwen["zeroshot_qwen_7b_cmb"].model == "Qwen/Qwen-7B-Chat"
    assert qwen["zeroshot_qwen_72b_cmb"].hardware == "3 x 80 GB, behind a server (vLLM)"
    assert all(line.hardware == "none (API)" for line in recipes.recipes("gpt-3.5"))
    with pytest.raises(UserError, match="no recipe has 'lora_lama' in it, did you mean 'lora_llama'"):
        recipes.recipes("lora_lama")
