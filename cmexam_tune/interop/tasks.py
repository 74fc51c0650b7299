"""Our questions as task files of other tools, every answer a set of letters.

- lm-eval (0.4.8 or later of 0.4): a task in YAML whose `utils.py` loads the questions from its own folder and compares
  sets. lm-eval's own comparison takes several targets as any of them.
- OpenCompass: a dataset config. Its custom data sets (`--custom-dataset-path`) know one letter only, so the config
  reads and scores as OpenCompass' own CMB does: all capitals of the output, sorted, equal to the answer.
- inspect_ai: a task in Python that compares sets as lm-eval's does.
- EvalScope: `general_mcq`, which asks in its own words and wants single and multiple choice in two files. The questions
  of each are written beside it for `evaluate`.

Every row has our id. lm-eval, EvalScope and inspect_ai write it beside the output; OpenCompass keeps no field of a row
but the prompt and the answer, so that `evaluate` matches by place there and compares the prompts.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Literal

from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question
from cmexam_tune.prompts import prompt, resolve_style

Tool = Literal["lm-eval", "opencompass", "evalscope", "inspect"]
STYLE = "cmb_answer"
"""Asks for the letters alone; a prompt that asks for more leaves more to each tool's reading."""
_SHOWN, _LAST = 5, "J"

_LM_EVAL_YAML = """\
# {n} questions written by `cmexam-tune export --task lm-eval`; prompt style: {style}.
# lm_eval --include_path THIS_FOLDER --tasks {name} --log_samples --output_path OUT --model ...
task: {name}
dataset_path: ""
custom_dataset: !function utils.load
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
process_results: !function utils.process_results
generation_kwargs:
  until: []
  max_gen_toks: 512
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""

_LM_EVAL_UTILS = '''\
"""Loads the questions beside this file and compares sets of letters."""

import json
import re
from pathlib import Path

QUESTIONS = Path(__file__).parent / "questions.jsonl"


def load(**_):
    """Return the split `test`, one row for each question."""
    from datasets import Dataset

    with QUESTIONS.open(encoding="utf-8") as lines:
        return {"test": Dataset.from_list([json.loads(line) for line in lines])}


<letters>


def process_results(doc, results):
    """Return 1 where exactly the right letters were given."""
    output = results[0] if isinstance(results[0], str) else results[0][0]
    return {"exact_match": float(letters(output, doc["letters"]) == doc["answer"])}
'''

_LETTERS = '''\
def letters(output, offered):
    """Return the first letters on offer behind the last 答案 or answer (else of the whole output), sorted."""
    text = re.split("答案|answer", output.rpartition("</think>")[2], flags=re.IGNORECASE)[-1]
    one = f"[{offered}]"
    found = re.search(f"(?<![A-Za-z]){one}(?:[ ,，、;；和]*{one})*(?![A-Za-z])", text)
    return "".join(sorted(set(re.findall(one, found[0])))) if found else ""'''

_INSPECT = '''\
"""{n} questions written by `cmexam-tune export --task inspect`; prompt style: {style}.

In this folder: inspect eval {name}.py --log-format json --model ...
"""

import json
import re
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr
from inspect_ai.solver import generate

QUESTIONS = Path(__file__).parent / "questions.jsonl"


{letters}


@scorer(metrics=[accuracy(), stderr()])
def same_letters():
    """Score outputs that give exactly the right letters."""

    async def score(state, target):
        answer = letters(state.output.completion, state.metadata["letters"])
        return Score(value=CORRECT if answer == target.text else INCORRECT, answer=answer)

    return score


@task
def {name}():
    """Return the questions beside this file as a task."""
    with QUESTIONS.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    samples = [
        Sample(id=row["id"], input=row["prompt"], target=row["answer"], metadata={{"letters": row["letters"]}})
        for row in rows
    ]
    return Task(
        dataset=MemoryDataset(samples, name={name!r}),
        solver=generate(),
        scorer=same_letters(),
        config=GenerateConfig(temperature=0.0, max_tokens=512),
    )
'''

_OPENCOMPASS = '''\
"""{n} questions written by `cmexam-tune export --task opencompass`; prompt style: {style}.

opencompass --config-dir THIS_FOLDER --datasets {name} --models ...
"""

from opencompass.datasets import CustomDataset
from opencompass.openicl.icl_evaluator import AccEvaluator
from opencompass.openicl.icl_inferencer import GenInferencer
from opencompass.openicl.icl_prompt_template import PromptTemplate
from opencompass.openicl.icl_retriever import ZeroRetriever
from opencompass.utils.text_postprocessors import multiple_select_postprocess

{name}_datasets = [
    dict(
        abbr={name!r},
        type=CustomDataset,
        path={data!r},  # change it where the folder moves
        reader_cfg=dict(input_columns=["prompt"], output_column="answer"),
        infer_cfg=dict(
            prompt_template=dict(
                type=PromptTemplate,
                template=dict(round=[dict(role="HUMAN", prompt="{{prompt}}")]),
            ),
            retriever=dict(type=ZeroRetriever),
            inferencer=dict(type=GenInferencer),
        ),
        eval_cfg=dict(
            evaluator=dict(type=AccEvaluator),
            pred_role="BOT",
            pred_postprocessor=dict(type=multiple_select_postprocess),
        ),
    )
]
'''

_EVALSCOPE = '''\
"""{n} questions written by `cmexam-tune export --task evalscope`. Set MODEL, then: python THIS_FILE"""

from pathlib import Path

from evalscope import TaskConfig, run_task

MODEL = "Qwen/Qwen2.5-7B-Instruct"
for subset, several in {subsets!r}:
    arguments = {{
        "local_path": str(Path(__file__).resolve().parent),
        "subset_list": [subset],
        "extra_params": {{"multiple_correct": several}},
    }}
    run_task(TaskConfig(model=MODEL, datasets=["general_mcq"], dataset_args={{"general_mcq": arguments}}))
'''


def export(
    task: Tool, questions: str | Path, out: str | Path, program: str, *, style: str = STYLE, overwrite: bool = False
) -> Path:
    """Write the task files of one tool to the folder `out` and return it.

    Args:
        task: one of `TASKS`.
        questions: the questions file, in the order in which the tool will number its outputs; its name, with `_` for
            characters that the tools do not take, is the task's.
        out: folder to write.
        program: who writes it, see `files.check_folder`.
        style: a prompt style or a prompt file; EvalScope asks in its own words.
        overwrite: replace an earlier export at `out`.

    Raises:
        UserError: an output that exists, an unknown style, a question without a published answer, or letters that the
            tool cannot number.
    """
    target = files.check_folder(out, program, overwrite, keep=[questions])
    exam = list(jsonl.read(questions, Question))
    if missing := [question.id for question in exam if question.answer is None]:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        raise DataError(
            f"{questions}: {len(missing)} questions have no answer, and these tools score: {shown}. Leave them out."
        )
    name = re.sub(r"\W", "_", Path(questions).name.removesuffix(".jsonl").removesuffix(".questions"), flags=re.ASCII)
    with files.new_folder(target, program, overwrite) as staged:
        TASKS[task](exam, staged, target, name if name[:1].isalpha() else f"task_{name}", style)
    return target


def _lm_eval(questions: Sequence[Question], folder: Path, home: Path, name: str, style: str) -> None:
    jsonl.write(folder / "questions.jsonl", _rows(questions, style))
    (folder / "utils.py").write_text(_LM_EVAL_UTILS.replace("<letters>", _LETTERS), encoding="utf-8")
    _text(folder / f"{name}.yaml", _LM_EVAL_YAML, n=len(questions), name=name, style=Path(style).stem)


def _inspect(questions: Sequence[Question], folder: Path, home: Path, name: str, style: str) -> None:
    jsonl.write(folder / "questions.jsonl", _rows(questions, style))
    values = {"n": len(questions), "name": name, "style": Path(style).stem, "letters": _LETTERS}
    _text(folder / f"{name}.py", _INSPECT, **values)


def _opencompass(questions: Sequence[Question], folder: Path, home: Path, name: str, style: str) -> None:
    jsonl.write(folder / "questions.jsonl", _rows(questions, style))
    (folder / "datasets").mkdir()
    data = str(home.absolute() / "questions.jsonl")
    config = folder / "datasets" / f"{name}.py"
    _text(config, _OPENCOMPASS, n=len(questions), name=name, style=Path(style).stem, data=data)


def _rows(questions: Sequence[Question], style: str) -> list[dict[str, object]]:
    """Return a row for each question, all with the same keys: the libraries take those of the first."""
    words = resolve_style(style)
    offered = sorted({letter for question in questions for letter in question.options})
    return [
        {
            "id": question.id,
            "prompt": prompt(question, words),
            "question": question.stem,
            **{letter: question.options.get(letter) for letter in offered},
            "letters": "".join(question.options),
            "answer": question.answer,
        }
        for question in questions
    ]


def _evalscope(questions: Sequence[Question], folder: Path, home: Path, name: str, style: str) -> None:
    subsets = []
    for suffix, multiple in (("single", False), ("multiple", True)):
        chosen = [question for question in questions if _is_multiple(question) == multiple]
        if chosen:
            subset = f"{name}_{suffix}"
            jsonl.write(folder / f"{subset}_val.jsonl", [_mcq(question, multiple) for question in chosen])
            jsonl.write(folder / f"{subset}.questions.jsonl", chosen)
            subsets.append((subset, multiple))
    _text(folder / "run.py", _EVALSCOPE, n=len(questions), subsets=subsets)


def _is_multiple(question: Question) -> bool:
    """Return whether EvalScope has to ask for a set: the paper prints multiple choice, or there are several answers."""
    return question.kind == "multiple" or len(question.answer or "") > 1


def _mcq(question: Question, multiple: bool) -> dict[str, object]:
    """Return a row of general_mcq, which numbers options from A without gaps: a missing letter gets no text."""
    last = max(question.options)
    if last > _LAST:
        raise DataError(f"question {question.id!r}: EvalScope knows options to {_LAST}, there is {last}. Leave it out.")
    answer = question.answer or ""
    return {
        "id": question.id,
        "question": question.stem,
        **{letter: question.options.get(letter, "") for letter in ascii_uppercase[: ascii_uppercase.index(last) + 1]},
        "answer": list(answer) if multiple else answer,
    }


def _text(path: Path, words: str, **values: object) -> None:
    path.write_text(words.format(**values), encoding="utf-8")


TASKS: dict[Tool, Callable[[Sequence[Question], Path, Path, str, str], None]] = {
    "lm-eval": _lm_eval,
    "opencompass": _opencompass,
    "evalscope": _evalscope,
    "inspect": _inspect,
}
"""Tool -> what writes its files."""
