"""Files with weights and shuffled options: every epoch's questions, exact resumption, and letters that stay right."""

import dataclasses
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import real_data
import training_kit

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from cmexam_tune import reproduce
from cmexam_tune.config import Config, DataConfig
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.prompts.order import shuffled
from cmexam_tune.train import train
from cmexam_tune.training import estimate
from cmexam_tune.training.data.questions import QuestionFiles, question_files
from cmexam_tune.training.data.sampler import Mixture, StepLayout, StepSampler

# --- mixture ------------------------------------------------------------------------------------------------------

SOURCES = [*[0] * 40, *[1] * 17, *[2] * 9]
WEIGHTS = (0.5, 1.0, 2.3)


def shown(epoch: int, world: int, seed: int = 0) -> list[int]:
    """Return the questions of an epoch as the processes see them, in order of the steps."""
    sizes = [random.Random(i).randint(20, 300) for i in range(len(SOURCES))]
    layout, mixture = StepLayout(8, 3, seed=seed), Mixture(SOURCES, WEIGHTS, seed)
    found = []
    for rank in range(world):
        sampler = StepSampler(sizes, sizes, layout, rank=rank, world=world, mixture=mixture)
        sampler.set_epoch(epoch)
        plans = [plan for (plan,) in sampler]
        assert len(plans) == len(sampler)
        found.append([[i for micro in plan.micro for group in micro for i in group] for plan in plans])
    assert sampler.tokens() == sum(sizes[i] for share in found for step in share for i in step)
    return [i for steps in zip(*found, strict=True) for i in sorted(i for share in steps for i in share)]


def test_each_epoch_holds_its_share_of_each_file() -> None:
    total: Counter[int] = Counter()
    for epoch in range(6):
        seen = shown(epoch, 1)
        assert Counter(SOURCES[i] for i in seen) == {0: 20, 1: 17, 2: 21}
        assert seen == shown(epoch, 2) == shown(epoch, 3), "the processes share what one process would do"
        assert seen == shown(epoch, 1), "resumed: nothing but seed and epoch counts"
        assert seen != shown(epoch, 1, seed=1) and sorted(seen) != sorted(shown(epoch + 1, 1))
        total.update(seen)
        for source in set(SOURCES):
            times = [total[i] for i, own in enumerate(SOURCES) if own == source]
            assert max(times) - min(times) <= 1, "no question is preferred"
    assert {total[i] for i in range(40)} == {3}, "half of a file, six times"


def test_a_small_weight_still_shows_a_question() -> None:
    assert Mixture([0] * 5 + [1], (0.01, 1.0)).counts() == [1, 1]
    assert Mixture([1], (1.0, 1.0)).counts() == [0, 1], "a file of which nothing could be encoded"


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_weights_that_cannot_be(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="mixture"):
        DataConfig(train=("a.jsonl", "b.jsonl"), mixture=weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training_kit.world(tmp_path_factory.mktemp("mixture"), count=20)
    text = training_kit.questions(folder / "other.jsonl", 6, seed=3).read_text(encoding="utf-8")
    (folder / "other.jsonl").write_text(text.replace('"q:', '"other:'), encoding="utf-8")
    return folder


def mixed(folder: Path, out: str, **changes: object) -> Config:
    files = [str(folder / "train.jsonl"), str(folder / "other.jsonl")]
    more = {"data__train": files, "data__mixture": [0.5, 2], "data__shuffle_options": True, **changes}
    return training_kit.recipe(folder, out=str(folder / out), **more)


def test_dry_run_counts_what_is_shown(folder: Path) -> None:
    config = mixed(folder, "never")
    found = estimate.dry_run(config, question_files(config)[0])
    assert found.steps == 2 * 4, "10 + 12 questions, 6 in each step, 2 epochs"
    once = estimate.dry_run(plain := mixed(folder, "never", data__mixture=[]), question_files(plain)[0])
    assert once.steps == 2 * 5 and found.tokens < once.tokens


def test_resumed_it_gives_the_same_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(mixed(folder, "whole"))
    from cmexam_tune.training import callbacks

    def stop(self: object, args: object, state: object, control: object, **_: object) -> None:
        if state.global_step == 5:  # type: ignore[attr-defined]
            raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(callbacks.Screen, "on_step_begin", stop, raising=False)
        with pytest.raises(RuntimeError, match="killed"):
            train(mixed(folder, "killed"))
    assert any(folder.glob("killed/checkpoint-*"))
    resumed = train(mixed(folder, "killed"))
    first, second = (load_file(run.adapter / "adapter_model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- shuffled options ---------------------------------------------------------------------------------------------

OPTIONS = {"A": "甲硝唑", "B": "乙胺丁醇", "C": "丙硫氧嘧啶", "D": "丁卡因", "E": "戊二醛"}


def question(explanation: str | None, **changes: object) -> Question:
    plain = Question("q:1", "首选的药物是", OPTIONS, "B", explanation)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


NAMED = [
    "甲硝唑（A错）不是。乙胺丁醇（B对）是，丙硫氧嘧啶（C错D错）、戊二醛（E错）不是。",
    "乙胺丁醇（B对，ACDE错）。",
    "首选乙胺丁醇。故选B。",
    "正确答案为B。A、C、D项错误，E选项也不对。",
    "A错，B对，C错误，D不正确。",
    "补充维生素D与B12，查B超。戊二醛（E错）。",
]


@pytest.mark.parametrize("explanation", NAMED)
def test_letters_name_the_same_texts(explanation: str) -> None:
    """Letters are replaced by the texts they name, before and after: the same must stand there."""
    terms = re.compile("维生素[A-E]|B超|B12")
    orders = set()
    for seed in range(30):
        plain, moved = question(explanation), shuffled(question(explanation), seed)
        orders.add(tuple(moved.options.values()))
        assert moved.answer is not None and [moved.options[x] for x in moved.answer] == ["乙胺丁醇"]
        assert list(moved.options) == list(plain.options)
        assert terms.findall(moved.explanation or "") == terms.findall(explanation)

        def texts(one: Question) -> list[list[str]]:
            runs = re.findall(r"[A-E]+", terms.sub("", one.explanation or ""))
            return [sorted(one.options[letter] for letter in run) for run in runs]

        assert texts(moved) == texts(plain)
        assert moved == shuffled(question(explanation), seed)
    assert len(orders) > 10


@pytest.mark.parametrize(
    "changed",
    [
        {"explanation": "属于A型。乙胺丁醇（B对）。"},
        {"explanation": "辅酶A参与。"},
        {"explanation": "首选C反应蛋白和ACE。"},
        {"explanation": "选b。"},
        {"explanation": "故选Ｂ。"},
        {"explanation": "前两项都不对。"},
        {"explanation": "第三个选项错误。"},
        {"explanation": "首选甲硝唑，故选A。"},
        {"options": {**OPTIONS, "E": "以上都不是"}},
        {"options": {**OPTIONS, "E": "A和C"}},
        {"stem": "选项A与哪一项相同"},
    ],
    ids=str,
)
def test_what_could_break_stays_as_it_is(changed: dict[str, object]) -> None:
    plain = question(**{"explanation": None, **changed})  # type: ignore[arg-type]
    assert all(shuffled(plain, seed) == plain for seed in range(10))


def test_it_is_part_of_what_is_encoded(folder: Path) -> None:
    plain, first, second = (QuestionFiles((str(folder / "train.jsonl"),), shuffle_seed=seed) for seed in (None, 1, 2))
    assert len({files.checksum() for files in (plain, first, second)}) == 3
    assert list(first) == list(first) != list(second) != list(plain)
    assert question_files(mixed(folder, "x", training__seed=5))[0].shuffle_seed == 5


def test_real_explanations(tmp_path: Path) -> None:
    """CMExam's own validation questions: nine of ten are shuffled, and `（C对）` always names a right answer."""
    raw = real_data.find("val.csv")
    if not raw.is_file():
        pytest.skip("CMExam's val.csv is not here")
    from cmexam_tune.preprocess import preprocess

    preprocess("cmexam", [raw], tmp_path)
    pairs = [(one, shuffled(one, 1)) for one in jsonl.read(tmp_path / "val.questions.jsonl", Question)]
    assert sum(old != new for old, new in pairs) > 0.85 * len(pairs)
    for old, new in pairs:
        assert {old.options[x] for x in old.answer or ""} == {new.options[x] for x in new.answer or ""}
        marks = [re.findall(r"（([A-E])([对错])", one.explanation or "") for one in (old, new)]
        assert [(old.options[x], y) for x, y in marks[0] if x in old.options] == [
            (new.options[x], y) for x, y in marks[1] if x in new.options
        ]
        assert json.dumps(sorted(old.options.values())) == json.dumps(sorted(new.options.values()))


def test_reproduce_never_takes_raw_questions_for_clean_ones(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("Question,Options,Answer,Explanation\n", encoding="utf-8")
    with pytest.raises(UserError, match="cmexam-tune check"):
        reproduce.find_questions(
            "cmexam", "train", ["data/checked/train.clean.questions.jsonl"], tmp_path, tmp_path / "out"
        )
