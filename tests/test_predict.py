"""predict: resumed without losing or doubling a question, refuses foreign outputs, touches nothing when it fails."""

import contextlib
import heapq
import itertools
import json
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docs_commands
import forked_programs
import pytest
from kit import checkpoint, make_config, question, questions

from cmexam_tune import predict, prompts, reproduce
from cmexam_tune.__main__ import main
from cmexam_tune.config import dump_config
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.inference import provenance, shards, sharing
from cmexam_tune.inference.answering import Repetition, joined, majority
from cmexam_tune.inference.records import ResumableFile, meta_path
from cmexam_tune.models.generation.decoder import Decoder
from cmexam_tune.prompts import order


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.questions.jsonl"
    jsonl.write(path, questions(30))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "zeroshot.yaml"
    config = make_config(prompt__max_target_length=6, generation={"batch_size": 4, "mode": "likelihood"})
    path.write_text(dump_config(config), encoding="utf-8")
    return path


def run(*arguments: object) -> int | None:
    return main(["predict", *map(str, arguments)])


def read(path: Path) -> list[Prediction]:
    return list(jsonl.read(path, Prediction))


def test_every_question_once_with_what_it_came_from(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "p.jsonl"
    run("--config", recipe, "generation.mode=constrained", "--questions", asked, "--out", out)
    assert sorted(p.question_id for p in read(out)) == sorted(q.id for q in jsonl.read(asked, Question))
    meta = json.loads(meta_path(out).read_text(encoding="utf-8"))
    assert meta["mode"] == meta["config"]["generation"]["mode"] == "constrained"
    assert len(meta["questions_sha256"]) == 64 and "torch" in meta["versions"]
    assert meta["result"]["decoding"].keys() == {"dtype", "attention", "lora_merged", "stop"}


@pytest.mark.parametrize("tail", [b"", b'{"question_id": "q:9", "te', b"\xe7\xad"])
def test_goes_on_where_it_stopped(asked: Path, recipe: Path, tmp_path: Path, tail: bytes) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run("--config", recipe, "--questions", asked, "--out", whole)
    run("--config", recipe, "--questions", asked, "--out", part, "--limit", 11)
    before = part.read_bytes()
    assert before.count(b"\n") == 11
    part.write_bytes(before + tail)
    # Another batch size is the same experiment.
    run("--config", recipe, "generation.batch_size=7", "--questions", asked, "--out", part)
    assert part.read_bytes() == whole.read_bytes()
    assert [p.question_id for p in read(part)] == [q.id for q in jsonl.read(asked, Question)]
    run("--config", recipe, "--questions", asked, "--out", part)
    assert part.read_bytes() == whole.read_bytes()


def test_killed_at_any_moment_no_question_is_lost_or_doubled(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out, fresh = tmp_path / "p.jsonl", tmp_path / "fresh.jsonl"
    words = ["--config", str(recipe), "generation.mode=generate", "generation.batch_size=1", "--questions", str(asked)]
    for lines in (1, 9):
        process = forked_programs.Program("predict", [*words, "--out", str(out)])
        while process.running and not (out.exists() and out.read_bytes().count(b"\n") >= lines):
            time.sleep(0.001)
        process.kill()
        assert lines <= out.read_bytes().count(b"\n") <= 30
    run(*words, "--out", out)
    run(*words, "--out", fresh)
    assert out.read_bytes() == fresh.read_bytes() and len(read(fresh)) == 30


def refused(words: str, *arguments: object) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        run(*arguments)


def in_shards(words: list[str], out: Path, count: int) -> list[list[str]]:
    return [[*words, "--out", str(out), "--shard", f"{number}/{count}"] for number in range(1, count + 1)]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_shards_that_are_killed_join_to_what_one_process_writes(
    kills: int, asked: Path, recipe: Path, tmp_path: Path
) -> None:
    out, fresh = tmp_path / "p.jsonl", tmp_path / "fresh.jsonl"
    words = ["--config", str(recipe), "generation.mode=generate", "generation.batch_size=1", "--questions", str(asked)]
    shards, rng = in_shards(words, out, 4), random.Random(kills)
    refused("predict --shard 1/4", *words, "--out", out, "--join")
    written = [Path(f"{out}.shard{number}of4") for number in range(1, 5)]
    for kill in range(kills):
        number = kill % 4
        process = forked_programs.Program("predict", shards[number])
        lines = 1 if kills == 1 else rng.randrange(9)
        moment = time.monotonic() + rng.uniform(0, 0.02)
        while process.running and not (written[number].exists() and written[number].read_bytes().count(b"\n") >= lines):
            time.sleep(0.001)
        while kills > 1 and time.monotonic() < moment:
            time.sleep(0.001)
        process.kill()
    for shard in shards[1:]:
        run(*shard)
    refused("--shard 1/4 again", *words, "--out", out, "--join")
    assert not out.exists()
    run(*shards[0])
    refused("other prompt.style", *words, "prompt.style=cmb_answer", "--out", out, "--join")
    run(*words, "--out", out, "--join")
    run(*words, "--out", fresh)
    assert out.read_bytes() == fresh.read_bytes() and len(read(fresh)) == 30
    joined, one = (json.loads(meta_path(path).read_text(encoding="utf-8")) for path in (out, fresh))
    times = ("seconds", "answered")  # of runs that were killed nobody counts them
    for note in (joined, one):
        note["result"] = {key: value for key, value in note["result"].items() if key not in times}
    assert joined == one
    assert not any(path.exists() or meta_path(path).exists() for path in written)
    run(*words, "--out", out, "--join")


def test_every_question_has_one_shard_and_every_file_its_own(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    words = ["--config", str(recipe), "--questions", str(asked)]
    for shard in in_shards(words, out, 2)[1:] + in_shards(words, out, 3)[:1]:
        run(*shard)
    refused("shards of 2 and 3", *words, "--out", out, "--join")
    Path(f"{out}.shard1of3").unlink()
    refused("p.jsonl.shard1of2: is missing", *words, "--out", out, "--join")
    keys = [f"val:{number}" for number in range(1000)]
    held = [[key for key in keys if shard.holds(key)] for shard in (shards.Shard(n, 7) for n in range(1, 8))]
    assert sorted(itertools.chain(*held)) == sorted(keys) and min(map(len, held)) > 100
    for wrong in ("0/4", "5/4", "1", "1/0", "a/b", "1/99999999"):
        refused(f"--shard {wrong}", *words, "--out", out, "--shard", wrong)
    refused("leave out --shard", *words, "--out", out, "--shard", "1/2", "--join")


WRONG: list[tuple[str, Callable[[Path], list[str]], str]] = [
    ("no questions", lambda d: ["--questions", str(d / "none.jsonl")], "no such"),
    ("empty questions", lambda d: ["--questions", str(d / "empty.jsonl")], "empty"),
    ("broken questions", lambda d: ["--questions", str(d / "broken.jsonl")], "broken.jsonl:2"),
    ("other mode", lambda d: ["generation.mode=constrained"], "generation.mode"),
    ("other style", lambda d: ["prompt.style=cmb_answer"], "prompt.style"),
    ("other questions", lambda d: ["--questions", str(d / "other.jsonl")], "questions_sha256"),
    ("no such model", lambda d: ["model.model_name_or_path=/none", "--overwrite"], "no such folder"),
    ("style without letters", lambda d: ["prompt.style=open", "--overwrite"], "letters"),
    ("run that is none", lambda d: ["--run", str(d)], "either --run"),
    ("unknown key", lambda d: ["generation.moode=generate"], "did you mean 'mode'"),
    ("limit", lambda d: ["--limit", "0"], "at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_mistakes_cost_nothing(
    asked: Path, recipe: Path, tmp_path: Path, arguments: Callable[[Path], list[str]], message: str
) -> None:
    out = tmp_path / "p.jsonl"
    run("--config", recipe, "--questions", asked, "--out", out, "--limit", 3)
    before = out.read_bytes(), meta_path(out).read_bytes()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text(jsonl.dumps(questions(1)[0]) + "\n{broken\n", encoding="utf-8")
    jsonl.write(tmp_path / "other.jsonl", questions(4))
    with pytest.raises(UserError, match=message):
        run("--config", recipe, "--questions", asked, "--out", out, *arguments(tmp_path))
    assert (out.read_bytes(), meta_path(out).read_bytes()) == before


@pytest.mark.parametrize("kind", ["text", "questions", "link", "pipe", "folder", "below a file"])
def test_what_predict_did_not_write_is_not_touched(asked: Path, recipe: Path, tmp_path: Path, kind: str) -> None:
    mine, out = tmp_path / "mine.txt", tmp_path / "out"
    mine.write_text("mine\n", encoding="utf-8")
    before = asked.read_bytes()
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "folder":
        out.mkdir()
    elif kind == "link":
        out.symlink_to(mine)
    else:
        out = {"text": mine, "questions": asked, "below a file": mine / "p.jsonl"}[kind]
    for words in ([], ["--overwrite"]):
        with pytest.raises(UserError, match=str(out)):
            run("--config", recipe, "--questions", asked, "--out", out, *words)
    assert mine.read_text(encoding="utf-8") == "mine\n" and asked.read_bytes() == before
    assert out.is_symlink() == (kind == "link") and out.is_fifo() == (kind == "pipe")


def test_overwrite_begins_anew(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    run("--config", recipe, "--questions", asked, "--out", out, "--limit", 5)
    run(
        "--config",
        recipe,
        "generation.mode=constrained",
        "--questions",
        asked,
        "--out",
        out,
        "--overwrite",
        "--limit",
        2,
    )
    assert len(read(out)) == 2 and json.loads(meta_path(out).read_text())["mode"] == "constrained"


def test_two_at_once_get_one_message(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    with ResumableFile(out, {"versions": {}}), pytest.raises(UserError, match="another process is writing it"):
        run("--config", recipe, "--questions", asked, "--out", out)
    run("--config", recipe, "--questions", asked, "--out", out, "--limit", 1)
    assert len(read(out)) == 1 and not list(tmp_path.glob(".*.lock"))


def test_other_weights_at_the_same_path_do_not_finish_the_file(asked: Path, recipe: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    words = ["--config", recipe, f"model.model_name_or_path={model}", "--questions", asked, "--out", tmp_path / "p"]
    run(*words, "--limit", 2)
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-8] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="model_sha256"):
        run(*words)


@pytest.mark.parametrize("size", [10, provenance.SMALL + 1000])
def test_the_fingerprint_sees_every_matrix(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    before = provenance.fingerprint(str(tmp_path))
    with path.open("rb+") as handle:
        handle.seek(size // 3)
        handle.write(b"x" * (size // 500 + 1))
    assert before != provenance.fingerprint(str(tmp_path)) and provenance.fingerprint("none/such") is None


class Killed(BaseException):
    """Stands for a kill at one moment."""


@pytest.mark.parametrize("moment", range(4))
def test_killed_at_a_rename_nothing_vouches_for_old_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    out, old, new = tmp_path / "p.jsonl", {"versions": {}, "what": "old"}, {"versions": {}, "what": "new"}
    with ResumableFile(out, old) as file:
        file.start()
        file.append(Prediction("q", "old"))
        file.finish(["q"])
    renames = itertools.count()
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if next(renames) == moment // 2:
            if moment % 2:
                real(path, target)
            raise Killed
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(Killed), ResumableFile(out, new, overwrite=True) as file:
        file.start()
    monkeypatch.undo()
    if moment == 0:
        assert [p.text for p in read(out)] == ["old"] and json.loads(meta_path(out).read_text())["what"] == "old"
    else:
        with ResumableFile(out, new) as file:
            assert not file.done_ids


def test_a_failed_answer_is_asked_again(tmp_path: Path) -> None:
    out, meta = tmp_path / "p.jsonl", {"versions": {}}
    with ResumableFile(out, meta) as file:
        file.start()
        file.append({"question_id": "a", "text": "timed out", "finish": "error"})
        file.append(Prediction("b", "答案: B"))
        file.finish(["a", "b"])
    assert out.read_bytes().count(b"\n") == 2
    with ResumableFile(out, meta) as file:
        assert file.done_ids == {"b"}
        file.start()
        file.append(Prediction("a", "答案: A"))
        file.finish(["a", "b"])
    assert [p.text for p in read(out)] == ["答案: A", "答案: B"]


@pytest.fixture
def writing(tmp_path: Path) -> list[object]:
    """A command whose model writes freely, by chance, and answers now and then."""
    path = tmp_path / "sampling.yaml"
    generation = {"do_sample": True, "temperature": 1.5, "batch_size": 4, "max_new_tokens": 8}
    path.write_text(dump_config(make_config(generation=generation)), encoding="utf-8")
    return ["--config", path]


def test_votes_are_repeatable_and_go_on_in_the_middle_of_a_question(
    asked: Path, writing: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*writing, "generation.votes=3", "--questions", asked, "--limit", 8]
    whole, part, other = (tmp_path / name for name in ("whole", "part", "other"))
    run(*words, "--out", whole)
    for prediction in read(whole):
        question = next(q for q in jsonl.read(asked, Question) if q.id == prediction.question_id)
        each = [answer_parsing.parse(text, question) for text in prediction.votes]
        counts = Counter(letters for letters in each if letters)
        assert len(each) == 3 and len(set(prediction.votes)) == 3 and prediction.text in prediction.votes
        assert prediction.answer == (counts.most_common(1)[0][0] if counts else None)
    append, seen = ResumableFile.append, itertools.count()

    def killed(file: ResumableFile, record: object) -> None:
        if next(seen) == 10:
            raise Killed
        append(file, record)

    monkeypatch.setattr(ResumableFile, "append", killed)
    with pytest.raises(Killed):
        run(*words, "--out", part)
    monkeypatch.undo()
    assert (tmp_path / "part.votes").read_bytes().count(b"\n") == 10
    run(*words, "generation.batch_size=3", "--out", part)
    assert part.read_bytes() == whole.read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("part.votes")]
    run(*words, "generation.seed=1", "--out", other)
    assert [p.votes for p in read(other)] != [p.votes for p in read(whole)]


VOTES = Repetition("votes", lambda question: [None] * 2, majority)


def test_the_majority_is_cmbs() -> None:
    def of(*letters: str | None, **more: str) -> Prediction:
        outputs = [Prediction(f"q#{i}", f"{i}:{answer}", answer) for i, answer in enumerate(letters)]
        return joined("q", VOTES, [None] * len(outputs), outputs)

    assert of("A", "B", "B").text == "1:B" and of("B", "A", "A", "B").answer == "B"
    assert of(None, "C", None).answer == "C" and of(None, None) == Prediction("q", "0:None", votes=("0:None", "1:None"))
    failed = [Prediction("q#0", "A", "A"), Prediction("q#1", "", finish="error", reason="429")]
    assert joined("q", VOTES, [None] * 2, failed) == Prediction("q", "", finish="error", reason="429")


def test_examples_come_before_every_question(
    asked: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, out = tmp_path / "pool.questions.jsonl", tmp_path / "p.jsonl"
    jsonl.write(pool, [question(i) for i in range(100, 106)] + questions(3))
    shown: list[prompts.Dialogue] = []
    ask = Decoder.ask
    monkeypatch.setattr(
        Decoder, "ask", lambda self, items: shown.extend(item.dialogue() for item in items) or ask(self, items)
    )
    words = ["--config", recipe, "--questions", asked, "--out", out, "prompt.max_source_length=400"]
    run(*words, "prompt.shots=3", f"prompt.shots_from={pool}", "--limit", 5)
    assert len(shown) == 5 and len({dialogue.examples for dialogue in shown}) == 1
    assert all(turn.answer == "答案: C" and "选项A10" in turn.question for turn in shown[0].examples)
    assert len(json.loads(meta_path(out).read_text())["shots_sha256"]) == 1
    jsonl.write(pool, [question(i) for i in range(200, 206)], overwrite=True)
    with pytest.raises(UserError, match="shots_sha256"):
        run(*words, "prompt.shots=3", f"prompt.shots_from={pool}", "--limit", 6)
    with pytest.raises(UserError, match=r"prompt\.shots_from=FILE"):
        run(*words, "prompt.shots=3", "--overwrite")
    long = ["generation.mode=generate", "generation.max_new_tokens=4000"]
    with pytest.raises(UserError, match=r"takes \d+ tokens, this model has \d+ positions"):
        run(*words, "prompt.shots=6", f"prompt.shots_from={pool}", "--overwrite", *long)
    with pytest.raises(UserError, match="6 questions that can be examples"):
        run(*words, "prompt.shots=7", f"prompt.shots_from={pool}", "--overwrite")


def test_answers_in_another_order_are_in_the_exams_letters(asked: Path, recipe: Path, tmp_path: Path) -> None:
    plain, same, turned = (tmp_path / name for name in ("plain", "same", "turned"))
    words = ["--config", recipe, "generation.answer_sets=single", "--questions", asked]
    run(*words, "--out", plain)
    run(*words, "prompt.option_order=rotate:0", "--out", same)
    run(*words, "prompt.option_order=rotate:1", "--out", turned)
    assert plain.read_bytes() == same.read_bytes() != turned.read_bytes()
    for item, prediction in zip(jsonl.read(asked, Question), read(turned), strict=True):
        letter = prediction.text.removeprefix("答案: ")
        seen = order.shown(item, "rotate:1").options[letter]
        assert prediction.answer is not None and seen == item.options[prediction.answer]


def test_a_run_folder_answers_as_its_model_did(asked: Path, tmp_path: Path) -> None:
    from cmexam_tune.train import train
    from cmexam_tune.training.run_directory import run as runs

    config = make_config(
        data={"train": [str(asked)]},
        training={"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "report_to": "none"},
        generation={"mode": "likelihood"},
        out=str(tmp_path / "run"),
    )
    assert Path(checkpoint("llama")).is_dir()
    trained = train(config)
    out = predict.predict(trained.path, asked, tmp_path / "p.jsonl")
    from cmexam_tune.models.families.llama import Llama

    llama = Llama()

    _, loaded = runs.load(trained.path)
    again = list(llama.answer(loaded, list(jsonl.read(asked, Question)), config))
    assert sorted(read(out), key=str) == sorted(again, key=str)


def processes(count: int, *words: object) -> list[forked_programs.Program]:
    return forked_programs.group("predict", [*map(str, words)], count)


def test_processes_share_the_questions_and_go_on_for_others(asked: Path, recipe: Path, tmp_path: Path) -> None:
    words = ["--config", recipe, "generation.mode=generate", "generation.batch_size=3", "--questions", asked]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    run(*words, "--out", alone)
    run(*words, "--out", shared, "--limit", 4)
    lines = alone.read_bytes().splitlines(keepends=True)
    # What three processes left when they were killed, one of them in the middle of a line, one after joining.
    (tmp_path / "shared.part0").write_bytes(lines[9] + lines[20])
    (tmp_path / "shared.part1").write_bytes(lines[3] + lines[25][:-9])
    (tmp_path / "shared.part2").write_bytes(lines[29])
    found = [process.wait() for process in processes(2, *words, "--out", shared)]
    assert [code for code, _, _ in found] == [0, 0], found
    assert shared.read_bytes() == alone.read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("shared.part")]
    (_, said, noted), (_, silent, other) = found
    assert said.split() == [str(shared)] and silent == ""
    assert "7 of 30 are done already" in noted and "30 questions asked" in noted
    assert "answered" not in other
    # Whoever decided it: recipe, style or program.
    decoding = json.loads(meta_path(shared).read_text(encoding="utf-8"))["result"]["decoding"]
    assert decoding["max_new_tokens"] == 6 and {"eos_token_id", "pad_token_id", "use_cache"} <= decoding.keys()


def test_reproduce_trains_and_predicts_by_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        reproduce.subprocess, "run", lambda words, **_: started.append(words) or SimpleNamespace(returncode=0)
    )
    monkeypatch.setattr("cmexam_tune.evaluate.evaluate", lambda *_, **__: None)
    unit: Any = SimpleNamespace(
        folder=tmp_path, entry=SimpleNamespace(exam="cmexam", paper=None), test=tmp_path / "q.jsonl", trained=True,
        predictions=tmp_path / "predictions.jsonl",
        config=make_config(out=str(tmp_path / "run")), ask=["generation.mode=likelihood"], trusted=(),
    )  # fmt: skip
    reproduce.run_unit(unit, "torchrun --nproc_per_node 8 -m")
    launcher = ["torchrun", "--nproc_per_node", "8", "-m"]
    assert [words[:5] for words in started] == [[*launcher, f"cmexam_tune.{name}"] for name in ("train", "predict")]
    got = docs_commands.parsed(["predict", *started[1][5:]])
    assert (got.run, got.questions) == (str(tmp_path / "run"), str(tmp_path / "q.jsonl"))
    assert "--run" not in started[1], "torchrun takes it for its own"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [0, 3, 100, 6811])
def test_draws_are_whole_batches_that_become_small(total: int, count: int) -> None:
    bounds = list(sharing.units_of(total, 16, count))
    assert [number for first, end in bounds for number in range(first, end)] == list(range(total))
    sizes = [end - first for first, end in bounds]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True) and len(sizes) >= min(count, total)
    assert all(size % 16 == 0 for size in sizes[:-1]) or total < 16 * count
    assert not sizes or sizes[-1] <= 16


def test_a_process_with_long_answers_draws_less_often() -> None:
    """Three processes, of which one takes four times as long; dealt beforehand, all would have a third."""
    torch = pytest.importorskip("torch")
    store, took = torch.distributed.HashStore(), (1, 1, 4)
    lengths = list(range(3000))
    units = [lengths[first:end] for first, end in sharing.units_of(len(lengths), 8, 3)]
    queues = [sharing.SharedQueue(units, rank, 3, store) for rank in range(3)]
    drawn: list[list[int]] = [[], [], []]
    events = [(0, rank, iter(queue)) for rank, queue in enumerate(queues)]
    ended = []
    while events:
        now, rank, draws = heapq.heappop(events)
        if unit := next(draws, None):
            drawn[rank] += unit
            heapq.heappush(events, (now + took[rank] * len(unit), rank, draws))
        else:
            ended.append(now)
    assert sorted(itertools.chain.from_iterable(drawn)) == lengths
    assert max(ended) - min(ended) <= 4 * 8 * 2, "a batch or two of the slow one"
    assert len(drawn[2]) < len(drawn[0]) / 3
    assert [queue.count_answer() for queue in (queues[0], queues[2], queues[1])] == [1, 2, 3]


@pytest.mark.slow
def test_twenty_kills_of_many_processes(asked: Path, recipe: Path, tmp_path: Path) -> None:
    """Killed at random moments, from before the model is loaded to while the parts are joined; nothing depends on when.

    What is whole before its kill is compared and begun anew, so that there are always twenty.
    """
    jsonl.write(asked, questions(120), overwrite=True)
    words = ["--config", recipe, "generation.mode=generate", "generation.batch_size=1", "generation.max_new_tokens=8"]
    words += ["--questions", asked]
    out, alone = tmp_path / "killed", tmp_path / "alone"
    run(*words, "--out", alone)
    chance, kills, whole = random.Random(0), 0, 0

    def answered() -> int:
        """Lines in the file and its parts, some of them twice while the parts are joined."""
        count = 0
        for path in tmp_path.glob("killed*"):
            with contextlib.suppress(FileNotFoundError):
                count += path.read_bytes().count(b"\n") if "meta" not in path.name else 0
        return count

    while kills < 20:
        group = processes(chance.choice((2, 3)), *words, "--out", out)
        # By the clock, or by what was answered since; whatever comes first of it and of the end.
        until, lines = time.monotonic() + chance.choice((chance.uniform(0, 4), 60)), answered() + chance.randint(1, 30)
        while any(p.running for p in group) and time.monotonic() < until and answered() < lines:
            time.sleep(0.001)
        if any(process.running for process in group):
            kills += 1
            for process in chance.sample(group, len(group)):
                process.kill()
            continue
        for process in group:
            code, _, noted = process.wait()
            assert code == 0, noted
        whole += 1
        assert out.read_bytes() == alone.read_bytes()
        for path in tmp_path.glob("killed*"):
            path.unlink()
    for process in processes(2, *words, "--out", out):
        code, _, noted = process.wait()
        assert code == 0, noted
    assert out.read_bytes() == alone.read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("killed.part")]
    print(f"20 kills, {whole} times whole before one")


def test_outputs_cut_while_thinking_are_counted_apart() -> None:
    from cmexam_tune.inference import answering, records

    texts = [("<think>我想", "length"), ("<think>好</think>答案: A 因", "length"), ("<think>好</think>A", None)]
    lines = [json.dumps({"question_id": "x", "text": text, "finish": finish}).encode() for text, finish in texts]
    counts = records.count_ends([records.parse_record(line, "") for line in lines])
    assert (counts["records"], counts["cut"], counts["cut_thinking"]) == (3, 2, 1)
    assert "1 of them while thinking (generation.thinking_tokens)" in answering.summary(counts)


def test_what_was_asked_and_what_can_be_read_are_told_apart() -> None:
    from cmexam_tune.inference import answering, records

    answers = [*["A"] * 21, *[None] * 6]
    lines = [json.dumps({"question_id": "x", "text": "t", "answer": answer}).encode() for answer in answers]
    counts = records.count_ends([records.parse_record(line, "") for line in lines])
    said = answering.summary({**counts, "answered": 27, "seconds": 44.0})
    assert said.startswith("27 questions asked in 44 s") and said.endswith("; 21 answers readable")
    assert "readable" not in answering.summary(counts, turns=True)
