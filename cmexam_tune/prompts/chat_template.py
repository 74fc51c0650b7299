"""Fixed chat wrappers of the published models: how a prompt becomes the text that such a model was tuned on.

The strings are part of the published protocols (CMB-Exam's released workers, Stanford Alpaca, Vicuna v1.1, the
CMExam repository's `med_template`) and are kept to the character. Models with a chat template of their own need none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Turn
from cmexam_tune.core.variants import suggest
from cmexam_tune.prompts.builder import Dialogue, Message, rounds


@dataclass(frozen=True)
class Template:
    """One wrapper; `{q}` is the prompt, `{a}` an answer, `{i}` the number of a round."""

    turn: str
    """A single question, up to where the model starts to write."""
    example: str | None = None
    """One exchange before it, a few-shot example or an earlier turn; None: no published form."""
    turn_after: str | None = None
    """The question after earlier turns where that differs from `turn`."""
    after_examples: str | None = None
    """The question after few-shot examples where that differs from `turn_after`."""
    examples_inside: str | None = None
    """Few-shot examples and earlier turns stand inside the question's own turn, and this behind each of them."""
    case: tuple[str, str] = ("{record}{question}", "{question}")
    """CMB-Clin: the words of the first turn of a case, and of the later ones."""
    system: str | None = None
    """The default system text; None: the wrapper has no place for one."""
    separator: str = ""
    """Between system text and first turn."""
    stop: tuple[str, ...] = ()
    """Strings that open a turn of the user: a model that writes one has ended its answer."""
    first_round: int = 0
    """Number of the first round."""
    name: str = ""
    """Its key in `TEMPLATES`."""

    @property
    def remembers(self) -> bool:
        """Whether there is a form for earlier turns."""
        return self.example is not None

    def text(self, dialogue: Dialogue) -> str:
        """Return the dialogue inside the wrapper, up to where the model starts to write.

        Raises:
            ConfigError: a system text or earlier turns for a wrapper that has no place for them, or messages that are
                no rounds of question and answer.
        """
        words, history, system, examples = dialogue
        turns = self._turns(history)
        if system and self.system is None:
            having = ", ".join(key for key, value in TEMPLATES.items() if value.system is not None)
            raise ConfigError(
                f"prompt.system: the template {self.name!r} has no system message. Leave it out, or use {having}."
            )
        before = [*examples, *turns]
        if before and self.example is None:
            raise ConfigError(f"prompt.template: {self.name!r} has no published form of few-shot examples.")
        head = self.system if system is None else system
        rounds = [
            _fill(self.example or "", number, turn.question, turn.answer)
            for number, turn in enumerate(before, self.first_round)
        ]
        if self.examples_inside is not None:
            words = "".join([*(text + self.examples_inside for text in rounds), words])
            rounds = []
        last = _fill(self._last(bool(examples), bool(turns)), self.first_round + len(rounds), words, "")
        return "".join([*([head + self.separator] if head else []), *rounds, last])

    def _turns(self, history: Sequence[Message]) -> list[Turn]:
        """Return the messages as rounds of question and answer, the only form that the published wrappers have.

        Raises:
            ConfigError: they begin with the assistant, or somebody speaks twice in a row.
        """
        turns: list[Turn] = []
        for place, message in enumerate(history):
            if message.role != ("user", "assistant")[place % 2]:
                break
            if message.role == "assistant":
                turns.append(Turn(history[place - 1].content, message.content))
        if 2 * len(turns) != len(history):
            roles = ", ".join([*(message.role for message in history), "user"])
            raise ConfigError(
                f"the prompt template {self.name!r} has no form for messages in the order {roles}: user and assistant "
                "must take turns, the user first, after at most one system message at the start."
            )
        return turns

    def _last(self, examples: bool, turns: bool) -> str:
        """Return the form of the question after what there is before it."""
        after = self.turn_after if self.turn_after is not None else self.turn
        if turns:
            return after
        if examples:
            return after if self.after_examples is None else self.after_examples
        return self.turn


_ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_HUATUOGPT = (
    "一位用户和智能医疗大模型HuatuoGPT之间的对话。对于用户的医疗问诊，HuatuoGPT给出准确的、详细的、温暖的指导建议。"
    "对于用户的指令问题，HuatuoGPT给出有益的、详细的、有礼貌的回答。"
)

_WRAPPERS = {
    "none": Template("{q}", "{q}\n{a}\n\n"),
    "alpaca": Template(
        "### Instruction:\n{q}\n\n### Response:",
        "### Instruction:\n{q}\n\n### Response:{a}\n\n",
        system=_ALPACA,
        separator="\n\n",
        stop=("### Instruction:",),
    ),
    "vicuna": Template(
        "USER: {q} ASSISTANT:", "USER: {q} ASSISTANT: {a}</s>", system=_VICUNA, separator=" ", stop=("USER:",)
    ),
    "huatuo": Template(
        "### 问题:\n{q}\n### 回答:\n",
        "### 问题:\n{q}\n### 回答:\n{a}\n",
        system="下面是一个问题，运用医学知识来正确回答提问.",
        separator="\n",
        stop=("### 问题:",),
    ),
    "cmexam_lora": Template("{q}\n### 回答:\n", "{q}\n### 回答:\n{a}\n", stop=("### 回答:",)),
    "baichuan": Template(
        "<reserved_102>{q}<reserved_103>", "<reserved_102>{q}<reserved_103>{a}</s>", stop=("<reserved_102>",)
    ),
    "baichuan_clin": Template(
        "<reserved_102>{q} <reserved_103>", "<reserved_102>{q} <reserved_103>{a}</s>", stop=("<reserved_102>",)
    ),
    "baichuan2": Template(
        "<reserved_106>{q}<reserved_107>", "<reserved_106>{q}<reserved_107>{a}</s>", stop=("<reserved_106>",)
    ),
    "bentsao": Template("### 问题:\n{q}\n### 回答:\n", "### 问题:\n{q}\n### 回答:\n{a}\n", stop=("### 问题:",)),
    "bianque2": Template("病人：{q}\n医生：", "病人：{q}\n医生：{a}\n", stop=("\n病人：",)),
    "chatglm": Template("{q}", "[Round {i}]\n问：{q}\n答：{a}\n", "[Round {i}]\n问：{q}\n答：", stop=("[Round ",)),
    "chatglm2": Template(
        "[Round {i}]\n\n问：{q}\n\n答：", "[Round {i}]\n\n问：{q}\n\n答：{a}\n\n", stop=("[Round ",), first_round=1
    ),
    "cmb_chatglm": Template(
        "问：{q}\n答：",
        "[Round {i}]\n问：{q}\n答：{a}\n",
        "[Round {i}]\n问：{q}\n答：",
        after_examples="问：{q}\n答：",
        stop=("[Round ", "\n问："),
    ),
    "chatmed": Template("问：\n{q}\n答：\n", "问：\n{q}\n答：\n{a}\n", stop=("\n问：",)),
    "huatuogpt": Template(
        "<病人>：{q} <HuatuoGPT>：", "<病人>：{q} <HuatuoGPT>：{a}</s>", system=_HUATUOGPT, stop=("<病人>",)
    ),
    "medicalgpt": Template(
        "### Instruction:{q}\n\n### Response: ",
        "问题：{q}\n答案：{a}\n\n",
        examples_inside="\n\n",
        system=_ALPACA,
        separator="\n\n",
        stop=("### Instruction:",),
    ),
    "medicalgpt_clin": Template(
        "### Instruction:{q}\n\n### Response: ",
        "{q}答案：{a}",
        examples_inside="\n\n",
        case=("{record}问题：{question}", "问题：{question}"),
        system=_ALPACA,
        separator="\n\n",
        stop=("### Instruction:",),
    ),
    "qizhen": Template(
        "### Instruction:{q}\n\n### Response: ",
        "{q}\n{a}",
        examples_inside="\n\n",
        system=_ALPACA,
        separator="\n\n",
        stop=("### Instruction:",),
    ),
    "huatuogpt2": Template("<问>：{q}\n<答>：", "<问>：{q}\n<答>：{a}\n", stop=("<问>",)),
}
TEMPLATES: dict[str, Template] = {name: replace(wrapper, name=name) for name, wrapper in _WRAPPERS.items()}


def of_conversations(name: str) -> str:
    """Return the wrapper that a model's published code uses for conversations in place of `name`."""
    return f"{name}_clin" if f"{name}_clin" in TEMPLATES else name


def template(name: str) -> Template:
    """Return the wrapper `name`.

    Raises:
        ConfigError: there is none of that name; the message suggests the nearest one.
    """
    if name not in TEMPLATES:
        raise ConfigError(
            f"prompt.template: {name!r} is unknown{suggest(name, TEMPLATES)}; known: {', '.join(TEMPLATES)}."
        )
    return TEMPLATES[name]


def wrap(
    words: str, name: str, system: str | None = None, turns: Sequence[Turn] = (), examples: Sequence[Turn] = ()
) -> str:
    """Return the prompt inside the wrapper `name`, after `examples` and earlier `turns` if there are any.

    Args:
        words: what `prompts.render` made of a question.
        name: a key of `TEMPLATES`.
        system: replaces the wrapper's own system text; an empty string leaves it out.
        turns: a conversation so far.
        examples: answered questions in the same style.

    Raises:
        ConfigError: unknown wrapper, or something that it has no place for.
    """
    return template(name).text(Dialogue(words, rounds(turns), system, tuple(examples)))


def _fill(text: str, number: int, question: str, answer: str) -> str:
    return text.format(i=number, q=question, a=answer)
