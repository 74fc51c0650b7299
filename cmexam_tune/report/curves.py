"""What reports draw of a training's log: which numbers, side by side in which figure, and their words."""

from collections.abc import Mapping
from dataclasses import dataclass

from cmexam_tune.report.table import Text, for_page


@dataclass(frozen=True)
class Figure:
    """Curves that share their axes."""

    key: str
    title: Text
    names: Mapping[str, Text]
    """Name in log.jsonl -> what the page calls it."""

    def page(self) -> dict[str, object]:
        """Return what the page's script reads."""
        names = {name: for_page(words) for name, words in self.names.items()}
        return {"key": self.key, "title": for_page(self.title), "names": names}


FIGURES = (
    Figure("loss", Text("Loss", "损失"), {"loss": Text("training", "训练"), "eval_loss": Text("validation", "验证")}),
    Figure(
        "accuracy",
        Text("Exam accuracy while training, %", "训练过程中的考试正确率（%）"),
        {"eval_exam_accuracy": Text("validation", "验证")},
    ),
    Figure("reward", Text("Mean reward of the outputs", "输出的平均奖励"), {"reward": Text("reward", "奖励")}),
    Figure(
        "right",
        Text("Shares of what was sampled", "采样输出中的占比"),
        {
            "share_right": Text("outputs that are right", "答对的输出"),
            "groups_without_signal": Text("questions all right or all wrong", "全对或全错的题目"),
            "completions/clipped_ratio": Text("outputs cut off", "被截断的输出"),
        },
    ),
    Figure(
        "length",
        Text("Tokens of an output", "输出的 token 数"),
        {"length_right": Text("right", "答对"), "length_wrong": Text("wrong", "答错")},
    ),
    Figure("rate", Text("Learning rate", "学习率"), {"learning_rate": Text("learning rate", "学习率")}),
)
NAMES = tuple(name for figure in FIGURES for name in figure.names)
