"""The original repository's command lines: every released flag is known, and the lines run on real questions."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import real_data

from cmexam_tune import config, tiny
from cmexam_tune.config import installed_versions
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.interop.compat import cmexam_repo

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "cmexam_tune" / "sample" / "cmexam"
REAL = real_data.find("val.csv")

# Released command lines, reduced to flags and values.
TRAIN_SH = """--do_train --train_file {data}/train_prompt_1.json --validation_file {data}/val_prompt_1.json
--prompt_column prompt --response_column completion --overwrite_cache --model_name_or_path {model} --output_dir {out}
--overwrite_output_dir --max_source_length 256 --max_target_length 256 --per_device_train_batch_size 8
--per_device_eval_batch_size 8 --gradient_accumulation_steps 2 --predict_with_generate --max_steps 50000
--logging_steps 10 --save_steps 500 --learning_rate 2e-2 --pre_seq_len 128 --report_to wandb"""
PREDICTION_SH = """--do_predict --validation_file {data}/val_prompt.json --test_file {data}/test_prompt.json
--overwrite_cache --prompt_column prompt --response_column completion --model_name_or_path {model}
--ptuning_checkpoint {run} --output_dir {out} --overwrite_output_dir --max_source_length 256 --max_target_length 256
--per_device_eval_batch_size 1 --predict_with_generate --pre_seq_len 128"""
FINETUNE_SH = """--base_model {model} --data_path {data}/train_prompt.json --valid_data_path {data}/val_prompt.json
--output_dir {out} --prompt_template_name med_template --micro_batch_size 8 --batch_size 128
--wandb_run_name LLaMA-CMExam --prompt_id 4 --num_epochs 1 --cutoff_len 256 --learning_rate 3e-4 --lora_r 8
--lora_alpha 16"""
ALPACA = FINETUNE_SH + " --resume_from_checkpoint alpaca-lora-7b --lora_target_modules='[q_proj,k_proj,v_proj,o_proj]'"
INFER_SH = """--base_model {model} --lora_weights {run} --use_lora True --instruct_dir {data}/test_prompt.csv
--prompt_template med_template --output_file_name LLaMA-CMExam-1.csv --prompt_id 1 --batch_size 4 --num_beams 1
--max_new_tokens 32"""
# Parameters of the released finetune.py and infer.py that no script passes.
FINETUNE_PY = """val_set_size sample lora_dropout train_on_inputs group_by_length logging_steps eval_steps save_steps
save_total_limit wandb_project wandb_watch wandb_log_model"""
INFER_PY = "load_8bit output_dir temperature top_p top_k num_return_sequences"


def shim(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / name))


def names(line: str) -> set[str]:
    return set(re.findall(r"--(\w+)", line))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    options = {"A": "甲", "B": "乙", "C": "丙", "D": "丁", "E": "戊"}
    for split in ("train", "val", "test"):
        rows = [Question(f"{split}:{i}", f"题干{i}", options, "ABCDE"[i % 5], "因为") for i in range(4)]
        jsonl.write(folder / f"{split}.questions.jsonl", rows)
    return folder


def translated(name: str, line: str, **places: Any) -> tuple[str, list[str]]:
    script: cmexam_repo.Script = shim(name)["SCRIPT"]
    (command,) = script.commands(shlex.split(line.format(**places)))
    return command[0], command[1:]


def after(arguments: Sequence[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def overrides(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if re.match(r"[a-z]+(\.\w+)*=", word)]


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("ptuning/main.py", names(TRAIN_SH) | names(PREDICTION_SH)),
        ("lora/finetune.py", names(ALPACA) | set(FINETUNE_PY.split())),
        ("lora/infer.py", names(INFER_SH) | set(INFER_PY.split())),
    ],
)
def test_every_released_flag_is_known(name: str, released: set[str]) -> None:
    module = shim(name)
    assert released <= {*module["FLAGS"], *module["IGNORED"], *installed_versions.training()}
    assert not set(module["FLAGS"]) & set(module["IGNORED"])


@pytest.mark.parametrize("name", ["ptuning/main.py", "lora/finetune.py"])
def test_without_flags_it_is_the_recipe(name: str) -> None:
    program, arguments = translated(name, "")
    recipe = shim(name)["RECIPE"]
    assert (program, arguments) == ("train", ["--config", recipe])
    assert config.load_config(recipe, overrides(arguments)) == config.load_config(recipe)


@pytest.mark.parametrize(
    "name", ["ptuning/main.py", "lora/finetune.py", "lora/infer.py", "preprocess/generate_prompt.py"]
)
def test_shims_hold_tables_only(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert "def " not in text and "class " not in text


def test_train_sh(data: Path) -> None:
    program, arguments = translated("ptuning/main.py", TRAIN_SH, data=data, model="x/y", out="o")
    assert program == "train" and "--overwrite" not in arguments, "started again after a kill it must resume"
    got = config.load_config("ptuning_chatglm_script.yaml", overrides(arguments))
    assert got.data.train == (str(data / "train.questions.jsonl"),)
    assert (got.prompt.style, got.prompt.max_source_length, got.prompt.max_target_length) == ("1", 256, 256)
    assert got.training.global_batch_size == 16
    assert got.training.arguments["learning_rate"] == 0.02 and got.training.arguments["max_steps"] == 50000
    assert (got.tuning.method, got.tuning.settings.num_virtual_tokens, got.out) == ("ptuning", 128, "o")


def test_the_released_script_is_the_script_recipe(data: Path) -> None:
    """train.sh states what ptuning_chatglm_script.yaml states, but for places, style's id and where it reports."""
    _, arguments = translated("ptuning/main.py", TRAIN_SH, data=data, model="THUDM/chatglm-6b", out="o")
    got = config.load_config("ptuning_chatglm_script.yaml", overrides(arguments)).to_dict()
    want = config.load_config("ptuning_chatglm_script.yaml").to_dict()
    differ = {f"{s}.{k}" for s in want if s != "out" for k in {*got[s], *want[s]} if got[s].get(k) != want[s].get(k)}
    places = {"data.train", "data.validation", "prompt.style"}
    assert differ <= places | {"training.per_device_eval_batch_size", "generation.batch_size", "training.report_to"}


def test_finetune_sh(data: Path) -> None:
    program, arguments = translated("lora/finetune.py", ALPACA, data=data, model="x/y", out="o")
    got = config.load_config("lora_llama_script.yaml", overrides(arguments))
    assert program == "train"
    assert (got.prompt.style, got.prompt.template, got.model.adapter_name_or_path) == (
        "4", "cmexam_lora", "alpaca-lora-7b",
    )  # fmt: skip
    assert got.tuning.settings.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (got.training.global_batch_size, got.training.arguments["num_train_epochs"]) == (128, 1)


def test_predictions_by_run_adapter_or_nothing(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint-34900").mkdir(parents=True)
    (run / "config.yaml").write_text("out: x\n")
    _, got = translated("lora/infer.py", INFER_SH, data=data, model="x/y", run=run)
    assert after(got, "--run") == str(run) and "generation.max_new_tokens=32" in got
    assert after(got, "--out") == "output/LLaMA-CMExam-1.jsonl"
    assert after(got, "--questions") == str(data / "test.questions.jsonl")
    _, got = translated("lora/infer.py", INFER_SH, data=data, model="x/y", run="some/adapter")
    assert after(got, "--config") == "lora_llama_script.yaml" and "model.adapter_name_or_path=some/adapter" in got
    off = INFER_SH.replace("--use_lora True", "--use_lora False")
    _, got = translated("lora/infer.py", off, data=data, model="x/y", run="some/adapter")
    assert "--config" in got and not [word for word in got if "adapter" in word]
    _, got = translated("ptuning/main.py", PREDICTION_SH, data=data, model="x", out="o", run=run / "checkpoint-34900")
    assert after(got, "--run") == str(run) and after(got, "--out") == "o/generated_predictions.jsonl"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lora_rr 8", "--lora_rr: unknown flag, did you mean 'lora_r'?"),
        ("8", "a value without a flag"),
        ("--per_device_train_batch_size x", "--per_device_train_batch_size x: a whole number"),
        ("--data_path nowhere/train_prompt.json", "generate_prompt.py --filepath nowhere/train.csv"),
    ],
)
def test_wrong_command_lines(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        shim("lora/finetune.py")["SCRIPT"].commands(shlex.split(line))
    assert message in str(caught.value)


def test_parse() -> None:
    known = ["a", "b_c", "d"]
    assert cmexam_repo.parse(["--a", "--b-c=x=y", "--d", "-1", "--a", "2"], known) == {
        "a": "2",
        "b_c": "x=y",
        "d": "-1",
    }
    with pytest.raises(ConfigError):
        cmexam_repo.parse(["--e"], known)


def test_questions_behind_a_file(data: Path, tmp_path: Path) -> None:
    line = cmexam_repo._Translation({}, cmexam_repo.Script({}))
    own = str(data / "train.questions.jsonl")
    assert line.questions(own) == (own, None)
    (data / "train_prompt_4.json").write_text('{"prompt": "p", "completion": "c", "id": "4"}\n')
    assert line.questions(str(data / "train_prompt_4.json")) == (own, "4")
    assert line.questions(str(data / "train.json")) == (own, None)
    lonely = tmp_path / "prompts.json"
    lonely.write_text('{"prompt": "p", "completion": "c"}\n')
    with pytest.raises(DataError, match="rendered prompts only"):
        line.questions(str(lonely))


def test_a_csv_is_preprocessed_first_and_what_was_trained_predicts(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("Question,Options,Answer,Explanation\n")
    words = f"--do_train --do_predict --train_file {tmp_path}/train_prompt_1.json --test_file {tmp_path}/test.csv"
    first, second, train, predict = shim("ptuning/main.py")["SCRIPT"].commands([*words.split(), "--output_dir", "o"])
    assert first[:4] == ["preprocess", "cmexam", "--input", str(tmp_path / "train.csv")]
    assert second[3] == str(tmp_path / "test.csv")
    assert train[0] == "train" and f"data.train={tmp_path}/train.questions.jsonl" in train
    assert predict[0] == "predict" and after(predict, "--run") == "o"
    assert after(predict, "--questions") == f"{tmp_path}/test.questions.jsonl"


def sh(*command: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def program(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> None:
    """Run a script of the original's name in this process, as `python NAME WORD...` does."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / name), run_name="__main__")
    assert not ended.value.code


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.csv, val.csv and test.csv: real questions where they are, else the shipped sample."""
    folder = tmp_path_factory.mktemp("raw")
    source = REAL if REAL.is_file() else SAMPLE / "train.csv"
    text = source.read_text(encoding="utf-8-sig")
    for split in ("train", "val", "test"):
        (folder / f"{split}.csv").write_text(text, encoding="utf-8")
    sh(sys.executable, ROOT / "preprocess/generate_prompt.py", "--filepath", folder / "train.csv", "--templates", "1,4")
    return folder


def test_generate_prompt(raw: Path) -> None:
    prompts = list(jsonl.read_objects(raw / "train.1.jsonl"))
    questions = list(jsonl.read(raw / "train.questions.jsonl", Question))
    assert len(prompts) == len(questions) > 100
    assert (raw / "train.4.jsonl").is_file()


Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return lambda family: tiny.build(family, tmp_path_factory.mktemp("tiny") / family, hidden=32)


def test_lora_from_their_commands(
    raw: Path, model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = model("llama"), tmp_path / "run"
    line = FINETUNE_SH.format(model=base, data=raw, out=run).replace("--prompt_id 4", "--prompt_id 1")
    few = "--max_steps 2 --batch_size 4 --micro_batch_size 2 --sample 16 --val_set_size 4 --eval_steps 2 --save_steps 2"
    program(monkeypatch, "lora/finetune.py", *shlex.split(line), *few.split())
    assert "cmexam-tune train --config lora_llama_script.yaml" in capsys.readouterr().err
    (raw / "few.questions.jsonl").write_text(
        "".join((raw / "train.questions.jsonl").read_text(encoding="utf-8").splitlines(True)[:6]), encoding="utf-8"
    )
    line = INFER_SH.format(model=base, data=raw, run=run).replace("test_prompt.csv", "few_prompt.csv")
    more = ("--output_dir", tmp_path / "o", "--max_new_tokens", 4)
    program(monkeypatch, "lora/infer.py", *shlex.split(line), *more)
    assert len(list(jsonl.read(tmp_path / "o" / "LLaMA-CMExam-1.jsonl", Prediction))) == 6


@pytest.mark.slow
def test_ptuning_from_their_scripts(raw: Path, model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA", str(raw))
    monkeypatch.setenv("MODEL", str(model("chatglm")))
    few = "--max_steps 2 --max_train_samples 16 --max_eval_samples 4 --pre_seq_len 4 --save_steps 2"
    sh("bash", ROOT / "ptuning/train.sh", *few.split(), "--output_dir", "output/run")
    (raw / "test.questions.jsonl").write_text(
        "".join((raw / "train.questions.jsonl").read_text(encoding="utf-8").splitlines(True)[:4]), encoding="utf-8"
    )
    monkeypatch.setenv("CHECKPOINT", "run")
    monkeypatch.setenv("STEP", "2")
    sh("bash", ROOT / "ptuning/prediction.sh", "--max_target_length", "4")
    assert len(list(jsonl.read("output/run/generated_predictions.jsonl", Prediction))) == 4
