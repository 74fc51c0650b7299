"""`train` from a recipe to a run folder: what it writes, refuses, continues and stops."""

import errno
import json
import os
import shutil
import signal
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import training_kit
import transformers
from training_kit import losses, weights

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from cmexam_tune import config
from cmexam_tune import train as program
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.train import train
from cmexam_tune.training import arguments, callbacks, checkpoints, estimate
from cmexam_tune.training.data.questions import question_files
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.run_directory import run as runs
from cmexam_tune.training.run_directory import starting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_kit.world(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> runs.Run:
    return train(training_kit.recipe(folder, out=str(folder / "plain"), tuning__lora_dropout=0.0))


def test_run_folder_describes_itself(plain: runs.Run, folder: Path) -> None:
    assert config.load_config(plain.path / "config.yaml") == plain.config
    environment = json.loads((plain.path / "environment.json").read_text())
    assert {"torch", "transformers", "peft", "python", "device", "command"} <= environment.keys()
    assert [entry["step"] for entry in plain.log if "loss" in entry] == list(range(1, 9))
    assert json.loads((plain.path / "trainer_state.json").read_text())["global_step"] == 8
    assert {"train_loss", "padding", "tokens_per_second"} <= plain.metrics.keys()
    assert runs.open_run(plain.path).metrics == plain.metrics
    assert "train_loss" in plain._repr_html_()
    assert not list(plain.path.glob(".*")), "nothing half-written is left"
    assert all(not checkpoints.damage(path) for path in checkpoints.newest_first(plain.path))
    files = {path.name for path in checkpoints.newest_first(plain.path)[0].iterdir()}
    assert files == {
        "trainable.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
        "checksums.json",
    }  # fmt: skip


def test_finished_run_is_left_alone(plain: runs.Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = (plain.path / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    again = train(plain.config)
    assert again.metrics == plain.metrics
    assert "has finished" in capsys.readouterr().err
    assert (plain.path / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == before


LAYOUTS = {
    "packed": {"training__packing": True},
    "budget": {"training__max_tokens_per_batch": 150},
    "micro": {"training__per_device_train_batch_size": 6},
    "checkpointing": {"training__gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_does_not_change_what_is_learnt(plain: runs.Run, folder: Path, name: str) -> None:
    run = train(
        training_kit.recipe(folder, out=str(folder / name), tuning__lora_dropout=0.0, **LAYOUTS[name])
    )  # fmt: skip
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)
    for key, value in weights(plain).items():
        assert torch.allclose(weights(run)[key], value, atol=1e-4), key


def test_gradient_accumulation_and_global_batch_mean_the_same(plain: runs.Run, folder: Path) -> None:
    changes = {"training__global_batch_size": None, "training__gradient_accumulation_steps": 3}
    run = train(training_kit.recipe(folder, out=str(folder / "ga"), tuning__lora_dropout=0.0, **changes))
    assert losses(run) == losses(plain)


def test_saved_adapter_is_loaded_back(plain: runs.Run) -> None:
    settings, loaded = runs.load(plain.path)
    assert settings == plain.config
    tuned = {name: p for name, p in loaded.model.named_parameters() if "lora_B" in name}
    assert tuned
    assert all(p.abs().sum() > 0 for p in tuned.values())
    assert not loaded.model.training


@pytest.mark.parametrize(
    ("override", "words"),
    [("prompt.template=alpaca", "template=alpaca"), ("tuning.r=2", "LoRA")],
)
def test_adapter_with_other_settings_is_refused(plain: runs.Run, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        runs.load(plain.path, [override])


def test_adapter_with_another_tokenizer_is_refused(plain: runs.Run, folder: Path) -> None:
    other = shutil.copytree(folder / "llama", folder / "other_llama", dirs_exist_ok=True)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<pad>"', '"<filler>"'))
    values = json.loads((other / "tokenizer_config.json").read_text())
    values["pad_token"] = "<filler>"
    (other / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="tokenizer of the base model"):
        runs.load(plain.path, [f"model.model_name_or_path={other}"])


def test_unfinished_run_cannot_be_loaded(plain: runs.Run, folder: Path) -> None:
    half = shutil.copytree(plain.path, folder / "half", dirs_exist_ok=True)
    shutil.rmtree(half / "adapter")
    with pytest.raises(UserError, match="not finished"):
        runs.load(half)
    with pytest.raises(UserError, match="no run folder"):
        runs.load(folder / "nowhere")


# Bad input


def refuse(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        program.main(argv)


@pytest.fixture
def recipe_file(folder: Path, tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump_config(training_kit.recipe(folder, out=str(tmp_path / "run"))), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train=[]"], "data.train: name at least one"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl: no such data.train file"),
        (["data.max_train_samples=0"], "max_train_samples: should be greater"),
        (["model.model_name_or_path=/nowhere"], "no such folder"),
        (["training.fp16=true"], "needs a GPU"),
        (["training.fp16=true", "training.bf16=true"], "both true"),
        (["training.deepspeed=zero9"], "zero9: no such file"),
        (["training.per_device_train_batch_size=0"], "should be greater than or equal to 1"),
        (["training.max_tokens_per_batch=0"], "should be greater than or equal to 1"),
        (["data.validation=nowhere.jsonl"], "nowhere.jsonl: no such data.validation file.*`data.validation=..` trains"),
        (["training.early_stopping_patience=2"], "needs training.eval_strategy"),
        (
            [
                "training.early_stopping_patience=2",
                "training.eval_strategy=steps",
                "training.metric_for_best_model=loss",
            ],
            "Set data.validation",
        ),
        (["training.metric_for_best_model=bleu"], "known are loss and exam_accuracy"),
        (
            ["data.validation=VAL", "training.load_best_model_at_end=true"],
            "save and eval strategy to match",
        ),
        (["prompt.max_target_length=1"], "none of 20 questions"),
        (["training.report_to=nonsense"], "training: nonsense is not supported"),
        (["training.report_to=clearml"], "pip install clearml"),
        (["training.optim=lomo"], "pip install lomo-optim"),
        (["training.fsdp=full_shard"], "training.fsdp: not supported"),
        (["training.torch_compile_mode=fast"], "Unrecognized mode=fast, should be one of: default.*max-autotune"),
        (["training.use_liger_kernel=true"], "pip install liger-kernel"),
        (
            [
                "tuning.method=ptuning",
                "tuning.num_virtual_tokens=4",
                "training.gradient_checkpointing=true",
                "training.gradient_checkpointing_kwargs={use_reentrant: true}",
            ],
            "would not reach the prefix",
        ),
        (["tuning.modules_to_save=[nowhere]"], "no module called 'nowhere'"),
    ],
)
def test_bad_settings_are_refused(
    folder: Path, recipe_file: str, tmp_path: Path, overrides: list[str], words: str
) -> None:
    """By training, and by its dry run: who planned with it trains at the first attempt."""
    overrides = [word.replace("=VAL", f"={folder / 'val.jsonl'}") for word in overrides]
    refuse(["--config", recipe_file, *overrides], words)
    assert not (tmp_path / "run" / "adapter").exists()
    refuse(["--config", recipe_file, *overrides, "--dry-run"], words)


def test_no_validation_questions_end_evaluation_with_a_note(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a recipe evaluates by itself is no reason for a second attempt; what was dropped is said, and recorded."""
    settings = training_kit.recipe(
        folder, out=str(tmp_path / "run"), data__validation=[], training__eval_strategy="steps",
        training__eval_steps=1, training__load_best_model_at_end=True, training__max_steps=1,
    )  # fmt: skip
    run = train(settings)
    noted = capsys.readouterr().err
    assert "data.validation is empty" in noted
    assert "training.eval_strategy and training.load_best_model_at_end without effect" in noted
    assert run.finished and not any("eval_loss" in entry for entry in run.log)
    assert "eval_strategy" not in runs.open_run(run.path).config.training.arguments
    assert train(settings).finished  # the same command finds its run


def test_empty_and_foreign_files_are_refused(recipe_file: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    refuse(["--config", recipe_file, f"data.train={tmp_path / 'empty.jsonl'}"], "is empty")
    (tmp_path / "odd.jsonl").write_text('{"prompt": "x"}\n')
    refuse(["--config", recipe_file, f"data.train={tmp_path / 'odd.jsonl'}"], "odd.jsonl:1: not a Question")


def test_another_experiment_is_never_overwritten(plain: runs.Run, folder: Path, tmp_path: Path) -> None:
    other = training_kit.recipe(folder, out=str(plain.path), training__learning_rate=5e-4, tuning__lora_dropout=0.0)
    with pytest.raises(UserError, match=r"training.learning_rate: 0.001 there, 0.0005 here"):
        train(other)
    (tmp_path / "diary.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds no run"):
            train(training_kit.recipe(folder, out=str(tmp_path)), overwrite=overwrite)
    assert (tmp_path / "diary.txt").read_text() == "mine"
    with pytest.raises(UserError, match="no run to resume"):
        train(training_kit.recipe(folder, out=str(tmp_path / "new")), resume=True)


def test_overwrite_starts_anew(folder: Path) -> None:
    first = train(training_kit.recipe(folder, out=str(folder / "over"), training__max_steps=1))
    again = train(
        training_kit.recipe(folder, out=str(folder / "over"), training__max_steps=2), overwrite=True
    )  # fmt: skip
    assert (len(losses(first)), len(losses(again))) == (2, 2), "the log is the new run's"


def test_print_config(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--config", recipe_file, "--print-config", "training.learning_rate=2e-4"]) is None
    assert "learning_rate: 0.0002" in capsys.readouterr().out


# Interruptions


def test_sigterm_saves_a_checkpoint_and_the_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = training_kit.recipe(folder, out=str(folder / "term"), training__save_steps=100)
    whole = train(training_kit.recipe(folder, out=str(folder / "unterm"), training__save_steps=100))

    log = callbacks.JsonlLog.on_log

    def terminate(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> None:
        log(self, args, state, *rest, **more)
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(callbacks.JsonlLog, "on_log", terminate)
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    assert [checkpoints.step_of(path) for path in checkpoints.newest_first(folder / "term")] == [4]
    assert not (folder / "term" / "adapter").exists()
    run = train(settings, resume=True)
    assert losses(run) == losses(whole)
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(run).items())


def test_damaged_checkpoint_falls_back(plain: runs.Run, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = shutil.copytree(plain.path, folder / "damaged", dirs_exist_ok=True)
    shutil.rmtree(half / "adapter")
    newest, before, *_ = checkpoints.newest_first(half)
    content = bytearray((newest / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "optimizer.pt").write_bytes(content)
    (before / "rng_state.pth").unlink()
    run = train(training_kit.recipe(folder, out=str(half), tuning__lora_dropout=0.0))
    told = capsys.readouterr().err
    assert f"{newest.name} is damaged (the checksum of optimizer.pt is wrong)" in told
    assert f"{before.name} is damaged (rng_state.pth is missing)" in told
    assert "resuming from" in told
    assert losses(run) == losses(plain)
    assert all(torch.equal(value, weights(plain)[key]) for key, value in weights(run).items())


def test_full_disk_keeps_the_last_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = training_kit.recipe(folder, out=str(folder / "full"))
    write = checkpoints.write_weights

    def fail(path: Path, values: Any) -> None:
        if path.name == "checkpoint-3":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, values)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_weights", fail)
        with pytest.raises(OSError, match="No space left"):
            train(settings)
    assert not (folder / "full" / checkpoints.STAGING).exists()
    assert [checkpoints.step_of(path) for path in checkpoints.newest_first(folder / "full")] == [2, 1]
    assert train(settings).finished


def test_checkpoints_are_rotated(plain: runs.Run) -> None:
    assert [checkpoints.step_of(path) for path in checkpoints.newest_first(plain.path)] == [8, 7, 6]


# Validation


def test_best_checkpoint_by_exam_accuracy(folder: Path) -> None:
    settings = training_kit.recipe(
        folder,
        out=str(folder / "best"),
        data__validation=[str(folder / "val.jsonl")],
        training__eval_strategy="steps",
        training__eval_steps=2,
        training__save_steps=2,
        training__metric_for_best_model="exam_accuracy",
        training__load_best_model_at_end=True,
        training__early_stopping_patience=1,
        generation={"mode": "likelihood"},
        prompt__style="answer",
    )
    run = train(settings)
    seen = [entry for entry in run.log if "eval_exam_accuracy" in entry]
    assert seen
    best = max(seen, key=lambda entry: (entry["eval_exam_accuracy"], -entry["step"]))
    assert run.metrics["best_metric"] == best["eval_exam_accuracy"]
    kept = load_file(run.path / f"checkpoint-{best['step']}" / "trainable.safetensors")
    saved = weights(run)
    assert saved
    assert {value.numpy().tobytes() for value in saved.values()} == {value.numpy().tobytes() for value in kept.values()}
    if len(seen) >= 2 and seen[1]["eval_exam_accuracy"] <= seen[0]["eval_exam_accuracy"]:
        assert seen[-1]["step"] == 4, "stopped after one evaluation without a better one"


def test_validation_loss_does_not_disturb_training(folder: Path) -> None:
    base = {"training__max_steps": 4, "prompt__style": "answer"}
    quiet = train(training_kit.recipe(folder, out=str(folder / "quiet"), **base))
    watched = train(
        training_kit.recipe(
            folder,
            out=str(folder / "watched"),
            data__validation=[str(folder / "val.jsonl")],
            training__eval_strategy="steps",
            training__eval_steps=1,
            **base,
        )
    )
    assert losses(quiet) == losses(watched)
    assert len({entry["eval_loss"] for entry in watched.log if "eval_loss" in entry}) == 4


def test_liger_gets_the_base_model_where_it_has_kernels_for_it(
    folder: Path, plain: runs.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of its Triton kernels, which need a card, stands a norm that computes the same in another way."""
    patched: list[tuple[str, dict[str, bool]]] = []

    def apply(model: Any, **kernels: bool) -> None:
        patched.append((type(model).__name__, kernels))
        for layer in model.model.layers:
            norm = layer.input_layernorm
            norm.forward = partial(torch.nn.functional.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight,
                                   eps=norm.variance_epsilon)  # fmt: skip

    kernels: Any = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = apply
    kinds: Any = types.ModuleType("liger_kernel.transformers.monkey_patch")
    kinds.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}
    for module in (types.ModuleType("liger_kernel"), kernels, kinds):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for place in (arguments, transformers.integrations.liger):
        monkeypatch.setattr(place, "is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(arguments.metadata, "version", lambda name: "0.8.5")
    chosen = {"training__use_liger_kernel": True, "training__liger_kernel_config": {"rope": False}}
    fused = train(training_kit.recipe(folder, out=str(folder / "fused"), tuning__lora_dropout=0.0, **chosen))
    assert patched == [("LlamaForCausalLM", {"rope": False})]
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-5)
    kinds.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": apply}
    refused = training_kit.recipe(folder, out=str(folder / "refused"), **chosen)
    for refuse in (lambda: train(refused), lambda: estimate.dry_run(refused, question_files(refused)[0])):
        with pytest.raises(ConfigError, match=r"use_liger_kernel: Liger 0\.8\.5 has no kernels for .* type llama"):
            refuse()


@pytest.mark.slow
def test_compiled_training_learns_the_same(folder: Path) -> None:
    """torch.compile takes a minute or two, the hook at the output layer included."""
    runs_of = [
        train(training_kit.recipe(folder, out=str(folder / f"compile_{on}"), training__torch_compile=on,
                                   training__max_steps=4, tuning__lora_dropout=0.0))
        for on in (False, True)
    ]  # fmt: skip
    plain, compiled = ([entry["loss"] for entry in run.log if "loss" in entry] for run in runs_of)
    assert compiled == pytest.approx(plain, rel=1e-4) and len(plain) == 4


def test_more_processes_than_questions_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size=6 is smaller than the 8 processes"):
        refused = training_kit.recipe(folder)
        arguments.layout(refused.training, refused.prompt, 8)


NUMBERS = {
    "learning_rate": ("0", "-1", ".nan", ".inf", "1e400", "1e30"),
    "weight_decay": ("-1", ".nan"),
    "adam_beta1": ("1", "-0.1"),
    "adam_beta2": ("2",),
    "adam_epsilon": ("0", "-1e-8"),
    "max_grad_norm": ("-1", ".nan"),
    "warmup_steps": ("-1",),
    "num_train_epochs": ("0", "-3", "1e30"),
    "max_steps": ("0", "-2", "1e30"),
    "label_smoothing_factor": ("1", "-1"),
    "neftune_noise_alpha": ("-5",),
    "per_device_train_batch_size": ("0", "-1", "10000000000"),
    "global_batch_size": ("0", "-6"),
    "seed": ("-1", "10000000000"),
    "save_total_limit": ("0",),
    "dataloader_num_workers": ("-1",),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NUMBERS.items() for value in values])
def test_numbers_that_cannot_be_are_refused_at_once(recipe_file: str, tmp_path: Path, key: str, value: str) -> None:
    refuse(["--config", recipe_file, f"training.{key}={value}"], f"training.{key}: ")
    assert not (tmp_path / "run").exists()


def test_a_loss_of_token_labels_is_refused_for_a_classifier() -> None:
    smoothed = config.load_config("head_bert", ["training.label_smoothing_factor=0.1"])
    with pytest.raises(ConfigError, match=r"label_smoothing_factor: has no effect on family bert.* Leave it out\."):
        arguments.check_supported(smoothed, *runs.parts(smoothed), Objective.named("sft"))
    plain = config.load_config("head_bert", ["training.label_smoothing_factor=0"])
    arguments.check_supported(plain, *runs.parts(plain), Objective.named("sft"))


def test_a_run_works_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(folder)
    paths = {"model__model_name_or_path": "llama", "data__train": ["train.jsonl"]}
    run = train(training_kit.recipe(Path(), out="relative", training__max_steps=1, **paths))
    out = folder / run.path
    assert starting.resolve_run(training_kit.recipe(Path(), out="relative", training__max_steps=1, **paths)).finished
    monkeypatch.chdir(tmp_path)
    assert runs.load(out)[1].model is not None
    assert config.load_config(out / "config.yaml").data.train == (str(folder / "train.jsonl"),)
