"""Chat templates: how a conversation becomes the text that a model reads.

A model brings a Jinja chat template of its own, or was tuned inside one of the published wrappers below. Their strings
are part of the published protocols (CMB-Exam's released workers, Stanford Alpaca, Vicuna v1.1, the CMExam repository's
`med_template`) and are kept to the character. Both kinds are a `ChatTemplate`, and `ChatTemplate.render` is the one
place where a conversation is wrapped: for training, prediction, chat, the server and exports. A new wrapper is one row
of `_WRAPPERS`; its key is what `prompt.template` names.
"""

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cmexam_tune.core.errors import ConfigError, first_line
from cmexam_tune.core.schema import Turn
from cmexam_tune.core.variants import suggest
from cmexam_tune.prompts.builder import Dialogue, rounds

# Imported where a conversation is wrapped: evaluate, preprocess, check and stats only need the words of a question, and
# Jinja is a fifth of the time that they take to start.
if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 10_000_000
"""Of a rendered conversation."""
MAX_LINES = 1_000_000
"""Lines of a template's compiled code that one conversation may run; 100 messages need some 2,000."""
_FAILURES = (TypeError, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError)
"""What the expressions of a template can raise; a macro may call itself."""
JINJA_CODE = "<template>"
"""File name that Jinja gives to compiled templates."""


class _LineTracer(Protocol):
    """What `sys.settrace` calls for each line of a frame."""

    def __call__(self, frame: FrameType, event: str, argument: object, /) -> "_LineTracer | None": ...


class CaseWords(NamedTuple):
    """CMB-Clin: what a user says in the first turn of a case, and in a later one."""

    first: str = "{record}{question}"
    later: str = "{question}"


CASE = CaseWords()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and what must be known beside it to use it."""

    name: str
    apply: Callable[..., str]
    """Called with `messages` and the number of few-shot examples that they begin with, `num_examples`."""
    source: str | None = None
    """Jinja that transformers' `apply_chat_template` renders alike; None: the tokenizer has it."""
    system: str | None = None
    """The default system text; None: the wrapper has no place for one."""
    stop: tuple[str, ...] = ()
    """Strings that open a turn of the user: a model that writes one has ended its answer."""
    case: CaseWords = CASE

    @property
    def is_models_own(self) -> bool:
        """Whether the model brings it: then its text holds every special token that the model expects."""
        return self.source is None

    def render(self, dialogue: Dialogue) -> str:
        """Return the dialogue up to where the model starts to write.

        Raises:
            ConfigError: the template has no form for a system text, examples or this order of roles; it fails, or
                goes on without end.
        """
        from jinja2 import TemplateError

        title = "the model's chat template" if self.is_models_own else f"the prompt template {self.name!r}"
        # A wrapper opens the model's turn behind the user's words, and nowhere else.
        if dialogue.since and not self.is_models_own:
            raise ConfigError(f"{title} has no form for a reply to the model's own message; it can go on with that.")
        try:
            with bounded():
                text = self.apply(messages=dialogue.messages(), num_examples=len(dialogue.examples))
        except NoForm as error:
            raise ConfigError(f"{title} {error}") from None
        except (TemplateError, *_FAILURES) as error:
            remedy = " prompt.template puts a published one in its place." if self.is_models_own else ""
            raise ConfigError(f"{title} cannot be filled ({first_line(error)}).{remedy}") from None
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"{title} makes {len(text):,} characters; {MAX_CHARACTERS:,} are possible.")
        return text

    def for_tokenizer(self, system: str | None, prefix: str) -> str:
        """Return Jinja for a tokenizer's `chat_template`.

        Args:
            system: the system text of conversations without one; None: the wrapper's own.
            prefix: special tokens that the tokenizer puts before a text, since templates bring their own.
        """
        default = _literal(self.system if system is None else system)
        return f"{{% set default_system = {default} %}}{{{{ {_literal(prefix)} }}}}{self.source}"


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """End templates that are rendered in the block and by this thread after `MAX_LINES` lines.

    Jinja's sandbox lets no template out, and lets it run for as long as it likes: two nested `range(90000)` are enough.
    Templates come with models of strangers. transformers renders them in an environment that takes no limits, and a
    timer reaches only the main thread, so the lines of their compiled code are counted.

    Raises:
        TemplateError: more lines.
    """
    from jinja2 import TemplateError

    lines_left = MAX_LINES

    def count(frame: FrameType, event: str, argument: object) -> _LineTracer | None:
        nonlocal lines_left
        # Returning None leaves the lines of this frame, which is no template, untraced.
        if frame.f_code.co_filename != JINJA_CODE:
            return None
        lines_left -= 1
        if lines_left < 0:
            raise TemplateError("it goes on without end")
        return count

    # A debugger or a coverage tool may be tracing already.
    outer = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(outer)


class NoForm(Exception):
    """A published wrapper has no form for what a conversation holds; the message says what that is."""


def _refuse(message: str) -> None:
    raise NoForm(message)


@functools.cache
def _environment() -> "ImmutableSandboxedEnvironment":
    """Return the sandbox in which wrappers are rendered, set up as transformers sets up its own."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment


# What every wrapper begins with. Only here `num_examples` is known; elsewhere all earlier turns are alike.
_OPENING = """\
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] if has_system else default_system -%}
{%- set turns = messages[1:] if has_system else messages -%}
{%- set shots = 2 * (num_examples or 0) -%}
{%- for message in turns -%}
{%- if message['role'] != ('user', 'assistant')[loop.index0 % 2] -%}
{{- raise_exception('has no form for messages in the order ' ~ (turns[shots:] | map(attribute='role') | join(', '))
    ~ ': user and assistant must take turns, the user first, after at most one system message at the start.') -}}
{%- endif -%}
{%- endfor -%}
"""
_NO_SYSTEM = """\
{%- if system -%}
{{- raise_exception('has no system message (prompt.system). Leave it out, or use one that has: alpaca, vicuna, ...') -}}
{%- endif -%}
"""


def _literal(text: str | None) -> str:
    return "none" if text is None else json.dumps(text, ensure_ascii=False)


@functools.cache
def _compiled(source: str) -> "Template":
    return _environment().from_string(source)


def _filled(source: str, system: str | None, **variables: object) -> str:
    return _compiled(source).render(default_system=system, **variables)


_FIELDS = {
    "{}": "message['content']",
    "{round0}": "(loop.index0 // 2)",
    "{round1}": "(loop.index0 // 2 + 1)",
    "{opens}": "('<s>' if loop.first else '')",
}


def _joined(form: str) -> str:
    """Return the Jinja expression for a text with fields. As an expression its line breaks are kept."""
    parts = filter(None, re.split(r"(\{\w*\})", form))
    return "{{ " + " ~ ".join(_FIELDS.get(part) or _literal(part) for part in parts) + " }}"


def _turns(user: str, assistant: str, last: str | None = None) -> str:
    """Return Jinja for a conversation in which all messages of a role look alike, the user's last one perhaps not.

    `{}` is a message, `{round0}` and `{round1}` count the user's messages from 0 and from 1, `{opens}` is `<s>` in the
    first message.
    """
    ending = "" if last is None else "{% if loop.last %}" + _joined(last) + "{% else %}"
    each = "{% if message['role'] == 'user' %}" + _joined(user) + "{% else %}" + _joined(assistant) + "{% endif %}"
    return "{% for message in turns %}" + ending + each + ("{% endif %}" if ending else "") + "{% endfor %}"


def _wrapper(
    body: str, *stop: str, system: str | None = None, separator: str = "", case: CaseWords = CASE
) -> ChatTemplate:
    """Return the wrapper that puts `separator` between the system text and `body`; its name is its key below.

    `system` is the default; without one (None) the wrapper has no place for a system text.
    """
    has_place = system is not None
    opening = "{% if system %}{{ system ~ " + _literal(separator) + " }}{% endif %}" if has_place else _NO_SYSTEM
    source = _OPENING + opening + body
    return ChatTemplate("", functools.partial(_filled, source, system), source, system, stop, case)


_ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_HUATUOGPT = (
    "一位用户和智能医疗大模型HuatuoGPT之间的对话。对于用户的医疗问诊，HuatuoGPT给出准确的、详细的、温暖的指导建议。"
    "对于用户的指令问题，HuatuoGPT给出有益的、详细的、有礼貌的回答。"
)

_GLM = "[Round {round0}]\n问：{}\n答："


def _inside(user: str, assistant: str) -> str:
    """Return Jinja for earlier turns that stand inside the instruction of the last one."""
    return '{{ "### Instruction:" }}' + _turns(user, assistant, last="{}") + '{{ "\\n\\n### Response: " }}'


def _chatml(system: str) -> ChatTemplate:
    """Return ChatML as Qwen-1's code writes it: an empty system text keeps its block."""
    opening = '{{ "<|im_start|>system\\n" ~ (system or "") ~ "<|im_end|>\\n" }}'
    turns = _turns("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "{}<|im_end|>\n")
    source = _OPENING + opening + turns
    return ChatTemplate("", functools.partial(_filled, source, system), source, system, ("<|im_start|>",))


_WRAPPERS = {
    "none": _wrapper(_turns("{}", "\n{}\n\n")),
    "alpaca": _wrapper(
        _turns("### Instruction:\n{}\n\n### Response:", "{}\n\n"), "### Instruction:", system=_ALPACA, separator="\n\n"
    ),
    "vicuna": _wrapper(_turns("USER: {} ASSISTANT:", " {}</s>"), "USER:", system=_VICUNA, separator=" "),
    "huatuo": _wrapper(
        _turns("### 问题:\n{}\n### 回答:\n", "{}\n"),
        "### 问题:",
        system="下面是一个问题，运用医学知识来正确回答提问.",
        separator="\n",
    ),
    "cmexam_lora": _wrapper(_turns("{}\n### 回答:\n", "{}\n"), "### 回答:"),
    "baichuan": _wrapper(_turns("<reserved_102>{}<reserved_103>", "{}</s>"), "<reserved_102>"),
    "baichuan_clin": _wrapper(_turns("<reserved_102>{} <reserved_103>", "{}</s>"), "<reserved_102>"),
    "baichuan2": _wrapper(_turns("<reserved_106>{}<reserved_107>", "{}</s>"), "<reserved_106>"),
    # As the releases' own code; `baichuan2` is CMB's worker, which ends answers with EOS.
    "baichuan2_chat": _wrapper(_turns("<reserved_106>{}<reserved_107>", "{}"), "<reserved_106>", system=""),
    "qwen_chat": _chatml("You are a helpful assistant."),
    # A second <s>, written as text, opens every earlier round, and the last one where it is the only one.
    "internlm": _wrapper(
        _turns(
            "<s><|User|>:{}<eoh>\n<|Bot|>:",
            "{}<eoa>\n",
            last="{opens}<|User|>:{}<eoh>\n<|Bot|>:",
        ),
        "<|User|>",
    ),
    "internlm_20b": _wrapper(_turns("<|User|>:{}<eoh>\n<|Bot|>:", "{}<eoa>\n"), "<|User|>"),
    "sunsimiao": _wrapper(
        _turns("### Instruction:\n{}\n\n### Response:\n", "{}\n\n"), "### Instruction:", system=_ALPACA
    ),
    "bentsao": _wrapper(_turns("### 问题:\n{}\n### 回答:\n", "{}\n"), "### 问题:"),
    "bianque2": _wrapper(_turns("病人：{}\n医生：", "{}\n"), "\n病人："),
    # Rounds are counted as soon as there is more than one message.
    "chatglm": _wrapper(
        "{% if turns | length == 1 %}{{ turns[0]['content'] }}{% else %}" + _turns(_GLM, "{}\n") + "{% endif %}",
        "[Round ",
    ),
    "chatglm2": _wrapper(_turns("[Round {round1}]\n\n问：{}\n\n答：", "{}\n\n"), "[Round "),
    # Few-shot examples are rounds, and the question behind them is none.
    "cmb_chatglm": _wrapper(
        "{% if turns | length == shots + 1 %}"
        + _turns(_GLM, "{}\n", last="问：{}\n答：")
        + "{% else %}"
        + _turns(_GLM, "{}\n")
        + "{% endif %}",
        "[Round ",
        "\n问：",
    ),
    "chatmed": _wrapper(_turns("问：\n{}\n答：\n", "{}\n"), "\n问："),
    "huatuogpt": _wrapper(_turns("<病人>：{} <HuatuoGPT>：", "{}</s>"), "<病人>", system=_HUATUOGPT),
    "medicalgpt": _wrapper(
        _inside("问题：{}", "\n答案：{}\n\n\n\n"), "### Instruction:", system=_ALPACA, separator="\n\n"
    ),
    "medicalgpt_clin": _wrapper(
        _inside("{}", "答案：{}\n\n"),
        "### Instruction:",
        system=_ALPACA,
        separator="\n\n",
        case=CaseWords("{record}问题：{question}", "问题：{question}"),
    ),
    "qizhen": _wrapper(_inside("{}", "\n{}\n\n"), "### Instruction:", system=_ALPACA, separator="\n\n"),
    "huatuogpt2": _wrapper(_turns("<问>：{}\n<答>：", "{}\n"), "<问>"),
}
TEMPLATES: dict[str, ChatTemplate] = {name: replace(wrapper, name=name) for name, wrapper in _WRAPPERS.items()}
"""The published wrappers. Another one is a row of the table above."""


def of_conversations(name: str) -> str:
    """Return the wrapper that a model's published code uses for conversations in place of `name`."""
    return f"{name}_clin" if f"{name}_clin" in TEMPLATES else name


def template(name: str) -> ChatTemplate:
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
    return template(name).render(Dialogue(words, rounds(turns), system, tuple(examples)))
