"""Questions written as other tools' tasks: read back, and nothing is missing."""

import ast
import asyncio
import importlib.util
import json
import sys
import types

import pytest
import yaml

from cmexam_tune import export
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.interop import tasks

OPTIONS = {"A": "阿司匹林", "B": "青霉素", "C": "头孢", "D": "万古霉素"}
QUESTIONS = [
    Question("7", "首选{药}", {**OPTIONS, "E": "以上都不是"}, "B", kind="single"),
    Question("x:2", '次选"\\n', OPTIONS, "AC"),
    Question("9", "三选", OPTIONS, "D", kind="multiple"),
    Question("10", "四选", {"B": "是", "D": "否"}, "B"),
]


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "my exam-1.questions.jsonl"
    jsonl.write(path, QUESTIONS)
    return path


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def same(row, question):
    assert (row["id"], row["question"]) == (question.id, question.stem)
    assert {key: text for key, text in row.items() if len(key) == 1 and text} == question.options
    assert "".join(row["answer"]) == question.answer


def module(path):
    spec = importlib.util.spec_from_file_location("task_module", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def lm_eval(folder):
    """Return the task as lm-eval's loader reads it: `!function file.name` is a function of a file beside it."""

    class Loader(yaml.SafeLoader):
        pass

    def function(loader, node):
        file, name = loader.construct_scalar(node).split(".")
        return getattr(module(folder / f"{file}.py"), name)

    Loader.add_constructor("!function", function)
    return yaml.load((folder / "my_exam_1.yaml").read_text(encoding="utf-8"), Loader)


def test_lm_eval(asked, tmp_path):
    task = lm_eval(tasks.export("lm-eval", asked, tmp_path / "out", "export"))
    assert (task["task"], task["output_type"], task["test_split"]) == ("my_exam_1", "generate_until", "test")
    assert (task["doc_to_text"], task["doc_to_target"]) == ("{{prompt}}", "{{answer}}")
    docs = list(task["custom_dataset"](**task["metadata"])["test"])
    for row, question in zip(docs, QUESTIONS, strict=True):
        same(row, question)
        assert question.stem in row["prompt"]
        assert all(f"{letter}. {text}" in row["prompt"] for letter, text in question.options.items())
    metric = task["metric_list"][0]["metric"]

    def right(number, output):
        return task["process_results"](docs[number], [output])[metric]

    assert [right(i, question.answer) for i, question in enumerate(QUESTIONS)] == [1, 1, 1, 1]
    for output in (
        "AC",
        "CA",
        "A、C",
        "答案：A, C。解释：B 不对",
        "<think>A? B?</think>\n答案是AC",
        "The answer is A和C",
    ):
        assert right(1, output) == 1, output
    for output in ("A", "C", "ABC", "ACD", "", "CT", "答案：A。解释：C 也可", "<think>AC</think>B"):
        assert right(1, output) == 0, output
    assert right(0, "CT提示B") == 1


def test_inspect(asked, tmp_path, monkeypatch):
    """Beside a stand-in for inspect_ai that keeps what it is given; tests/test_clients.py runs the real one."""

    class Kept:
        def __init__(self, *given, **values):
            self.given, self.values = given, values

    names = {
        "": ("Task",),
        ".dataset": ("MemoryDataset", "Sample"),
        ".model": ("GenerateConfig",),
        ".scorer": ("Score",),
    }
    for part, classes in names.items():
        stand_in = types.ModuleType(f"inspect_ai{part}")
        vars(stand_in).update(dict.fromkeys(classes, Kept))
        monkeypatch.setitem(sys.modules, f"inspect_ai{part}", stand_in)
    vars(sys.modules["inspect_ai"]).update(task=lambda function: function)
    vars(sys.modules["inspect_ai.scorer"]).update(
        CORRECT="C", INCORRECT="I", accuracy=Kept, stderr=Kept, scorer=lambda metrics: lambda function: function
    )
    solver = types.ModuleType("inspect_ai.solver")
    solver.generate = Kept
    monkeypatch.setitem(sys.modules, "inspect_ai.solver", solver)
    folder = tasks.export("inspect", asked, tmp_path / "out", "export")
    task = module(folder / "my_exam_1.py").my_exam_1().values
    (samples,) = task["dataset"].given
    for sample, question in zip(samples, QUESTIONS, strict=True):
        assert (sample.values["id"], sample.values["target"]) == (question.id, question.answer)
        assert question.stem in sample.values["input"]

    def score(number, output):
        state = Kept()
        state.output, state.metadata = types.SimpleNamespace(completion=output), samples[number].values["metadata"]
        return asyncio.run(task["scorer"](state, types.SimpleNamespace(text=QUESTIONS[number].answer))).values["value"]

    assert [score(i, f"答案：{question.answer}。") for i, question in enumerate(QUESTIONS)] == ["C"] * 4
    assert [score(1, output) for output in ("A", "ABC", "", "<think>AC</think>B")] == ["I"] * 4


def test_opencompass(asked, tmp_path):
    folder = tasks.export("opencompass", asked, tmp_path / "out", "export", style="answer")
    source = ast.parse((folder / "datasets" / "my_exam_1.py").read_text(encoding="utf-8"))
    (assigned,) = [node for node in source.body if isinstance(node, ast.Assign)]
    assert assigned.targets[0].id == "my_exam_1_datasets"
    imported = {alias.name for node in source.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    # dict(...) with the classes as their names: what mmengine's lazy configs hold before anything is imported.
    (task,) = eval(ast.unparse(assigned.value), {name: name for name in imported})
    assert task["path"] == str(tmp_path / "out" / "questions.jsonl")
    assert task["type"] == "CustomDataset"
    assert task["eval_cfg"]["pred_postprocessor"]["type"] == "multiple_select_postprocess"
    (turn,) = task["infer_cfg"]["prompt_template"]["template"]["round"]
    assert turn == {"role": "HUMAN", "prompt": "{prompt}"}
    assert task["reader_cfg"] == {"input_columns": ["prompt"], "output_column": "answer"}
    found = rows(folder / "questions.jsonl")
    for row, question in zip(found, QUESTIONS, strict=True):
        same(row, question)
        assert row["prompt"].startswith(f"问题: {question.stem}")
    assert len({tuple(row) for row in found}) == 1


def test_evalscope_and_back(asked, tmp_path):
    folder = tasks.export("evalscope", asked, tmp_path / "out", "export")
    by_id = {question.id: question for question in QUESTIONS}
    ids = {}
    for subset, form in (("my_exam_1_single", str), ("my_exam_1_multiple", list)):
        found = rows(folder / f"{subset}_val.jsonl")
        for row in found:
            same(row, by_id[row["id"]])
            assert isinstance(row["answer"], form)
            offered = [key for key in row if len(key) == 1]
            assert offered == list("ABCDE")[: len(offered)]  # general_mcq stops at the first letter that is missing
        ids[subset] = [row["id"] for row in found]
        # Its predictions carry the place in that file.
        answers = [{"index": i, "model_output": "".join(row["answer"])} for i, row in enumerate(found)]
        jsonl.write(tmp_path / f"{subset}.jsonl", answers)
        report = evaluate(tmp_path / f"{subset}.jsonl", folder / f"{subset}.questions.jsonl")
        assert (report.overall["n"], report.overall["accuracy"]) == (2, 100)
    assert ids == {"my_exam_1_single": ["7", "10"], "my_exam_1_multiple": ["x:2", "9"]}
    source = (folder / "run.py").read_text(encoding="utf-8")
    assert "[('my_exam_1_single', False), ('my_exam_1_multiple', True)]" in source
    ast.parse(source)


@pytest.mark.parametrize(
    ("question", "task", "words"),
    [
        (Question("1", "问", OPTIONS, None), "lm-eval", "q.jsonl: 1 questions have no answer.*: 1. Leave"),
        (
            Question("1", "问", {"A": "甲", "K": "丙"}, "A"),
            "evalscope",
            "'1': EvalScope knows options to J, there is K",
        ),
    ],
)
def test_what_a_tool_cannot_score_is_refused(tmp_path, question, task, words):
    jsonl.write(tmp_path / "q.jsonl", [question])
    with pytest.raises(DataError, match=words):
        tasks.export(task, tmp_path / "q.jsonl", tmp_path / "out", "export")
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]


def test_command(asked, tmp_path, capsys):
    out = str(tmp_path / "out")
    line = ["--task", "lm-eval", "--questions", str(asked), "--out", out]
    export.main(line)
    assert capsys.readouterr().out.strip() == out
    with pytest.raises(UserError, match="exists"):
        export.main(line)
    export.main([*line, "--overwrite"])
    for wrong in (
        ["--task", "lm-eval", "--out", out],
        [*line, "--merge"],
        ["--run", "r", "--style", "x", "--out", out],
    ):
        with pytest.raises(SystemExit) as stop:
            export.main(wrong)
        assert stop.value.code == 2
