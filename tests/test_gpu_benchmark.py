"""What runs on a card when there is one, tried on the CPU: the plan, the models' sizes, and all of it in tiny."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import training_kit

torch = pytest.importorskip("torch")

sys.path.insert(0, str(training_kit.ROOT / "benchmarks"))
import gpu

from cmexam_tune.training import estimate
from cmexam_tune.training.data.questions import question_files

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
PROGRAM = training_kit.ROOT / "benchmarks" / "gpu.py"
# LLaMA-7B: arXiv 2302.13971 (6.7B) and the sum of its checkpoint's tensors. ChatGLM-6B: of its checkpoint's.
PUBLISHED = {"llama_lora_bf16": 6_738_415_616, "chatglm_ptuning_bf16": 6_173_286_400}
TRAINED = {"llama_lora_bf16": 32 * 2 * 8 * (4096 + 4096), "chatglm_ptuning_bf16": 128 * 28 * 2 * 4096}
OUTCOMES = {
    "llama_lora_fp16": "skipped", "chatglm_ptuning_fp16": "skipped", "llama_flash_varlen": "skipped",
    "llama_liger": "skipped", "predict_vllm": "skipped", "llama_compile": "skipped",
}  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> dict:
    options = type("Options", (), {"questions": None, "steps": 2})
    gpu.prepare(tmp_path, options)
    return {"questions": str(tmp_path / "questions.jsonl"), "models": str(tmp_path / "models"), "tiny": False,
            "device": "cpu", "steps": 2, "named": False, "out": str(tmp_path / "run")}  # fmt: skip


def test_the_list_names_every_check_within_ten_minutes() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--list"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [check.name for check in gpu.CHECKS]
    assert all(f"check_{check.kind}" in vars(gpu) for check in gpu.CHECKS)


def test_a_check_that_hangs_is_killed(job: dict) -> None:
    hangs = gpu.run(gpu.CHECKS[0], job, 0.5)
    assert hangs == {"outcome": "failed", "reason": "not done in 0.5 s", "seconds": 0.5}


def test_the_rest_runs_after_a_failure_and_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"llama_lora_bf16": 12.0, "llama_dynamic": 3.0}
    written = []

    def run(check: gpu.Check, job: dict, seconds: float) -> dict:
        written.append((tmp_path / "g.json").is_file())
        if check.name == "resume":
            return {"outcome": "failed", "reason": "out of memory"}
        return {"outcome": "ok", "dtype": "bf16", "samples_per_second": speed[check.name]}

    monkeypatch.setattr(gpu, "run", run)
    files = ["--json", str(tmp_path / "g.json"), "--markdown", str(tmp_path / "g.md")]
    only = ["--only", ",".join(["resume", *speed])]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", *only, *files])
    assert gpu.main() == 1
    assert written == [False, True, True]
    table = (tmp_path / "g.md").read_text(encoding="utf-8")
    assert "| resume | failed |" in table and "- resume: out of memory" in table
    assert "ours to llama_dynamic: 4.00x" in table


def test_models_have_the_published_sizes(job: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "measured_rate", lambda hidden: 1e12)
    checks = {check.name: check for check in gpu.CHECKS}
    for name, parameters in PUBLISHED.items():
        settings = gpu.sides.recipe(gpu.job_of(checks[name], job))
        found = estimate.dry_run(settings, question_files(settings)[0])
        assert (found.trainable, found.parameters - found.trainable) == (TRAINED[name], parameters)


@pytest.mark.slow
def test_every_check_runs_on_a_cpu(tmp_path: Path) -> None:
    command = ["bash", str(PROGRAM.with_suffix(".sh")), "--device", "cpu", "--tiny", "--json", str(tmp_path / "g.json"),
               "--markdown", str(tmp_path / "g.md")]  # fmt: skip
    environment = {**training_kit.ENVIRONMENT, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    found = {name: figures["outcome"] for name, figures in report["checks"].items()}
    assert found == {check.name: OUTCOMES.get(check.name, "ok") for check in gpu.CHECKS}
    assert set(report["ratios"]) == {"llama_dynamic", "llama_padded_512"}
    for figures in report["checks"].values():
        assert figures.get("overflows", 0) == 0 and figures.get("largest_difference", 0) == 0
        assert figures.get("padding_share", 0) < 1 and figures.get("share_of_matrix_rate", 0.5) > 0
    assert (tmp_path / "g.md").read_text(encoding="utf-8").count("\n| ") >= len(gpu.CHECKS)


@pytest.mark.slow
def test_vllm_answers_with_weights_of_its_own(tmp_path: Path, job: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its server: what it is started with, and asked."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_ENGINE} {tmp_path} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setenv("CMEXAM_TUNE_VLLM_PYTHON", str(python))
    (check,) = (check for check in gpu.CHECKS if check.name == "predict_vllm")
    found = gpu.run(check, {**job, "asked": 20, "named": True}, 600)
    assert found["outcome"] == "ok" and found["samples_per_second"] > 0 and "peak_memory_bytes" not in found, found
    words = json.loads((tmp_path / "command").read_text(encoding="utf-8"))
    options = dict(itertools.pairwise(words))
    assert options["--load-format"] == "dummy" and options["--dtype"] == "bfloat16"
    assert json.loads(options["--hf-overrides"])["hidden_size"] == 4096
    assert len((tmp_path / "asked").read_text(encoding="utf-8").split()) == 16 + 20


@pytest.mark.slow
def test_the_pages_hold_the_table_of_what_fits() -> None:
    import fits

    for page in ("install.md", "install.zh.md"):
        text = (training_kit.ROOT / "docs" / page).read_text(encoding="utf-8")
        assert "\n".join(fits.table()) in text
