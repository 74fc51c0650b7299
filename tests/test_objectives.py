"""GRPO and DPO: TRL's steps against formulas written by hand, what must not change, kills, and what is refused."""

import dataclasses
import json
import math
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("trl")

import torch
import training_kit
from forked_programs import finish
from kit import make_config

from cmexam_tune import prompts
from cmexam_tune.config import Config, dump_config
from cmexam_tune.core.errors import ConfigError, DataError, TrainingStopped, UserError
from cmexam_tune.models import Loaded
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family
from cmexam_tune.rewards import Reward
from cmexam_tune.train import main, train
from cmexam_tune.training import arguments, estimate, logits, monitor
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.policy_server import PolicyServer
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


def trained(run: runs.Run, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the trained parameters after a step (None: at the end of a run), by their names in the model."""
    from safetensors.torch import load_file

    newest = max(run.path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    place = newest if step is None else run.path / f"checkpoint-{step}"
    return dict(load_file(place / "trainable.safetensors"))


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


def fixed_and_earned() -> None:
    """The same in another process."""
    patch = pytest.MonkeyPatch()
    fixed_texts(patch)
    earn(patch, VALUES)


def scores(model: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Return the log-probabilities of the last tokens: float32 [length]."""
    logits = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
    return logits.gather(-1, ids[0, 1:, None])[-length:, 0]


def divergence(model: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Return Schulman's estimate of the divergence from the model without its adapter, exp(d) - d - 1, summed."""
    with torch.no_grad(), model.disable_adapter():
        reference = scores(model, ids, length)
    apart = reference - scores(model, ids, length)
    return (apart.exp() - apart - 1).sum()


def expected_gradient(
    config: Config,
    loss_type: str,
    scale: str,
    own: bool = False,
    beta: float = 0.0,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return name -> gradient of the GRPO loss on the questions, on policy, at the first step or with these weights."""
    family, model, tokenizer = model_of(config)
    if weights:
        assert not model.load_state_dict(dict(weights), strict=False).unexpected_keys
    codec = family.codec(tokenizer, config.prompt, config.model)
    decoder = family.engine(Loaded(model, tokenizer), config)
    label_logits = logits.LabelLogits(model)
    terms: list[tuple[torch.Tensor, int]] = []
    earned = torch.tensor([VALUES[text] for text in TEXTS])
    advantages = earned - earned.mean()
    if scale == "group":
        advantages = advantages / (earned.std() + 1e-4)
    for item in decoder.ask(prompts.default_prompts(list(asked(config)), config)):
        for text, advantage in zip(TEXTS, advantages.tolist(), strict=True):
            target = codec.targets([text])[0]
            ids = torch.tensor([[*item.ids, *target]])
            if own:  # the loss of supervised tuning: minus the sum of log-probabilities of the labels
                labels = ids.clone()
                labels[0, : len(item.ids)] = -100
                total = -label_logits.loss(model, {"input_ids": ids}, labels)
            else:
                total = scores(model, ids, len(target)).sum()
            loss = -advantage * total
            if beta:
                loss = loss + beta * divergence(model, ids, len(target))
            terms.append((loss, len(target)))
    tokens = sum(length for _, length in terms)
    divisor = {"dapo": lambda length: tokens, "dr_grpo": lambda length: len(terms) * LENGTH}.get(
        loss_type, lambda length: len(terms) * length
    )
    torch.stack([loss / divisor(length) for loss, length in terms]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def asked(config: Config) -> QuestionFiles:
    return QuestionFiles(config.data.train, config.data.max_train_samples)


def changes(config: Config, run: runs.Run, step: int = 1) -> dict[str, torch.Tensor]:
    """Return by how much SGD has changed each trained parameter in a step, divided by minus the learning rate."""
    _, model, _ = model_of(config)
    before = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if step > 1:
        before = trained(run, step - 1)
    after = trained(run, step)
    assert before.keys() == after.keys()
    return {name: (before[name] - after[name]) / 0.1 for name in before}


VALUES = dict(zip(TEXTS, (1.0, 0.25, 0.5, 0.0), strict=True))


@pytest.mark.parametrize(
    ("loss_type", "scale", "method", "own", "size"),
    [
        ("dr_grpo", "none", "full", False, 8),
        ("dr_grpo", "none", "full", True, 8),
        ("dapo", "none", "lora", False, 1),
        ("grpo", "group", "full", False, 2),
    ],
)
def test_the_gradient_is_the_formula(
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loss_type: str,
    scale: str,
    method: str,
    own: bool,
    size: int,
) -> None:
    """Written by hand with a log-softmax; or (`own`) our supervised loss, each row weighted by its advantage."""
    fixed_texts(monkeypatch)
    earn(monkeypatch, VALUES)
    settings = {**SGD, "loss_type": loss_type, "scale_rewards": scale, "per_device_train_batch_size": size}
    tuning = {"method": "full"} if method == "full" else {"method": "lora", "r": 4, "lora_alpha": 8}
    config = config_of(world, tmp_path / "run", "grpo", training=settings, tuning=tuning, data__max_train_samples=2)
    run = train(config)
    compare(changes(config, run), expected_gradient(config, loss_type, scale, own))


def compare(seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3 and seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((seen[name] - gradient).abs().max()) < 2e-5 * max(largest, 1), name


def test_the_reference_is_the_model_without_its_adapter(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With beta > 0, in the second step: in the first one the adapter is zero, and so is the penalty."""
    fixed_texts(monkeypatch)
    earn(monkeypatch, VALUES)
    settings = {**SGD, "learning_rate": 5.0, "beta": 0.5, "max_steps": 2}
    config = config_of(world, tmp_path / "run", "grpo", training=settings, data__max_train_samples=2)
    run = train(config)
    rate = 5.0 / 0.1  # `changes` divides by 0.1
    seen = {name: change / rate for name, change in changes(config, run, step=2).items()}
    compare(seen, expected_gradient(config, "dr_grpo", "none", beta=0.5, weights=trained(run, 1)))
    with pytest.raises(AssertionError):
        compare(seen, expected_gradient(config, "dr_grpo", "none", weights=trained(run, 1)))


@pytest.mark.parametrize(
    ("loss_type", "scale", "tuning"),
    [
        ("dapo", "none", {"method": "lora", "r": 4, "lora_alpha": 8}),
        pytest.param("dr_grpo", "none", {"method": "full"}, marks=pytest.mark.slow),
        pytest.param("grpo", "group", {"method": "full"}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_have_the_gradient_of_one(
    world: Path, tmp_path: Path, loss_type: str, scale: str, tuning: Any
) -> None:
    settings = {**SGD, "loss_type": loss_type, "scale_rewards": scale, "per_device_train_batch_size": 2}
    config = config_of(world, tmp_path / "run", "grpo", training=settings, tuning=tuning, data__max_train_samples=2)
    (tmp_path / "recipe.yaml").write_text(dump_config(config), "utf-8")
    finish(["train", "--config", str(tmp_path / "recipe.yaml")], 2, fixed_and_earned)
    compare(changes(config, runs.open_run(tmp_path / "run")), expected_gradient(config, loss_type, scale))


@pytest.mark.slow  # every objective, precision and size
@pytest.mark.parametrize("objective", ["grpo", "dpo"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_half_precision(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str, dtype: str, size: int, method: str
) -> None:
    """The step is that of full precision but for rounding."""
    fixed_texts(monkeypatch)
    earn(monkeypatch, VALUES)
    tuning = {"method": "full"} if method == "full" else {"method": "lora", "r": 4, "lora_alpha": 8}
    settings = {**SGD, "global_batch_size": 8, "per_device_train_batch_size": size, "num_generations": 4}
    if objective == "dpo":
        del settings["num_generations"]
    seen = {}
    for name in ("float32", dtype):
        config = config_of(world, tmp_path / name, objective, training=settings, tuning=tuning, model__dtype=name)
        run = train(config)
        assert math.isfinite(run.log[0]["grad_norm"]) and run.log[0]["grad_norm"] > 0
        if objective == "dpo":
            assert run.log[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
        # In the first step the other half of an adapter has no gradient; a whole model begins rounded.
        seen[name] = [value.flatten() for key, value in trained(run).items() if "lora_B" in key]
    if method == "lora":
        exact, rounded = (torch.cat(values).float() for values in seen.values())
        assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99


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
    args: Any = arguments.build(config_of(world, tmp_path, "grpo"), Objective.named("grpo"), tmp_path)
    assert (args.scale_rewards, args.loss_type, args.epsilon_high, args.disable_dropout) == (
        "none",
        "dr_grpo",
        0.28,
        True,
    )
    args = arguments.build(
        config_of(world, tmp_path, "grpo", training={"loss_type": "dapo"}), Objective.named("grpo"), tmp_path
    )
    assert args.loss_type == "dapo"


def test_a_step_has_so_many_questions(world: Path, tmp_path: Path) -> None:
    training = {"global_batch_size": 4, "num_generations": 8, "per_device_train_batch_size": 4}
    args = arguments.build(config_of(world, tmp_path, "grpo", training=training), Objective.named("grpo"), tmp_path)
    assert args.gradient_accumulation_steps == 8
    with pytest.raises(ConfigError, match=r"24 rows .* no multiple of training\.per_device_train_batch_size=16"):
        training = {"global_batch_size": 3, "num_generations": 8, "per_device_train_batch_size": 16}
        arguments.build(config_of(world, tmp_path, "grpo", training=training), Objective.named("grpo"), tmp_path)


def test_the_dry_run_says_what_is_written(world: Path, tmp_path: Path) -> None:
    text = str(estimate.dry_run(config_of(world, tmp_path, "grpo"), asked(config_of(world, tmp_path, "grpo"))))
    assert f"outputs in each step             8  (4 of each question, at most {LENGTH} tokens: 96 written" in text
    # Tiny model: 2 layers, keys and values of 2 bytes a number, for 8 outputs of the longest question and its output.
    assert "largest generation" in text and "(8 outputs of" in text
    dpo = config_of(world, tmp_path, "dpo")
    assert "outputs in each step" not in str(estimate.dry_run(dpo, asked(dpo)))


@pytest.mark.parametrize("objective", ["sft", "grpo", "dpo"])
def test_what_is_better_not_trained_on(world: Path, tmp_path: Path, capfd: Any, objective: str) -> None:
    """Held out, with a doubtful key, or trained on by the run whose adapter this one goes on from."""
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text("utf-8").splitlines()]
    rows[2]["explanation"] = "综上所述，故选A。"
    for name, part in {"train": rows[:4], "val": [{**rows[0], "id": "v"}], "earlier": rows[1:3]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")
    data = {name: [str(tmp_path / f"{name}.jsonl")] for name in ("train", "val", "earlier")}
    first, second = tmp_path / "first", tmp_path / "second"
    plain = config_of(world, second, "sft")
    for folder, files, adapter in ((first, data["earlier"], None), (second, data["train"][:0], first / "adapter")):
        (folder / "adapter").mkdir(parents=True)
        model = dataclasses.replace(plain.model, adapter_name_or_path=adapter and str(adapter))
        run = dataclasses.replace(plain, model=model, data=dataclasses.replace(plain.data, train=tuple(files)))
        (folder / "config.yaml").write_text(dump_config(run), "utf-8")
    config = config_of(world, tmp_path / "run", objective, data__train=data["train"], data__validation=data["val"],
                       model__adapter_name_or_path=str(second / "adapter"))  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(dump_config(config), "utf-8")
    main(["--config", str(tmp_path / "recipe.yaml"), "--dry-run"])
    told = capfd.readouterr().err
    assert f"held out are also trained on: 1 of {data['val'][0]}" in told
    assert "doubtful (1 explanation-contradicts)" in told
    assert f"trained on again: 2 of {data['earlier'][0]}" in told


class FakeVLLM(BaseHTTPRequestHandler):
    """The routes of vLLM's server that are needed; what it writes is `TEXTS`, with the adapter's own probabilities."""

    rows: ClassVar[list[tuple[str, Any]]] = []
    answer: ClassVar[Any] = None

    def log_message(self, *words: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.rows.append((self.path, body))
        status, reply = type(self).answer(self.path, body)
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def vllm_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeVLLM)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    FakeVLLM.rows.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


SERVED = {"use_vllm": True, "vllm_mode": "server"}


def test_a_server_in_another_environment_writes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_server: str
) -> None:
    """It has the adapter of each step under a name of its own; its outputs are learnt like ours."""
    from peft import PeftModel

    earn(monkeypatch, VALUES)
    training = {**SGD, "max_steps": 2, "vllm_importance_sampling_correction": False}
    settings = {**training, **SERVED, "vllm_server_base_url": vllm_server}
    config = config_of(world, tmp_path / "run", "grpo", training=settings, data__max_train_samples=2)
    family, _, tokenizer = model_of(config)
    codec = family.codec(tokenizer, config.prompt, config.model)
    weights: dict[str, float] = {}

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("load_lora_adapter"):
            if "lora_path" in body:
                base = family.load(config.model, [], "cpu").model
                loaded = PeftModel.from_pretrained(base, body["lora_path"]).state_dict()
                weights[body["lora_name"]] = sum(float(p.abs().sum()) for n, p in loaded.items() if "lora_B" in n)
            return 200, "Success"
        rows = [codec.targets([TEXTS[i % 4]])[0] for i in range(len(body["prompt"]))]
        choices = [{"index": i, "token_ids": row, "logprobs": {"token_logprobs": [-1.0] * len(row)}}
                   for i, row in enumerate(rows)]  # fmt: skip
        return 200, {"choices": choices[::-1]}

    monkeypatch.setattr(FakeVLLM, "answer", staticmethod(answer))
    served = trained(train(config))
    paths = [path for path, _ in FakeVLLM.rows]
    load, unload, write = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
    assert paths == [load, write, unload, load, write, unload]
    first, second = weights
    assert weights[first] == 0 < weights[second], "the server has the adapter as it is after the step"
    written = [body for path, body in FakeVLLM.rows if path == write]
    assert [body["model"] for body in written] == [first, second]
    assert written[0]["max_tokens"] == LENGTH and written[0]["temperature"] == 1.0 and written[0]["return_token_ids"]
    assert len(written[0]["prompt"]) == 8 and written[0]["prompt"][0] == written[0]["prompt"][3]
    assert not (tmp_path / "run" / ".policy").exists()

    fixed_texts(monkeypatch)
    alone = trained(train(config_of(world, tmp_path / "alone", "grpo", training=training, data__max_train_samples=2)))
    assert max(float((served[name] - alone[name]).abs().max()) for name in alone) < 1e-6
    assert max(float(alone[name].abs().max()) for name in alone if "lora_B" in name) > 1e-4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"detail": "Not Found"}), "status 404.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ((200, {"choices": []}), "other outputs came back"),
        ((200, {"object": "error"}), "not that of vLLM"),
        (None, "no vLLM answers there"),
    ],
)
def test_a_server_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_server: str, answer: Any, words: str
) -> None:
    monkeypatch.setattr(FakeVLLM, "answer", staticmethod(lambda path, body: answer))
    server = PolicyServer(vllm_server if answer else "http://127.0.0.1:1", tmp_path / "policy")
    with pytest.raises(UserError, match=words):
        server.write(server.load(lambda place: None), [[1, 2]], {})


def test_a_proxy_is_not_asked_for_a_server_that_shares_our_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vllm_server: str
) -> None:
    monkeypatch.setattr(FakeVLLM, "answer", staticmethod(lambda path, body: (200, "Success")))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    name = PolicyServer(vllm_server, tmp_path / "policy").load(lambda place: None)
    assert [(path, body["lora_name"]) for path, body in FakeVLLM.rows] == [("/v1/load_lora_adapter", name)]


REFUSED = {
    "prompt.style=open": {"prompt__style": "open"},
    "training.packing": {"training": {"packing": True}},
    "data.mixture": {"data__mixture": [0.5]},
    "training.reward_weights": {"training": {"reward_weights": [1.0]}},
    "training.use_vllm": {"training": {"use_vllm": True}},
    "training.vllm_mode=server": {"training": SERVED, "tuning": {"method": "full"}},
    "model.adapter_name_or_path": {"training": SERVED, "model__adapter_name_or_path": "sft/adapter"},
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
        Objective.named(objective).check(chatglm, Family.named("chatglm"), Method.named("lora"))
    ptuning = make_config(tuning={"method": "ptuning", "num_virtual_tokens": 4}, training__objective=objective)
    with pytest.raises(ConfigError, match=r"cannot be trained with tuning.method=ptuning"):
        Objective.named(objective).check(ptuning, Family.named("llama"), Method.named("ptuning"))


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
