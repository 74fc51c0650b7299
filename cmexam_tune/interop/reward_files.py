"""Our rewards as files that other frameworks of reinforcement learning load, and questions in their formats.

Each file is short and imports `cmexam_tune.rewards`, which needs no torch. The signatures are those that the frameworks
document:

- TRL: `reward(completions, **columns) -> list[float]`, passed as `reward_funcs`.
- verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, named by `custom_reward_function.path`.
- ms-swift: a class with `__call__(completions, **columns)` in `orms`, loaded by `--external_plugins`.
- verifiers: `load_environment()`, which returns an environment with a rubric.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question
from cmexam_tune.prompts import prompt, resolve_style
from cmexam_tune.rewards import answer_place

Framework = Literal["trl", "verl", "ms-swift", "verifiers"]
STYLE = "cmb_cot"
"""Reasons first and states the answer at the end."""
FILE = "exam_reward.py"

_HEAD = '''\
"""Exam rewards of cmexam_tune for {framework}, written by `cmexam-tune export --rewards {framework}`.

{usage}
"""

import json
from pathlib import Path

from cmexam_tune.config import RewardConfig
from cmexam_tune.core.schema import Question
from cmexam_tune.rewards import Reward

REWARD = Reward(RewardConfig(partial_steps=None), place={place!r})


def score(record, text):
    """Return the reward of a text for a question, which `record` holds as JSON."""
    return REWARD.of(Question(**json.loads(record)), [text])[0]


def text_of(completion):
    """Return the text of a completion: a string, or messages of which the last is the model's."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''
_TRL = '''

def reward(completions, question_record, **_):
    """Return one reward for each completion."""
    return [score(record, text_of(text)) for record, text in zip(question_record, completions)]
'''
_VERL = '''

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the reward of one solution."""
    return score(extra_info["question_record"], solution_str)
'''
_SWIFT = '''

try:
    from swift.rewards import ORM, orms  # 4.x
except ImportError:
    from swift.plugin import ORM, orms  # 3.x


class ExamReward(ORM):
    """`--reward_funcs exam`."""

    def __call__(self, completions, question_record, **_):
        """Return one reward for each completion."""
        return [score(record, text_of(text)) for record, text in zip(question_record, completions)]


orms["exam"] = ExamReward
'''
_VERIFIERS = '''

def exam_reward(completion, info, **_):
    """Return the reward of one completion."""
    return score(info["question_record"], text_of(completion))


def load_environment(**options):
    """Return the exam as an environment of single turns."""
    import verifiers
    from datasets import Dataset

    rows = [json.loads(line) for line in (Path(__file__).parent / "questions.jsonl").open(encoding="utf-8")]
    rubric = verifiers.Rubric(funcs=[exam_reward], weights=[1.0])
    return verifiers.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric, **options)
'''


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What a framework reads."""

    usage: str
    code: str
    row: Callable[[Question, str, str], Mapping[str, object]]
    """Of a question, its prompt and its record as JSON."""
    parquet: bool = False


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ADAPTERS: Mapping[Framework, Adapter] = {
    "trl": Adapter(
        'from exam_reward import reward; GRPOTrainer(reward_funcs=[reward], train_dataset=load_dataset("json",\n'
        'data_files="questions.jsonl", split="train"), ...)',
        _TRL,
        lambda question, text, record: {"prompt": _messages(text), "question_record": record},
    ),
    "verl": Adapter(
        "python -m verl.trainer.main_ppo data.train_files=questions.parquet\n"
        "custom_reward_function.path=exam_reward.py custom_reward_function.name=compute_score ...",
        _VERL,
        lambda question, text, record: {
            "data_source": "cmexam_tune",
            "prompt": _messages(text),
            "ability": "medicine",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"index": question.id, "question_record": record},
        },
        parquet=True,
    ),
    "ms-swift": Adapter(
        "swift rlhf --rlhf_type grpo --external_plugins exam_reward.py --reward_funcs exam\n"
        "--dataset questions.jsonl ...",
        _SWIFT,
        lambda question, text, record: {"messages": _messages(text), "question_record": record},
    ),
    "verifiers": Adapter(
        "load_environment() of this file is the environment; questions.jsonl stays beside it.",
        _VERIFIERS,
        lambda question, text, record: {
            "prompt": _messages(text),
            "answer": question.answer,
            "info": {"question_record": record},
        },
    ),
}


def export(
    framework: Framework,
    questions: str | Path,
    out: str | Path,
    program: str,
    *,
    style: str = STYLE,
    overwrite: bool = False,
) -> Path:
    """Write the reward file of a framework and its questions to the folder `out`, and return it.

    Args:
        framework: whose.
        questions: a questions file; those without an answer cannot be rewarded.
        out: folder to write.
        program: name of the program that writes it.
        style: prompt style or file.
        overwrite: replace an earlier export.

    Raises:
        UserError: a file or folder that cannot be used.
        DataError: no question has an answer.
    """
    adapter, chosen = ADAPTERS[framework], resolve_style(style)
    target = files.check_folder(out, program, overwrite, keep=[questions])

    def rows() -> Iterator[Mapping[str, object]]:
        for question in jsonl.read(questions, Question):
            if question.answer is not None:
                yield adapter.row(question, prompt(question, chosen), jsonl.dumps(question))

    if not (written := list(rows())):
        raise DataError(f"{questions}: no question has an answer, so nothing could be rewarded.")
    head = _HEAD.format(framework=framework, usage=adapter.usage, place=answer_place(chosen))
    with files.new_folder(target, program, overwrite) as staged:
        (staged / FILE).write_text(head + adapter.code, encoding="utf-8")
        if adapter.parquet:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), staged / "questions.parquet")
        else:
            jsonl.write(staged / "questions.jsonl", written)
    return target
