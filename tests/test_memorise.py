"""32 questions can be learned by heart with LoRA, through the commands a reader runs."""

import json
from pathlib import Path

import pytest
import real_data

from cmexam_tune import evaluate, preprocess, tiny

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[1]
REAL = real_data.find("val.csv")
FILES = {"real": REAL, "sample": ROOT / "cmexam_tune" / "sample" / "cmexam" / "train.csv"}


@pytest.mark.parametrize(("name", "hidden"), [("sample", "64"), pytest.param("real", "128", marks=pytest.mark.slow)])
def test_lora_learns_32_questions_by_heart(name: str, hidden: str, tmp_path: Path) -> None:
    if not FILES[name].is_file():
        pytest.skip(f"the real file lies outside the repository: {FILES[name]}")
    from cmexam_tune import predict, train

    preprocess.main(["cmexam", "--input", str(FILES[name]), "--out", str(tmp_path / "data")])
    rows = next((tmp_path / "data").glob("*.questions.jsonl")).read_text(encoding="utf-8").splitlines()[:32]
    questions = tmp_path / "32.questions.jsonl"
    questions.write_text("\n".join(rows) + "\n", encoding="utf-8")
    tiny.main(["--family", "llama", "--hidden", hidden, "--out", str(tmp_path / "model")])
    settings = (
        "data.validation=[] training.eval_strategy=no training.save_strategy=no tuning.r=64 tuning.lora_alpha=64 "
        "tuning.lora_dropout=0 tuning.target_modules=all-linear training.learning_rate=3e-3 "
        "training.num_train_epochs=30 training.global_batch_size=8 training.use_cpu=true training.disable_tqdm=true"
    )
    paths = [f"model.model_name_or_path={tmp_path / 'model'}", f"out={tmp_path / 'run'}", f"data.train={questions}"]
    train.main(["--config", "lora_llama", *paths, *settings.split()])
    predicted, report = tmp_path / "predictions.jsonl", tmp_path / "report"
    predict.main(["--run", str(tmp_path / "run"), "--questions", str(questions), "--out", str(predicted)])
    evaluate.main(["--predictions", str(predicted), "--questions", str(questions), "--out", str(report)])
    overall = json.loads((report / "report.json").read_text(encoding="utf-8"))["overall"]
    assert overall["accuracy"] > 90, overall
    assert len({json.loads(row)["answer"] for row in rows}) >= 4
