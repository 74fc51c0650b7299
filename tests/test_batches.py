"""The plan of the steps, and that packing and label-only logits change neither loss nor gradients."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import training_kit

torch = pytest.importorskip("torch")

from cmexam_tune import config, tiny
from cmexam_tune.models.families import Loaded
from cmexam_tune.training import logits
from cmexam_tune.training.data.encoding import label_count, length
from cmexam_tune.training.data.questions import question_files
from cmexam_tune.training.data.sampler import (
    StepLayout,
    StepSampler,
    order,
    slots,
    spread,
)
from cmexam_tune.training.run_directory import run


def lengths(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice((rng.randint(20, 60), rng.randint(60, 300))) for _ in range(count)]


LAYOUTS = [
    StepLayout(16, 8),
    StepLayout(16, 8, max_tokens=500),
    StepLayout(16, 8, pack_length=512),
    StepLayout(64, 4, max_tokens=300, pack_length=256),
    StepLayout(7, 3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [5, 16, 203])
def test_every_question_once_within_the_limits(layout: StepLayout, world: int, count: int) -> None:
    sizes = lengths(count)
    seen: list[int] = []
    for step in order(sizes, layout, 0):
        assert 1 <= len(step) <= layout.global_batch
        shares = spread(step, sizes, layout, world)
        assert len({len(share) for share in shares}) == 1, "every process runs as many micro-batches"
        for micro in (micro for share in shares for micro in share):
            assert sum(map(len, micro)) <= layout.micro_batch
            if layout.max_tokens and sum(map(len, micro)) > 1:
                assert slots(micro, sizes) <= layout.max_tokens
            seen += [i for group in micro for i in group]
    assert sorted(seen) == list(range(count))


def test_steps_do_not_depend_on_processes_packing_or_budget() -> None:
    sizes = lengths(300)
    plain = order(sizes, StepLayout(16, 8), 1)
    assert plain == order(sizes, StepLayout(16, 4, max_tokens=100, pack_length=512), 1)
    assert plain != order(sizes, StepLayout(16, 8), 2), "another epoch is another order"
    assert plain != order(sizes, StepLayout(16, 8, seed=1), 1)
    items = [
        [plan.step_targets for (plan,) in StepSampler(sizes, sizes, layout, rank=rank, world=world)]
        for layout, rank, world in [(StepLayout(16, 8), 0, 1), (StepLayout(16, 8, pack_length=99), 1, 2)]
    ]
    assert items[0] == items[1] == [sum(sizes[i] for i in step) for step in order(sizes, StepLayout(16, 8), 0)]


def test_padding_stays_low_and_is_counted_right() -> None:
    sizes = lengths(1024)
    sampler = StepSampler(sizes, sizes, StepLayout(16, 8), rank=0, world=1)
    total = sum(slots(micro, sizes) for (plan,) in sampler for micro in plan.micro)
    assert sampler.padding() == pytest.approx(1 - sum(sizes) / total)
    assert sampler.padding() < 0.05


def test_work_is_shared_evenly() -> None:
    sizes = lengths(1024)
    loads = []
    for rank in range(4):
        loads.append(sum(slots(m, sizes) for (plan,) in StepSampler(sizes, sizes, StepLayout(32, 8), rank=rank, world=4)
                         for m in plan.micro))  # fmt: skip
    assert max(loads) / min(loads) < 1.1


FAMILIES = ("llama", "chatglm", "chatglm2")
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    training_kit.questions(folder / "train.jsonl", 7)
    for name in FAMILIES:
        tiny.build(name, folder / name, hidden=32, layers=2)
    return folder


def prepared(folder: Path, name: str, method: str) -> tuple[config.Config, Any, Loaded, list[Any]]:
    settings = training_kit.recipe(
        folder, tuning=METHODS[method], model__family=name.rstrip("2"), model__model_name_or_path=str(folder / name)
    )
    family, tuning = run.parts(settings)
    questions = list(question_files(settings)[0])
    torch.manual_seed(0)
    loaded = family.load(settings.model, questions)
    rows = list(family.encode(loaded, questions, settings.prompt, settings.model).rows)
    model: Any = tuning.attach(loaded.model, family, settings.tuning.settings)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    return settings, family, Loaded(model.train(), loaded.tokenizer), rows


def gradients(model: Any) -> dict[str, Any]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert found
    return found


def close(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_label_only_logits_and_packing_keep_loss_and_gradients(folder: Path, name: str, method: str) -> None:
    _, family, loaded, rows = prepared(folder, name, method)
    model: Any = loaded.model
    items = sum(map(label_count, rows))
    # The witness: every logit computed, each question alone, cross-entropy written out.
    expected = torch.zeros(())
    for row in rows:
        batch = family.collate(loaded, [[row]])
        labels = batch.pop("labels")
        scores = torch.log_softmax(model(**batch).logits[0, :-1].float(), dim=-1)
        targets = labels[0, 1:]
        kept = targets != -100
        loss = -scores[kept].gather(1, targets[kept][:, None]).sum() / items
        loss.backward()
        expected = expected + loss.detach()
    alone = gradients(model)
    select = logits.LabelLogits(model)
    for groups in ([[row] for row in rows], [rows[:4], rows[4:]], [rows]):
        batch = family.collate(loaded, groups)
        labels = batch.pop("labels")
        scores, targets = select(model, batch, labels)
        assert scores.shape[0] == items
        loss = logits.token_loss(scores, targets) / items
        loss.backward()
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        close(gradients(model), alone)
        batch = family.collate(loaded, groups)
        whole = select.loss(model, batch, batch.pop("labels")) / items
        whole.backward()
        assert float(whole.detach()) == pytest.approx(float(expected), rel=1e-5)
        close(gradients(model), alone)
    batch.pop("labels", None)
    assert model(**batch).logits.shape[1] == batch["input_ids"].shape[1], "outside of training all logits come back"


class Headed(torch.nn.Module):
    """A model of a float16 output layer [300, 64] over states [1, 40, 64] that are trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(64, 300, bias=False).half().requires_grad_(False)
        self.states = torch.nn.Parameter(torch.randn(1, 40, 64).half())
        self.rows: list[int] = []

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self) -> dict[str, torch.Tensor]:
        scores = self.head(self.states)
        self.rows.append(scores.shape[1])
        return {"logits": scores}


@pytest.mark.parametrize("scale", [65536 / 640, 2.0**17])
def test_float16_never_holds_all_logits_and_keeps_the_scaled_gradient(scale: float) -> None:
    """Loss scaling starts at 65536 and float16 ends at 65504; the witness computes in float64."""
    model = Headed()
    labels = torch.randint(0, 300, (1, 40))
    (logits.LabelLogits(model).loss(model, {}, labels) * scale).backward()
    assert model.rows == [1]
    exact = model.states.detach().double().requires_grad_()
    scores = torch.log_softmax(exact[0, :-1] @ model.head.weight.double().T, -1)
    (-scores.gather(1, labels[0, 1:, None]).sum() * scale).backward()
    assert model.states.grad is not None and exact.grad is not None
    error = (model.states.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert float(error) < 2e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_flash_attention_gets_one_row_without_padding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    """transformers' own path to the kernel for different lengths; in the kernel's place stands its formula.

    Loss and gradients are those of padded rows, which SDPA computes.
    """
    import transformers.modeling_flash_attention_utils as flash

    _, family, loaded, rows = prepared(folder, "llama", "lora")
    model: Any = loaded.model.to(dtype)
    select, longest = logits.LabelLogits(model), []

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):
        assert causal and isinstance(max_seqlen_q, int) and cu_seqlens_q.dtype == torch.int32
        longest.append(max_seqlen_q)
        parts = []
        for start, end in itertools.pairwise(cu_seqlens_q.tolist()):
            queries, keys, values = (x[start:end].transpose(0, 1).float() for x in (q, k, v))
            keys, values = (x.repeat_interleave(len(queries) // len(x), 0) for x in (keys, values))
            scores = queries @ keys.mT * softmax_scale
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
        return torch.cat(parts).to(q.dtype)

    def computed(batch: dict[str, Any]) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        inputs = {name: value if value.dim() else int(value) for name, value in batch.items()}
        loss = select.loss(model, inputs, inputs.pop("labels"))
        loss.backward()
        return float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (kernel, kernel, None, None, None))
    for groups in ([[row] for row in rows], [rows[:4], rows[4:]], [[rows[0]]]):
        plain, gradients = computed(family.collate(loaded, groups))
        questions = [row for group in groups for row in group]
        with monkeypatch.context() as patch:
            patch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
            flat = family.collate(loaded, groups)
            varlen, others = computed(flat)
        assert flat["input_ids"].shape == (1, sum(map(length, questions))) and "attention_mask" not in flat
        assert longest == [max(map(length, questions))] * model.config.num_hidden_layers
        longest.clear()
        assert varlen == pytest.approx(plain, rel=tolerance)
        for other, gradient in zip(others, gradients, strict=True):
            assert (other - gradient).norm() <= 20 * tolerance * gradient.norm()


def test_a_large_validation_file_is_laid_out_at_once() -> None:
    """It took 14 s when one more round was tried after the other."""
    sizes = lengths(27_000)
    started = time.process_time()
    shares = spread(range(len(sizes)), sizes, StepLayout(len(sizes), 32, max_tokens=2048), 1)
    assert time.process_time() - started < 0.5
    assert sum(map(len, shares[0])) == 27_000


def test_length_of_rows() -> None:
    assert length({"input_ids": [1, 2, 3]}) == 3
    assert length({"input_ids": [[1, 2], [1, 2, 3, 4]]}) == 4
    assert label_count({"labels": [5, -100, 7, 8]}) == 2


def test_longest_question_comes_first_in_the_first_epoch() -> None:
    lengths = random.Random(3).sample(range(5, 4000), 3000)
    plan = StepLayout(global_batch=8, micro_batch=2, seed=1)
    first, second = (order(lengths, plan, epoch) for epoch in (0, 1))
    assert lengths[first[0][0]] == max(lengths)
    assert sorted(i for step in first for i in step) == list(range(3000))
    assert lengths[second[0][0]] < max(lengths)
