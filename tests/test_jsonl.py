"""Records as lines: what is left out where it says nothing, and that everything comes back."""

from pathlib import Path

import pytest

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Prediction


def test_what_says_nothing_is_left_out_of_a_prediction(tmp_path: Path) -> None:
    plain = Prediction("1", "A", "A")
    full = Prediction("2", "", votes=("A", "B"), finish="error", reason="500: down")
    jsonl.write(tmp_path / "p.jsonl", [plain, full])
    first, second = (tmp_path / "p.jsonl").read_text().splitlines()
    assert first == '{"question_id": "1", "text": "A", "answer": "A", "explanation": null}'
    assert second.endswith('"votes": ["A", "B"], "finish": "error", "reason": "500: down"}')
    assert list(jsonl.read(tmp_path / "p.jsonl", Prediction)) == [plain, full]


def test_another_finish_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"question_id": "1", "text": "A", "finish": "later"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:1.*finish.*not a choice"):
        list(jsonl.read(tmp_path / "p.jsonl", Prediction))
