"""Sampling by a seed of each row's own: the right distribution, and the same draws in any batch."""

import torch
from transformers import GenerationConfig

from cmexam_tune.models.generation import sampling


def draw(scores: torch.Tensor, keys: list[str], steps: int = 1, **settings: float) -> torch.Tensor:
    """Return the tokens [rows, steps] that are drawn from `scores` [vocabulary]."""
    greedy, shaping = sampling.split_sampling(GenerationConfig(do_sample=True, **settings))  # type: ignore[no-untyped-call]
    assert shaping is not None and not greedy.do_sample
    process = sampling.SeededSampling(shaping, [f"5/{key}" for key in keys])
    rows = scores.expand(len(keys), -1)
    ids = torch.zeros(len(keys), 1, dtype=torch.long)
    return torch.stack([process(ids, rows).argmax(-1) for _ in range(steps)], 1)  # type: ignore[arg-type]


def test_draws_follow_the_distribution() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    drawn = draw(scores, [f"q:{i}" for i in range(2000)], steps=10, temperature=0.7)
    wanted = (scores / 0.7).softmax(0)
    found = drawn.flatten().bincount(minlength=5) / drawn.numel()
    sigma = (wanted * (1 - wanted) / drawn.numel()).sqrt()
    assert ((found - wanted).abs() <= 4 * sigma + 1e-9).all(), (found, wanted)
    assert len(set(map(tuple, drawn.tolist()))) > 500


def test_settings_shape_it() -> None:
    scores, keys = torch.tensor([2.0, 1.9, 0.0, -1.0]), [f"q:{i}" for i in range(300)]
    assert set(draw(scores, keys, top_k=2).flatten().tolist()) == {0, 1}
    assert set(draw(scores, keys, top_p=0.4).flatten().tolist()) == {0}
    assert set(draw(scores, keys, top_k=1).flatten().tolist()) == {0}
    assert len(set(draw(scores, keys, temperature=50.0).flatten().tolist())) == 4


def test_a_row_draws_the_same_in_any_batch() -> None:
    scores, keys = torch.randn(50, generator=torch.Generator().manual_seed(0)), ["a#0", "a#1", "b#0", "c#4"]
    whole = draw(scores, keys, steps=20)
    for row, key in enumerate(keys):
        assert draw(scores, [key], steps=20).tolist() == whole[row : row + 1].tolist()
        assert draw(scores.half(), [key], steps=20).shape == (1, 20)
    assert len(set(map(tuple, whole.tolist()))) == 4


def test_without_sampling_nothing_changes() -> None:
    chosen = GenerationConfig(num_beams=3)  # type: ignore[no-untyped-call]
    assert sampling.split_sampling(chosen) == (chosen, None)
