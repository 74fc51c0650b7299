"""How a training takes its run folder: refused, killed or failed, it leaves what was there."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_programs
import pytest
import training_kit

torch = pytest.importorskip("torch")

from cmexam_tune import config
from cmexam_tune.core import files
from cmexam_tune.core.errors import UserError
from cmexam_tune.train import train
from cmexam_tune.training import callbacks, checkpoints, logits, processes
from cmexam_tune.training.run_directory import run as runs
from cmexam_tune.training.run_directory import starting


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_kit.world(tmp_path_factory.mktemp("starting"), count=8)


@pytest.fixture(scope="module")
def finished(folder: Path) -> runs.Run:
    return train(training_kit.recipe(folder, out=str(folder / "finished"), training__max_steps=1))


@pytest.fixture
def run(finished: runs.Run, tmp_path: Path) -> Iterator[runs.Run]:
    """A finished run of its own for each test; afterwards nothing lies beside it but its lock."""
    path = shutil.copytree(finished.path, tmp_path / "run")
    yield runs.open_run(path)
    assert {item.name for item in tmp_path.iterdir()} <= {"run", ".run.lock"}


def content(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and "cache" not in p.parts
    }  # fmt: skip


BAD = [
    {"training__max_tokens_per_batch": 1, "prompt__max_target_length": 1},
    {"training__optim": "lomo"},
    {"training__adam_beta1": 2.0},
    {"training__lr_scheduler_type": "cosine_with_min_lr"},
    {"training__report_to": "clearml"},
    {"tuning__modules_to_save": ["nowhere"]},
    {"model__model_name_or_path": "/nowhere"},
    {"data__train": ["/nowhere.jsonl"]},
]


@pytest.mark.parametrize("changes", BAD)
def test_refused_overwrite_keeps_the_old_run(run: runs.Run, folder: Path, changes: dict[str, Any]) -> None:
    before = content(run.path)
    with pytest.raises(UserError):
        train(training_kit.recipe(folder, **{"out": str(run.path), **changes}), overwrite=True)
    assert content(run.path) == before


@pytest.mark.parametrize("changes", BAD[1:5])
def test_refused_command_does_not_block_the_mended_one(
    folder: Path, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError):
        train(training_kit.recipe(folder, out=str(tmp_path / "new"), **changes))
    assert {item.name for item in (tmp_path / "new").glob("*")} <= {"cache"}
    mended = training_kit.recipe(folder, out=str(tmp_path / "new"), training__max_steps=1, training__seed=5)
    assert starting.resolve_run(mended).path == tmp_path / "new"


def test_overwrite_that_fails_in_its_first_step_gives_the_old_run_back(
    run: runs.Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("out of memory")

    before = content(run.path)
    monkeypatch.setattr(logits.LabelLogits, "loss", fail)
    with pytest.raises(MemoryError):
        train(training_kit.recipe(folder, out=str(run.path), training__seed=3), overwrite=True)
    assert content(run.path) == before


def test_overwrite_killed_before_its_first_step_gives_the_old_run_back(run: runs.Run, folder: Path) -> None:
    """As a kill between moving the old run aside and the first step leaves it."""
    before = content(run.path)
    old = run.config
    run.path.rename(starting.backup_path(run.path))
    starting.write_environment(
        runs.Run(run.path, training_kit.recipe(folder, out=str(run.path), training__seed=9)), "CPU", 1
    )
    again = train(dataclasses.replace(old, out=str(run.path)))
    assert content(run.path) == before
    assert again.finished


def test_old_run_goes_after_the_first_step(run: runs.Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    first = callbacks.FirstStep.on_step_end

    def watch(self: Any, *rest: Any, **more: Any) -> None:
        before = starting.backup_path(run.path).is_dir()
        first(self, *rest, **more)
        seen.append((before, starting.backup_path(run.path).is_dir()))

    monkeypatch.setattr(callbacks.FirstStep, "on_step_end", watch)
    new = train(training_kit.recipe(folder, out=str(run.path), training__max_steps=2), overwrite=True)
    assert seen == [(True, False), (False, False)]
    assert new.finished
    assert len([entry for entry in new.log if "loss" in entry]) == 2


def test_only_a_run_is_replaced_and_never_an_input(run: runs.Run, folder: Path, tmp_path: Path) -> None:
    inside = shutil.copy(folder / "train.jsonl", run.path / "mine.jsonl")
    with pytest.raises(UserError, match="which this training reads"):
        starting.resolve_run(training_kit.recipe(folder, out=str(run.path), data__train=[str(inside)]), overwrite=True)
    (run.path / "config.yaml").unlink()
    with pytest.raises(UserError, match="holds no run"):
        starting.resolve_run(training_kit.recipe(folder, out=str(run.path)), overwrite=True)


def test_second_training_into_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "held"
    with files.lock(out), pytest.raises(UserError, match="another process is writing it"):
        train(training_kit.recipe(folder, out=str(out), training__max_steps=1))
    assert not (out / "config.yaml").exists()


# Two processes


def start(folder: Path, outs: tuple[str, str], *words: str, name: str = "two") -> list[tuple[int, str]]:
    """Start one process for each folder, as two machines would; return exit codes and what they noted."""
    path = folder / f"{name}.yaml"
    path.write_text(config.dump_config(training_kit.recipe(folder, training__max_steps=2)), encoding="utf-8")
    common = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(training_kit.free_port())}  # fmt: skip
    started = [
        forked_programs.Program("train", ["--config", str(path), f"out={out}", *words], RANK=str(rank), **common)
        for rank, out in enumerate(outs)
    ]
    return [(code, noted) for code, _, noted in (process.wait(200) for process in started)]


def test_folders_of_their_own_on_two_machines_are_refused(folder: Path) -> None:
    for name in ("node0", "node1"):
        (folder / name).mkdir()
    for code, text in start(folder, (str(folder / "node0" / "run"), str(folder / "node1" / "run"))):
        assert code == 2, text
        assert "need one shared file system" in text
    assert not any((folder / "node0").iterdir())


def test_two_processes_replace_a_run_and_load_its_best_checkpoint(folder: Path) -> None:
    out = str(folder / "replaced")
    first = train(training_kit.recipe(folder, out=out, training__max_steps=1))
    words = ["--overwrite", f"data.validation=[{folder / 'val.jsonl'}]", "training.eval_strategy=steps",
             "training.eval_steps=1", "training.load_best_model_at_end=true"]  # fmt: skip
    for code, text in start(folder, (out, out), *words):
        assert code == 0, text
    again = runs.open_run(out)
    assert again.finished
    assert again.config != first.config
    assert not starting.backup_path(Path(out)).exists()


# DeepSpeed checkpoints


def checkpoint(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    sums = {
        name: value for rank in range(count) for name, value in checkpoints.own_checksums(folder, rank, count).items()
    }
    checkpoints.write_manifest(folder, sums, processes=count, deepspeed=True)
    return folder


def test_checkpoint_of_somebody_else_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path / "run" / "checkpoint-1", 1)
    assert checkpoints.refusal(path, deepspeed=True, trusted=False) is None
    facts = json.loads((path / checkpoints.MANIFEST).read_text())
    (path / "added.pt").write_bytes(b"code")
    assert "not written by you" in str(checkpoints.refusal(path, deepspeed=True, trusted=False))
    (path / "added.pt").unlink()
    (path / "latest").write_text("forged")
    facts["files"]["latest"] = files.sha256(path / "latest")
    (path / checkpoints.MANIFEST).write_text(json.dumps(facts))
    assert checkpoints.damage(path) is None, "the sums were forged with it"
    assert "--trust-checkpoint" in str(checkpoints.refusal(path, deepspeed=True, trusted=False))
    assert checkpoints.refusal(path, deepspeed=True, trusted=True) is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    other = checkpoint(tmp_path / "other" / "checkpoint-1", 1)
    monkeypatch.undo()
    assert "not written by you" in str(checkpoints.refusal(other, deepspeed=True, trusted=False))
    assert (tmp_path / "another user" / "cmexam_tune" / "secret").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_only_looks_like_a_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint-²", "checkpoint-", "checkpoint-x", "checkpoint-٣", "checkpoint-3"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints.newest_first(tmp_path)] == ["checkpoint-3"]


def test_another_number_of_processes_is_refused_with_both(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "checkpoint-1", 4)
    assert "was saved by 4 processes and this command has 1" in str(
        checkpoints.refusal(path, deepspeed=True, trusted=False)
    )
    assert "was saved with DeepSpeed and this command runs without" in str(
        checkpoints.refusal(path, deepspeed=False, trusted=False)
    )


def test_each_process_checks_what_it_wrote(tmp_path: Path) -> None:
    names = ("global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "rng_state_0.pth", "trainable.safetensors")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    parts = [checkpoints.own_checksums(tmp_path, rank, 2) for rank in range(2)]
    assert [set(part) for part in parts] == [set(names[1:]), {names[0]}]
    checkpoints.write_manifest(tmp_path, parts[0] | parts[1], processes=2, deepspeed=False)
    (tmp_path / names[0]).write_text("damaged")
    assert checkpoints.damage(tmp_path, 0, 2) is None
    assert names[0] in str(checkpoints.damage(tmp_path, 1, 2))
    assert names[0] in str(checkpoints.damage(tmp_path))
    assert processes.rank_and_world() == (0, 1)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": True}, False),
        ({"per_device_train_batch_size": 1, "max_tokens_per_batch": 64}, True),
    ],
)
def test_a_run_goes_on_with_other_settings_for_memory(folder: Path, changes: dict[str, Any], refused: bool) -> None:
    """As long as a step has the same questions."""
    batch = {"global_batch_size": None, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    old, new = (
        starting.absolute(training_kit.recipe(folder, **{f"training__{key}": value for key, value in values.items()}))
        for values in (batch, batch | {"gradient_accumulation_steps": 1} | changes)
    )
    wanted = [f"{starting.EFFECTIVE_BATCH}: 8 there, 1 here"] if refused else []
    assert starting._differences(old, new) == wanted
