"""GRPO and DPO: TRL's steps against formulas written by hand, what must not change, kills, and what is refused."""

import dataclasses
import json
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
import training_kit
from kit import make_config

from cmexam_tune import prompts
from cmexam_tune.config import Config, dump_config
from cmexam_tune.core.errors import ConfigError, DataError, TrainingStopped
from cmexam_tune.models import Loaded, adapters, families
from cmexam_tune.rewards import Reward
from cmexam_tune.train import train
from cmexam_tune.training import arguments, estimate, logits, monitor, objectives
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.policy_trainer import PolicyTrainer
from cmexam_tune.training.run_directory import run as runs

LENGTH = 12
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
"""A step changes weights by -0.1 times their gradient."""
TEXTS = ("答案: C", "答案: AC", "因为如此。答案: C", "不知道")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training_kit.world(tmp_path_factory.mktemp("objectives"), 8)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text("utf-8").splitlines()]
    lines = [
        {**row, "answer": "C", "chosen": "答案: C", "rejected": f"答案: {'AB'[i % 2]}"} for i, row in enumerate(rows)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    return folder


def config_of(world: Path, out: Path, objective: str, **changes: Any) -> Config:
    settings = {
        "objective": objective,
        "global_batch_size": 2,
        "per_device_train_batch_size": 8 if objective == "grpo" else 2,
        "max_steps": 1,
        "save_steps": 1,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **({"num_generations": 4, "max_completion_length": LENGTH} if objective == "grpo" else {}),
        **changes.pop("training", {}),
    }
    return training_kit.recipe(
        world,
        prompt__style="answer",
        training=settings,
        tuning=changes.pop("tuning", {"method": "lora", "r": 4, "lora_alpha": 8}),
        out=str(out),
        **{"reward": {"exact": 1.0}, **changes},
    )


def model_of(config: Config) -> tuple[Any, Any, Any]:
    """Return family, model and tokenizer as training starts with them."""
    from transformers import set_seed

    family, method = runs.parts(config)
    set_seed(config.training.seed)
    loaded = family.load(config.model, [], "cpu")
    return family, method.attach(loaded.model, family, config.tuning.settings), loaded.tokenizer


def trained(run: runs.Run) -> dict[str, torch.Tensor]:
    """Return the trained parameters at the end of a run, by their names in the model."""
    from safetensors.torch import load_file

    newest = max(run.path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return dict(load_file(newest / "trainable.safetensors"))


def fixed_texts(monkeypatch: pytest.MonkeyPatch, texts: Sequence[str] = TEXTS) -> None:
    """Let the model write these texts, one after the other, for each question."""

    def write(self: PolicyTrainer, prompt_ids: Sequence[Any]) -> list[list[int]]:
        codec = self.decoder.codec
        return [codec.targets([texts[i % len(texts)]])[0] for i in range(len(prompt_ids))]

    monkeypatch.setattr(PolicyTrainer, "write", write)


def earn(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, float]) -> None:
    """Let `exact` be worth these values by text, and everything else nothing."""

    def term(self: Reward, name: str, question: Any, output: Any, step: int = 0) -> float:
        return values[output.text] if name == "exact" else 0.0

    monkeypatch.setattr(Reward, "term", term)


def expected_gradient(config: Config, loss_type: str, scale: str, values: Mapping[str, float], own: bool) -> Any:
    """Return name -> gradient of the GRPO loss on the first step's questions, on policy and without KL."""
    family, model, tokenizer = model_of(config)
    codec = family.codec(tokenizer, config.prompt, config.model)
    questions = list(asked(config))
    decoder = family.engine(Loaded(model, tokenizer), config)
    label_logits = logits.LabelLogits(model)
    terms: list[tuple[float, torch.Tensor, int]] = []
    earned = torch.tensor([values[text] for text in TEXTS])
    advantages = earned - earned.mean()
    if scale == "group":
        advantages = advantages / (earned.std() + 1e-4)
    for item in decoder.ask(prompts.default_prompts(questions, config)):
        for text, advantage in zip(TEXTS, advantages.tolist(), strict=True):
            target = codec.targets([text])[0]
            ids = torch.tensor([[*item.ids, *target]])
            if own:  # the loss of supervised tuning: minus the sum of log-probabilities of the labels
                labels = ids.clone()
                labels[0, : len(item.ids)] = -100
                total = -label_logits.loss(model, {"input_ids": ids}, labels)
            else:
                scores = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
                total = scores.gather(-1, ids[0, 1:, None])[-len(target) :, 0].sum()
            terms.append((advantage, total, len(target)))
    tokens = sum(length for _, _, length in terms)
    divisor = {"dapo": lambda length: tokens, "dr_grpo": lambda length: len(terms) * LENGTH}.get(
        loss_type, lambda length: len(terms) * length
    )
    loss = -sum(advantage * total / divisor(length) for advantage, total, length in terms)
    loss.backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, model


def asked(config: Config) -> QuestionFiles:
    return QuestionFiles(config.data.train, config.data.max_train_samples)


def changes(config: Config, run: runs.Run) -> dict[str, torch.Tensor]:
    """Return by how much SGD has changed each trained parameter, divided by minus the learning rate."""
    _, model, _ = model_of(config)
    before = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    after = trained(run)
    assert before.keys() == after.keys()
    return {name: (before[name] - after[name]) / 0.1 for name in before}


VALUES = dict(zip(TEXTS, (1.0, 0.25, 0.5, 0.0), strict=True))


@pytest.mark.parametrize(
    ("loss_type", "scale", "method", "own"),
    [
        ("dr_grpo", "none", "full", False),
        ("dr_grpo", "none", "full", True),
        ("dapo", "none", "lora", False),
        ("grpo", "group", "full", False),
    ],
)
def test_the_gradient_is_the_formula(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_type: str, scale: str, method: str, own: bool
) -> None:
    """Written by hand with a log-softmax; or (`own`) our supervised loss, each row weighted by its advantage."""
    fixed_texts(monkeypatch)
    earn(monkeypatch, VALUES)
    settings = {**SGD, "loss_type": loss_type, "scale_rewards": scale}
    tuning = {"method": "full"} if method == "full" else {"method": "lora", "r": 4, "lora_alpha": 8}
    config = config_of(world, tmp_path / "run", "grpo", training=settings, tuning=tuning, data__max_train_samples=2)
    run = train(config)
    expected, _ = expected_gradient(config, loss_type, scale, VALUES, own)
    seen = changes(config, run)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        assert float((seen[name] - gradient).abs().max()) < 2e-5 * max(largest, 1), name


def test_one_letter_each_gives_the_closed_form(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K outputs of one token each: the gradient on logit k is -(r_k - mean r) / K, whatever the probabilities are."""
    letters, earned = "ABCD", torch.tensor([0.0, 1.0, 0.25, 0.0])

    def write(self: PolicyTrainer, prompt_ids: Sequence[Any]) -> list[list[int]]:
        ids = [self.loaded.tokenizer(letter, add_special_tokens=False)["input_ids"][-1:] for letter in letters]
        return [ids[i % 4] for i in range(len(prompt_ids))]

    monkeypatch.setattr(PolicyTrainer, "write", write)
    earn(monkeypatch, dict(zip(letters, earned.tolist(), strict=True)))
    settings = {**SGD, "max_completion_length": 1, "global_batch_size": 1, "per_device_train_batch_size": 4}
    config = config_of(
        world, tmp_path / "run", "grpo", training=settings, tuning={"method": "full"}, data__max_train_samples=1
    )
    run = train(config)
    family, model, tokenizer = model_of(config)
    assert not model.config.tie_word_embeddings
    decoder = family.engine(Loaded(model, tokenizer), config)
    (item,) = decoder.ask(prompts.default_prompts(list(asked(config)), config))
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([item.ids])).last_hidden_state[0, -1]
    gradient = changes(config, run)["lm_head.weight"]  # [vocabulary, hidden]: the logit's gradient times what it reads
    expected = torch.zeros(gradient.shape[0])
    for letter, value in zip(letters, (earned - earned.mean()).tolist(), strict=True):
        expected[tokenizer(letter, add_special_tokens=False)["input_ids"][-1]] = -value / 4
    assert torch.allclose(gradient, expected[:, None] * hidden[None], atol=3e-6)
    assert float(expected.abs().max()) > 0.1


def test_what_all_outputs_earn_changes_no_weight(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All right, or all wrong in different words: the terms of form must not teach anything by themselves."""
    fixed_texts(monkeypatch, ("答案: A", "不知道", "答案: B", "因为如此。答案: A"))  # wrong, half of them readable
    config = config_of(world, tmp_path / "run", "grpo", training={"max_steps": 2}, tuning={"method": "full"})
    run = train(config)
    assert [entry["groups_without_signal"] for entry in run.log if "reward" in entry] == [1.0, 1.0]
    assert all(entry["reward_std"] > 0.01 for entry in run.log if "reward" in entry)
    _, model, _ = model_of(config)
    after = trained(run)
    assert all(torch.equal(p, after[name]) for name, p in model.named_parameters())


def test_what_is_measured(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_texts(monkeypatch)
    config = config_of(world, tmp_path / "run", "grpo", data__validation=[str(world / "val.jsonl")],
                       training={"eval_strategy": "steps", "eval_steps": 1})  # fmt: skip
    log = train(config).log
    step = next(entry for entry in log if "share_right" in entry)
    assert step["share_right"] == 0.5 and step["groups_without_signal"] == 0
    assert step["rewards/format/mean"] == 0.75 and step["rewards/exact/mean"] == 0.5
    assert step["length_right"] > 0 < step["length_wrong"]
    assert any("eval_exam_accuracy" in entry for entry in log)


def test_the_first_preference_loss_is_ln_2(world: Path, tmp_path: Path) -> None:
    """Its gradient is -beta/2 (grad log p(chosen) - grad log p(rejected)), summed over tokens, mean over pairs."""
    config = config_of(world, tmp_path / "run", "dpo", training={**SGD, "beta": 0.1}, data__max_train_samples=2)
    run = train(config)
    assert run.log[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    family, model, tokenizer = model_of(config)
    codec = family.codec(tokenizer, config.prompt, config.model)
    decoder = family.engine(Loaded(model, tokenizer), config)
    lines = [json.loads(line) for line in (world / "train.jsonl").read_text("utf-8").splitlines()][:2]
    items = decoder.ask(prompts.default_prompts(list(asked(config)), config))

    def total(ids: list[int], text: str) -> torch.Tensor:
        target = codec.targets([text])[0]
        row = torch.tensor([[*ids, *target]])
        scores = torch.log_softmax(model(input_ids=row).logits[0, :-1], -1)
        return scores.gather(-1, row[0, 1:, None])[-len(target) :, 0].sum()

    rows = zip(items, lines, strict=True)
    margin = sum(total(item.ids, line["chosen"]) - total(item.ids, line["rejected"]) for item, line in rows)
    (-0.1 / 2 * margin / 2).backward()  # type: ignore[union-attr]
    seen = changes(config, run)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-4
    assert all(float((seen[name] - gradient).abs().max()) < 2e-6 for name, gradient in gradients.items())


@pytest.mark.parametrize("objective", ["grpo", "dpo"])
def test_resumed_equals_not_interrupted(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    def term(self: Reward, name: str, question: Any, output: Any, step: int = 0) -> float:
        return float(sum(map(ord, output.text)) % 2) if name == "exact" else 0.0

    monkeypatch.setattr(Reward, "term", term)
    config = config_of(
        world, tmp_path / "run", objective, training={"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2}
    )
    run = train(config)
    whole = trained(run)
    assert max(float(value.abs().max()) for name, value in whole.items() if "lora_B" in name) > 1e-3
    for name in ("checkpoint-4", "adapter"):
        shutil.rmtree(run.path / name)
    (run.path / "trainer_state.json").unlink()
    resumed = trained(train(config))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_checkpoints_only_where_outputs_are_drawn_anew(world: Path, tmp_path: Path, capfd: Any) -> None:
    """Stored outputs are in no checkpoint: with two steps on each generation, odd steps are not saved."""
    config = config_of(world, tmp_path / "run", "grpo", training={"max_steps": 4, "num_iterations": 2})
    run = train(config)
    assert sorted(path.name for path in run.path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert "checkpoints after every 2 steps" in capfd.readouterr().err


def test_nothing_to_learn_ends_the_run() -> None:
    told: list[str] = []
    judge = monitor.PolicyMonitor(tell=told.append)
    for _ in range(monitor.RECENT):
        judge.on_groups({"reward": 0.0}, 1.0)
        judge.on_loss(0.0, 1)
        judge.on_grad_norm(0.0)
    assert judge.problem is not None and "nothing is learnt" in judge.problem
    judge = monitor.PolicyMonitor(tell=told.append)
    for _ in range(2 * monitor.RECENT):
        judge.on_groups({"reward": 0.0}, 0.9)
    assert judge.problem is None and len(told) == 1 and "90% of the questions" in told[0]
    judge.on_grad_norm(0.0)
    assert judge.problem is not None, "a group had a signal and the gradient is 0"
    judge = monitor.PolicyMonitor(tell=told.append)
    judge.on_loss(math.nan, 1)
    assert judge.problem is not None


def test_defaults_that_differ_from_trl(world: Path, tmp_path: Path) -> None:
    args: Any = arguments.build(config_of(world, tmp_path, "grpo"), tmp_path)
    assert (args.scale_rewards, args.loss_type, args.epsilon_high, args.disable_dropout) == (
        "none",
        "dr_grpo",
        0.28,
        True,
    )
    args = arguments.build(config_of(world, tmp_path, "grpo", training={"loss_type": "dapo"}), tmp_path)
    assert args.loss_type == "dapo"


def test_a_step_has_so_many_questions(world: Path, tmp_path: Path) -> None:
    training = {"global_batch_size": 4, "num_generations": 8, "per_device_train_batch_size": 4}
    args = arguments.build(config_of(world, tmp_path, "grpo", training=training), tmp_path)
    assert args.gradient_accumulation_steps == 8
    with pytest.raises(ConfigError, match=r"24 rows .* no multiple of training\.per_device_train_batch_size=16"):
        training = {"global_batch_size": 3, "num_generations": 8, "per_device_train_batch_size": 16}
        arguments.build(config_of(world, tmp_path, "grpo", training=training), tmp_path)


def test_the_dry_run_says_what_is_written(world: Path, tmp_path: Path) -> None:
    text = str(estimate.dry_run(config_of(world, tmp_path, "grpo"), asked(config_of(world, tmp_path, "grpo"))))
    assert f"outputs in each step             8  (4 of each question, at most {LENGTH} tokens: 96 written" in text
    # Tiny model: 2 layers, keys and values of 2 bytes a number, for 8 outputs of the longest question and its output.
    assert "largest generation" in text and "(8 outputs of" in text
    dpo = config_of(world, tmp_path, "dpo")
    assert "outputs in each step" not in str(estimate.dry_run(dpo, asked(dpo)))


REFUSED = {
    "prompt.style=open": {"prompt__style": "open"},
    "training.packing": {"training": {"packing": True}},
    "data.mixture": {"data__mixture": [0.5]},
    "training.reward_weights": {"training": {"reward_weights": [1.0]}},
    "training.use_vllm": {"training": {"use_vllm": True}},
    "training.metric_for_best_model=loss": {"training": {"metric_for_best_model": "loss"}},
}


@pytest.mark.parametrize(("key", "change"), REFUSED.items())
def test_what_is_refused_before_anything_is_loaded(world: Path, tmp_path: Path, key: str, change: Any) -> None:
    style = change.pop("prompt__style", "answer")
    config = config_of(world, tmp_path / "run", "grpo", **change)
    config = dataclasses.replace(config, prompt=dataclasses.replace(config.prompt, style=style))
    with pytest.raises(ConfigError, match=key):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["grpo", "dpo"])
def test_families_and_methods_that_trl_cannot_train(objective: str) -> None:
    chatglm = make_config("chatglm", training__objective=objective)
    with pytest.raises(ConfigError, match=r"not model\.family=chatglm"):
        objectives.named(objective).check(chatglm, families.named("chatglm"), adapters.named("lora"))
    ptuning = make_config(tuning={"method": "ptuning", "num_virtual_tokens": 4}, training__objective=objective)
    with pytest.raises(ConfigError, match=r"cannot be trained with tuning.method=ptuning"):
        objectives.named(objective).check(ptuning, families.named("llama"), adapters.named("ptuning"))


def test_names_belong_to_their_objective(world: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.num_generations: unknown key"):
        training_kit.recipe(world, training__num_generations=4)
    with pytest.raises(ConfigError, match=r"training\.objective: 'gpro' is unknown, did you mean 'grpo'"):
        training_kit.recipe(world, training__objective="gpro")
    with pytest.raises(ConfigError, match=r"reward\.exakt: unknown key, did you mean 'exact'"):
        config_of(world, tmp_path, "grpo", reward={"exakt": 1.0})


def test_pairs_that_are_none(world: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (world / "train.jsonl").read_text("utf-8").splitlines()]
    path = tmp_path / "plain.jsonl"
    plain = {key: value for key, value in lines[0].items() if key not in ("chosen", "rejected")}
    path.write_text(json.dumps(plain) + "\n", "utf-8")
    with pytest.raises(DataError, match=r"plain.jsonl:1: has no `chosen` and `rejected`"):
        train(config_of(world, tmp_path / "run", "dpo", data__train=[str(path)]))
    path.write_text(json.dumps({**lines[0], "rejected": lines[0]["chosen"]}) + "\n", "utf-8")
    with pytest.raises(DataError, match="nothing to prefer"):
        train(config_of(world, tmp_path / "run", "dpo", data__train=[str(path)]))


def test_a_run_without_signal_is_stopped(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "RECENT", 1)
    fixed_texts(monkeypatch, ("不知道",))
    with pytest.raises(TrainingStopped, match="no question had both right and wrong outputs"):
        train(config_of(world, tmp_path / "run", "grpo", training={"max_steps": 3}))


@pytest.mark.slow  # six trainings on two processes each, half a minute apiece
@pytest.mark.parametrize("objective", ["grpo", "dpo"])
@pytest.mark.parametrize("stage", ["", "zero2", "zero3"])
def test_two_processes(world: Path, tmp_path: Path, objective: str, stage: str) -> None:
    config = config_of(world, tmp_path / "run", objective, training={
        "max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 1, **({"deepspeed": stage} if stage else {}),
    })  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(dump_config(config), "utf-8")
    command = [*training_kit.torchrun(), "--config", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, env=training_kit.ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    run = runs.open_run(tmp_path / "run")
    assert run.finished and (run.path / "checkpoint-1").is_dir()
