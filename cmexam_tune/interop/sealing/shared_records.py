"""The results in two public formats: Every Eval Ever's records, and a results file of the Hugging Face hub.

Facts of the first from the package every-eval-ever 0.3.0 (github.com/evaleval/every_eval_ever), its two schemas and its
validator: a JSON object for the run, with an entry for each metric, and beside it a line for each question, at the
place in `data/` that their collection gives them. An instance holds the question's text in `input.raw`; ours says that
it is withheld, `sample_hash` tells whether two are of the same question. Of the second from
huggingface.co/docs/hub/eval-results: it belongs in `.eval_results/` of a model's repository, and counts where the
dataset is registered as a benchmark there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Any
from uuid import UUID

import yaml

from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata, section
from cmexam_tune.evaluation.scorers import STANDARD
from cmexam_tune.report.identity import Identity

VERSION = "0.3.0"
HUB = "eval_results.yaml"
WITHHELD = "withheld: the question's text is the exam's; sample_hash is the SHA-256 of its record"


@dataclass(frozen=True)
class About:
    """What the records say of the run."""

    name: str
    identity: Identity
    metadata: PredictionMetadata
    questions_sha256: str
    digest: bytes
    """SHA-256 of what sets this sealing apart from all others."""
    code: Mapping[str, str]
    benchmark: str | None

    @property
    def model(self) -> str:
        """The name of the model, or of the system if it is unknown."""
        return self.identity.model or self.name

    @property
    def exam(self) -> str:
        """The questions' name."""
        return self.identity.questions

    @property
    def timestamp(self) -> str:
        """Seconds since 1970 of the day of the sealing."""
        day = date.fromisoformat(self.identity.date)
        return str(int(datetime(day.year, day.month, day.day, tzinfo=timezone.utc).timestamp()))

    @property
    def evaluation_id(self) -> str:
        """Name of the evaluation, model and time."""
        return f"{self.exam}/{self.model.replace('/', '_')}/{self.timestamp}"

    @property
    def place(self) -> str:
        """Where the collection keeps the run: `data/EXAM/DEVELOPER/MODEL/UUID`, the developer as in a name of the hub.

        The UUID is one of version 4 by its form; a random one could not be recomputed.
        """
        developer, _, model = self.model.rpartition("/")
        parts = [
            re.sub(r'[<>:"\\|?*/\x00-\x1f]|[. ]$', "_", part) for part in (self.exam, developer or "unknown", model)
        ]
        return "/".join(["data", *parts, str(UUID(bytes=self.digest[:16], version=4))])


def records(
    about: About, graded: Sequence[Graded], scores: Mapping[str, Scores], hashes: Sequence[str]
) -> dict[str, object]:
    """Return the name of each file -> what it holds.

    Args:
        about: The run.
        graded: All questions by our scorer.
        scores: By every scorer.
        hashes: SHA-256 of each question.
    """
    files: dict[str, object] = {
        f"{about.place}.json": _run(about, scores, len(graded)),
        f"{about.place}_samples.jsonl": [
            _instance(about, item, sha256) for item, sha256 in zip(graded, hashes, strict=True)
        ],
    }
    accuracy = scores[STANDARD]["accuracy"]
    if about.benchmark is not None and accuracy is not None:
        files[HUB] = _hub(about, accuracy)
    return files


def _run(about: About, scores: Mapping[str, Scores], n: int) -> dict[str, object]:
    metrics = [(profile, "accuracy", values) for profile, values in scores.items()]
    metrics += [(STANDARD, "weighted_f1", scores[STANDARD])]
    who = about.identity
    # Whoever serves a model at an address, and whether anybody can have its weights, was not recorded.
    local = "transformers" in section(about.metadata.values, "versions")
    details = {
        "deployment_type": "self_deployed" if local else "unknown",
        "model_availability": "unknown",
        "prompt": who.prompt,
        "mode": who.mode,
        "adapter": who.adapter,
        "method": who.method,
    }
    return {
        "schema_version": VERSION,
        "evaluation_id": about.evaluation_id,
        "retrieved_timestamp": about.timestamp,
        "source_metadata": {
            "source_name": about.name,
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
        },
        "eval_library": {
            "name": "cmexam_tune",
            "version": about.code.get("cmexam_tune", "unknown"),
            "additional_details": {key: value for key, value in about.code.items() if key != "cmexam_tune"},
        },
        "model_info": {
            "name": about.name,
            "id": about.model,
            "inference_engine": _engine(about.metadata),
            "additional_details": {key: value for key, value in details.items() if value is not None},
        },
        "evaluation_results": [
            _result(about, profile, metric, values, n)
            for profile, metric, values in metrics
            if values[metric] is not None
        ],
        "detailed_evaluation_results": {
            "format": "jsonl",
            "file_path": f"{about.place}_samples.jsonl",
            "hash_algorithm": "sha256",
            "total_rows": n,
        },
    }


def _engine(metadata: PredictionMetadata) -> dict[str, str]:
    version = section(metadata.values, "versions").get("transformers")
    return {"name": "transformers", "version": str(version)} if version else {"name": "unknown"}


def _result(about: About, profile: str, metric: str, scores: Scores, n: int) -> dict[str, object]:
    details: dict[str, object] = {"score": scores[metric]}
    if metric == "accuracy" and isinstance(interval := scores["accuracy_ci"], list):
        lower, upper = interval
        details["uncertainty"] = {
            "confidence_interval": {"lower": lower, "upper": upper, "confidence_level": 0.95},
            "num_samples": scores["scored"],
        }
    percent = metric == "accuracy"
    return {
        "evaluation_result_id": f"{about.evaluation_id}/{profile}/{metric}",
        "evaluation_name": f"{about.exam} by {profile}",
        "source_data": {
            "dataset_name": about.exam,
            "source_type": "other",
            "additional_details": {"questions_sha256": about.questions_sha256, "questions": str(n)},
        },
        "metric_config": {
            "metric_id": metric,
            "metric_unit": "percent" if percent else "proportion",
            "lower_is_better": False,
            "score_type": "continuous",
            "min_score": 0,
            "max_score": 100 if percent else 1,
        },
        "score_details": details,
        "generation_config": {"additional_details": _generation(about.metadata)},
    }


def _generation(metadata: PredictionMetadata) -> dict[str, str]:
    """Return the settings of prompt and decoding, every value a text, as the schema wants."""
    config = section(metadata.values, "config")
    return {
        f"{part}.{key}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for part in ("prompt", "generation")
        for key, value in section(config, part).items()
        if value is not None
    }


def _instance(about: About, item: Graded, sha256: str) -> dict[str, object]:
    question, prediction = item.question, item.prediction
    return {
        "schema_version": VERSION,
        "evaluation_id": about.evaluation_id,
        "model_id": about.model,
        "evaluation_name": f"{about.exam} by {STANDARD}",
        "evaluation_result_id": f"{about.evaluation_id}/{STANDARD}/accuracy",
        "sample_id": question.id,
        "sample_hash": sha256,
        "interaction_type": "single_turn",
        "input": {
            "raw": WITHHELD,
            "reference": [] if question.answer is None else [question.answer],
            "choices": list(question.options),
        },
        "output": {"raw": [prediction.text]},
        "messages": None,
        "answer_attribution": [
            {
                "turn_idx": 0,
                "source": "output.raw",
                "extracted_value": item.answer or "",
                "extraction_method": f"cmexam_tune {STANDARD}",
                "is_terminal": True,
            }
        ],
        "evaluation": {"score": item.right, "is_correct": item.correct},
        "metadata": dict(question.facets),
    }


def _hub(about: About, accuracy: Any) -> str:
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    how = [text for text in (about.identity.prompt, about.identity.mode) if text]
    entry = EvalResultEntry(
        dataset_id=str(about.benchmark),
        task_id="default",
        value=round(accuracy, 2),
        date=about.identity.date,
        notes="; ".join(how) or None,
    )
    return yaml.safe_dump(eval_result_entries_to_yaml([entry]), allow_unicode=True, sort_keys=False)
