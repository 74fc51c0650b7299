"""Sealed results: what anybody can recompute without the questions' texts, and what changing a folder does to that."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cmexam_tune import evaluate, export, leaderboard
from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import OrderedOutput, Prediction, Question
from cmexam_tune.evaluation import scorers
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.interop.sealing import sealed_folder, shared_records, verifying
from tests import kit

METADATA = {
    "config": {
        "model": {"model_name_or_path": "/somewhere/secret/tiny-llama", "family": "llama"},
        "prompt": {"style": "answer_explanation"},
        "generation": {"do_sample": False, "temperature": 0.0},
    },
    "mode": "generate",
    "versions": {"transformers": "5.0.0"},
}


def exam(count: int = 24) -> list[Question]:
    return [
        dataclasses.replace(question, facets={"Disease Group": ("I", "II")[i % 2], "Difficulty level": str(1 + i % 5)})
        for i, question in enumerate(kit.questions(count))
    ]


def outputs(questions: Sequence[Question], wrong: int = 3) -> Iterator[Prediction]:
    """Letters, option texts without letters, explanations, and every so often a wrong or an empty output."""
    for i, question in enumerate(questions):
        answer = question.answer or "A"
        if i % wrong == 0:
            answer = "B" if answer != "B" else "D"
        text = ("", f"{answer}\n解析: 因为{i}如此。", f"答案是{question.options[answer[0]]}")[
            1 + (i % 7 == 6) if i % 11 else 0
        ]
        orders = (OrderedOutput(text, None), OrderedOutput(answer, "rotate:1")) if i % 11 else ()
        yield Prediction(question.id, text, orders=orders)


def write(folder: Path, questions: Sequence[Question], wrong: int = 3) -> tuple[Path, Path]:
    asked, written = folder / "test.questions.jsonl", folder / f"tiny{wrong}.jsonl"
    jsonl.write(asked, questions, overwrite=True)
    jsonl.write(written, outputs(questions, wrong))
    files.write_json(f"{written}.meta.json", METADATA)
    return asked, written


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A questions file and a sealed folder."""
    folder = tmp_path_factory.mktemp("sealed")
    asked, written = write(folder, exam())
    argv = ["--results", str(written), "--questions", str(asked), "--out", str(folder / "tiny")]
    assert not export.main([*argv, "--name", "Tiny", "--benchmark", "owner/exam"])
    return asked, folder / "tiny"


def test_a_sealed_folder_reproduces_with_and_without_the_texts(
    given: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    asked, folder = given
    assert not evaluate.main(["--verify", str(folder), "--questions", str(asked)])
    said = capsys.readouterr().out
    assert "reproduces (24 questions" in said and "note" not in said
    assert not evaluate.main(["--verify", str(folder)])
    assert "were taken over" in capsys.readouterr().out


def test_scores_are_those_of_evaluate(given: tuple[Path, Path]) -> None:
    asked, folder = given
    report = evaluate.evaluate(folder.parent / "tiny3.jsonl", asked, profile="all")
    sealed = json.loads((folder / "scores.json").read_text("utf-8"))
    assert sealed["profiles"].keys() == set(scorers.names())
    for profile, scores in report.profiles.items():
        assert sealed["profiles"][profile].pop("accuracy_ci") == pytest.approx(scores["accuracy_ci"])
        scores = {key: value for key, value in scores.items() if key != "accuracy_ci"}
        assert sealed["profiles"][profile] == pytest.approx(scores), profile
    assert sealed["option_orders"]["orders"] == 2
    assert json.loads((folder / "readings.json").read_text("utf-8")), "an output that repeats the option's text"


def test_no_text_of_a_question_and_no_folder_is_passed_on(given: tuple[Path, Path]) -> None:
    asked, folder = given
    texts = [text for question in jsonl.read(asked, Question) for text in (question.stem, question.explanation or "")]
    passed_on = {path.name: path.read_text("utf-8") for path in folder.rglob("*") if path.is_file()}
    assert {"questions.jsonl", inside(folder, RUN).name, inside(folder, INSTANCES).name} < passed_on.keys()
    assert not [name for name, content in passed_on.items() for text in texts if text in content]
    assert not [name for name, content in passed_on.items() if "/somewhere" in content]


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
DETAILS = {"type": "object", "additionalProperties": TEXT}


HEX = "[0-9a-f]"
PLACE = rf"^data/[^/]+/[^/]+/[^/]+/{HEX}{{8}}-{HEX}{{4}}-4{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}_samples\.jsonl$"


RUN, INSTANCES = "data/*/*/*/*.json", "data/*/*/*/*_samples.jsonl"
"""Every Eval Ever's records, by a pattern: their names hold a checksum."""


def inside(folder: Path, name: str) -> Path:
    (path,) = folder.glob(name)
    return path


def record(required: dict[str, Any], optional: dict[str, Any] | None = None, more: bool = True) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": more}


# What Every Eval Ever's schemas 0.3.0 demand of the keys that we write; `test_clients.py` runs its own validator.
RUN_SCHEMA = record(
    {
        "schema_version": {"const": "0.3.0"},
        "evaluation_id": TEXT,
        "retrieved_timestamp": {"type": "string", "pattern": "^[0-9]+$"},
        "source_metadata": record(
            {
                "source_type": {"enum": ["documentation", "evaluation_run"]},
                "source_organization_name": TEXT,
                "evaluator_relationship": {"enum": ["first_party", "third_party", "collaborative", "other"]},
            },
            {"source_name": TEXT},
        ),
        "model_info": record(
            {
                "name": TEXT,
                "id": TEXT,
                "additional_details": {
                    **DETAILS,
                    "required": ["deployment_type", "model_availability"],
                    "properties": {
                        "deployment_type": {"enum": ["self_deployed", "externally_managed", "unknown"]},
                        "model_availability": {"enum": ["open_weights", "closed_weights", "unknown"]},
                    },
                },
            },
            {"inference_engine": record({}, {"name": TEXT, "version": TEXT})},
        ),
        "eval_library": record({"name": TEXT, "version": TEXT}, {"additional_details": DETAILS}),
        "evaluation_results": {
            "type": "array",
            "minItems": 1,
            "items": record(
                {
                    "evaluation_name": TEXT,
                    "source_data": record(
                        {"dataset_name": TEXT, "source_type": {"const": "other"}}, {"additional_details": DETAILS}
                    ),
                    "metric_config": record(
                        {"lower_is_better": FLAG, "min_score": NUMBER, "max_score": NUMBER},
                        {"metric_id": TEXT, "metric_unit": TEXT, "score_type": {"const": "continuous"}},
                    ),
                    "score_details": record(
                        {"score": NUMBER},
                        {
                            "uncertainty": record(
                                {},
                                {
                                    "confidence_interval": record({"lower": NUMBER, "upper": NUMBER}),
                                    "num_samples": {"type": "integer"},
                                },
                            )
                        },
                    ),
                },
                {"evaluation_result_id": TEXT, "generation_config": record({}, {"additional_details": DETAILS})},
            ),
        },
    },
    {
        "detailed_evaluation_results": record(
            {"format": {"const": "jsonl"}, "file_path": {"type": "string", "pattern": PLACE}},
            {
                "hash_algorithm": {"enum": ["sha256", "md5"]},
                "total_rows": {"type": "integer"},
            },
        )
    },
    more=False,
)
INSTANCE_SCHEMA = record(
    {
        "schema_version": {"const": "0.3.0"},
        "evaluation_id": TEXT,
        "model_id": TEXT,
        "evaluation_name": TEXT,
        "sample_id": TEXT,
        "interaction_type": {"const": "single_turn"},
        "input": record({"raw": TEXT, "reference": TEXTS}, {"choices": TEXTS}),
        "output": record({"raw": TEXTS}),
        "messages": {"type": "null"},
        "answer_attribution": {
            "type": "array",
            "items": record(
                {
                    "turn_idx": {"type": "integer", "minimum": 0},
                    "source": TEXT,
                    "extracted_value": TEXT,
                    "extraction_method": TEXT,
                    "is_terminal": FLAG,
                }
            ),
        },
        "evaluation": record({"score": NUMBER, "is_correct": FLAG}),
    },
    {"evaluation_result_id": TEXT, "sample_hash": TEXT, "metadata": DETAILS},
    more=False,
)


def test_records_are_every_eval_evers(given: tuple[Path, Path]) -> None:
    _, folder = given
    path = inside(folder, RUN)
    run = json.loads(path.read_text("utf-8"))
    jsonschema.validate(run, RUN_SCHEMA)
    instances = folder / run["detailed_evaluation_results"]["file_path"]
    assert instances.parent == path.parent and instances.name == f"{path.stem}_samples.jsonl"
    lines = [json.loads(line) for line in instances.read_text("utf-8").splitlines()]
    results = {result["evaluation_result_id"]: result for result in run["evaluation_results"]}
    assert len(lines) == run["detailed_evaluation_results"]["total_rows"] == 24
    for line in lines:
        jsonschema.validate(line, INSTANCE_SCHEMA)
        assert line["evaluation_result_id"] in results and line["evaluation_id"] == run["evaluation_id"]
    accuracy = results[lines[0]["evaluation_result_id"]]["score_details"]["score"]
    assert accuracy == pytest.approx(100 * sum(line["evaluation"]["score"] for line in lines) / len(lines))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**run, "model_info": {"name": "Tiny"}}, RUN_SCHEMA)


def test_the_hubs_file_is_what_the_hubs_library_reads(given: tuple[Path, Path]) -> None:
    from huggingface_hub import parse_eval_result_entries

    _, folder = given
    (entry,) = parse_eval_result_entries(yaml.safe_load((folder / shared_records.HUB).read_text("utf-8")))
    scores = json.loads((folder / "scores.json").read_text("utf-8"))
    assert entry.dataset_id == "owner/exam"
    assert entry.value == pytest.approx(scores["profiles"]["standard"]["accuracy"], abs=0.005)


def changed_json(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        path = inside(folder, name)
        content = json.loads(path.read_text("utf-8"))
        change(content)
        files.write_json(path, content)

    return tamper


def changed_lines(name: str, change: Callable[[list[Any]], Any]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        path = inside(folder, name)
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        change(lines)
        jsonl.write(path, lines, overwrite=True)

    return tamper


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        text = (folder / name).read_text("utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), "utf-8")

    return tamper


def resealed(tamper: Callable[[Path], None]) -> Callable[[Path], None]:
    """Whoever changes a file can also compute its checksum again."""

    def both(folder: Path) -> None:
        tamper(folder)
        head = jsonl.read_one(folder / "seal.json", sealed_folder.SealHeader, "seal")
        questions = tuple(jsonl.read(folder / "questions.jsonl", sealed_folder.SealedQuestion))
        digest = sealed_folder.digest_of(questions)
        sealed_folder.write_seal(folder, dataclasses.replace(head, questions_sha256=digest))

    return both


def give(answer: str) -> Callable[[list[Any]], None]:
    """Write another output into a line that was wrong: 0 is empty, 3 has a wrong letter."""
    return lambda lines: lines[3].update(text=answer)


def drop_last(lines: list[Any]) -> None:
    lines.pop()


def swap(lines: list[Any]) -> None:
    lines[1]["text"], lines[3]["text"] = lines[3]["text"], lines[1]["text"]


RIGHT = exam()[3].answer or ""
SCORE = changed_json("scores.json", lambda scores: scores["profiles"]["standard"].update(accuracy=99.0))
KEY = changed_lines("questions.jsonl", lambda lines: lines[3].update(answer="B" if lines[3]["answer"] != "B" else "D"))
READING = changed_json(
    "readings.json",
    lambda readings: readings.setdefault("standard", {}).update(
        {"q:3": [RIGHT, 1.0, True, [[RIGHT, 1.0], [RIGHT, 1.0]]]}
    ),
)


def linked(folder: Path) -> None:
    kept = folder.parent / "elsewhere.jsonl"
    (folder / "predictions.jsonl").rename(kept)
    (folder / "predictions.jsonl").symlink_to(kept)


TAMPERED = {
    "an output": changed_lines("predictions.jsonl", give(RIGHT)),
    "two outputs swapped": changed_lines("predictions.jsonl", swap),
    "an output deleted": changed_lines("predictions.jsonl", drop_last),
    "a link for a file": linked,
    "one byte more": lambda folder: (folder / "predictions.jsonl").open("a").write("\n"),
    "a score": SCORE,
    "an interval": changed_json("scores.json", lambda s: s["profiles"]["cmb"].update(accuracy_ci=[90.0, 95.0])),
    "the model's name": changed_json("config.json", lambda c: c["config"]["model"].update(model_name_or_path="GPT-9")),
    "the prompt's style": changed_json("config.json", lambda c: c["config"]["prompt"].update(style="answer")),
    "a key": KEY,
    "a question's checksum": changed_lines("questions.jsonl", lambda lines: lines[0].update(sha256="0" * 64)),
    "a facet": changed_lines("questions.jsonl", lambda lines: lines[0]["facets"].update({"Disease Group": "II"})),
    "a reading": READING,
    "the system's name": replaced("seal.json", '"Tiny"', '"Huge"'),
    "the date": changed_json("seal.json", lambda seal: seal.update(date="2020-01-01")),
    "the code's checksum": changed_json("seal.json", lambda seal: seal["code"].update(sha256="1" * 64)),
    "a file's checksum": changed_json("seal.json", lambda seal: seal["files"].update({"scores.json": "2" * 64})),
    "a file deleted": lambda folder: (folder / "readings.json").unlink(),
    "a file added": lambda folder: (folder / "notes.txt").write_text("trust me"),
    "broken JSON": lambda folder: (folder / "scores.json").write_text("{"),
    "the public records": changed_json(
        RUN, lambda run: run["evaluation_results"][0]["score_details"].update(score=99.0)
    ),
    "the hub's file": replaced(shared_records.HUB, "value: ", "value: 9"),
    "an output, resealed": resealed(changed_lines("predictions.jsonl", give(RIGHT))),
    "a score, resealed": resealed(SCORE),
    "a key, resealed": resealed(KEY),
    "a facet's score, resealed": resealed(
        changed_json("scores.json", lambda s: s["by_facet"]["Disease Group"]["I"].update(accuracy=88.0))
    ),
    "an output deleted, resealed": resealed(changed_lines("predictions.jsonl", drop_last)),
    "a reading, resealed": resealed(READING),
    "the public records, resealed": resealed(
        changed_lines(INSTANCES, lambda lines: lines[3]["evaluation"].update(score=1.0))
    ),
    "the hub's file, resealed": resealed(replaced(shared_records.HUB, "value: ", "value: 9")),
    "the option orders, resealed": resealed(
        changed_json("scores.json", lambda scores: scores["option_orders"].update(changed=0.0))
    ),
}


OFTEN = {"an output", "a file added", "a key, resealed", "a reading, resealed", "the public records, resealed"}
"""One of each way in which changes are found; the others are slow together."""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in OFTEN else pytest.mark.slow) for k in TAMPERED])
def test_every_change_is_found(
    kind: str, given: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = given
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    TAMPERED[kind](copy)
    assert evaluate.main(["--verify", str(copy)]) == 1
    assert "does not reproduce: " in capsys.readouterr().out
    with pytest.raises(UserError, match="does not reproduce"):
        leaderboard.leaderboard([copy], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_forgery_that_agrees_with_itself_is_found_by_the_questions(given: tuple[Path, Path], tmp_path: Path) -> None:
    """Keys changed, and everything computed anew: only the questions themselves tell."""
    asked, folder = given
    forged = [
        dataclasses.replace(item, answer="A")
        for item in jsonl.read(folder / "questions.jsonl", sealed_folder.SealedQuestion)
    ]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    jsonl.write(copy / "questions.jsonl", forged, overwrite=True)
    head = jsonl.read_one(copy / "seal.json", sealed_folder.SealHeader, "seal")
    predictions = list(jsonl.read(copy / "predictions.jsonl", Prediction))
    metadata = PredictionMetadata(json.loads((copy / "config.json").read_text("utf-8")))
    readings: dict[str, Any] = {}
    for name, content in sealed_folder.derive(head, forged, predictions, metadata, readings=readings).documents.items():
        sealed_folder.write(copy / name, content)
    resealed(lambda folder: None)(copy)
    assert not verifying.verify(copy).problems
    assert any("are not those of --questions" in problem for problem in verifying.verify(copy, asked).problems)


def test_the_first_questions_are_sealed_where_only_they_were_asked(given: tuple[Path, Path], tmp_path: Path) -> None:
    asked, folder = given
    written = tmp_path / "first.jsonl"
    jsonl.write(written, list(jsonl.read(folder / "predictions.jsonl", Prediction))[:10])
    argv = ["export", "--results", str(written), "--questions", str(asked), "--out", str(tmp_path / "sealed")]
    with pytest.raises(UserError, match="--limit N"):
        export.main(argv[1:])
    assert not export.main([*argv[1:], "--limit", "10"])
    verified = verifying.verify(tmp_path / "sealed", asked)
    assert not verified.problems and verified.with_texts and len(verified.questions) == 10
    assert verified.head and verified.head.of == 24
    others = tmp_path / "others.jsonl"
    jsonl.write(others, exam()[5:])
    assert verifying.verify(tmp_path / "sealed", others).problems


def test_what_cannot_be_sealed_or_verified_is_said(given: tuple[Path, Path], tmp_path: Path) -> None:
    asked, folder = given
    with pytest.raises(UserError, match="no sealed folder"):
        verifying.verify(tmp_path)
    with pytest.raises(UserError, match=r"exists\. Add --overwrite"):
        sealed_folder.seal(folder.parent / "tiny3.jsonl", asked, folder, "export", "2026-01-01")
    with pytest.raises(UserError, match="OWNER/NAME"):
        sealed_folder.seal(
            folder.parent / "tiny3.jsonl", asked, tmp_path / "out", "export", "2026-01-01", benchmark="x"
        )
    with pytest.raises(SystemExit):
        evaluate.main(["--verify", str(folder), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        evaluate.main(["--questions", str(asked), "--out", str(tmp_path / "out")])
