"""What a recipe can say: one frozen pydantic dataclass for each section.

A field's type holds its range and the string below it is its help; from there come the checks, `train --help`,
docs/configuration.md and the JSON Schema. `training.arguments` holds `transformers.TrainingArguments` names,
`tuning.settings` PEFT's and `generation.arguments` `transformers.GenerationConfig`'s, all unchanged; the sections name
what those libraries do not have.

A setting of ours is a field here; a range for a name of transformers goes into `TrainingOptions` or
`GenerationOptions`. One that changes how fast answers come and not which ones is listed in `SPEED`.
"""

import dataclasses
import re
import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from cmexam_tune.core.strict import adapter
from cmexam_tune.core.variants import suggest

# Validators are built when they are first needed: most programs only pass these classes around.
# Strict, since YAML tells "8" from 8: whoever wrote the one for the other is told so before anything is loaded.
STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)


def _as_tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


# Upper bounds are far above what anyone uses: they are there for slips (1e30, a seed of 20 digits), which libraries
# would take and fail on long after the model was loaded.
Count = Annotated[int, Field(ge=1, le=10**9)]
Length = Annotated[int, Field(ge=1, le=10**6)]
"""Tokens of a text, or rows of a batch."""
Rank = Annotated[int, Field(ge=1, le=65_536)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, lt=1)]
Interval = Annotated[float, Field(gt=0, le=10**9)]
"""Steps; below 1: a share of all steps."""
Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple, json_schema_input_type=tuple[str, ...] | str)]
"""A list of texts, or a single one."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Question files, as `cmexam-tune preprocess` writes them."""

    train: Strings = ()
    """Questions to train on."""
    mixture: tuple[Annotated[float, Field(gt=0, le=100)], ...] = ()
    """For each training file how often an epoch shows its questions, `[1, 0.5]`; default: each question once."""
    shuffle_options: bool = False
    """Train on options in another order, by `training.seed`; questions that this could break stay as they are."""
    validation: Strings = ()
    """Questions for the loss and exam accuracy while training."""
    test: Strings = ()
    """Questions that `reproduce` and the shell recipes predict after training."""
    max_train_samples: Count | None = None
    """Use only the first so many training questions."""
    max_eval_samples: Count | None = None
    """Use only the first so many validation questions."""
    cache_dir: str | None = None
    """Where encoded questions are cached; default: `cache/` in the run folder. Set to share between runs."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that encode questions; default: one for each core."""

    def __post_init__(self) -> None:
        """Refuse weights that do not fit the files."""
        if self.mixture and len(self.mixture) != len(self.train):
            weights, files = len(self.mixture), len(self.train)
            raise ValueError(f"mixture: {weights} weights for {files} files of data.train. Give one for each file.")


PROMPT_FIELDS = ("question", "options", "option_str", "exam", "question_type")
COMPLETION_FIELDS = ("letters", "text", "explanation")
ORDER = re.compile(r"(rotate|shuffle):\d{1,9}")


@dataclass(frozen=True, config=STRICT)
class ContextConfig:
    """Passages that stand in front of each question."""

    passages: str
    """File of passages, one JSON object a line: `{"id": ..., "text": ...}`."""
    k: Annotated[int, Field(ge=1, le=100)] = 3
    """Passages for each question."""
    by: Literal["bm25"] = "bm25"
    """How they are found: BM25 over character bigrams."""
    leaks: bool = False
    """Use passages that hold questions of the exam or their explanations; else they are refused."""


@dataclass(frozen=True, config=STRICT)
class PromptConfig:
    """What the model reads and is to write."""

    style: Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)] = "answer"
    """A style of `cmexam_tune.prompts`: `answer` or `1`, `answer_explain` or `4`, `cmb_answer`, ..."""
    max_source_length: Length = 1024
    """Tokens of the prompt without examples; a longer one loses the middle of its stem, never an option."""
    max_target_length: Length = 512
    """Tokens of the completion; a longer one loses the end of its explanation, never the answer."""
    template: str = "auto"
    """Wrapper: `auto` (the model's chat template, else none), `none`, or a name of `prompts.TEMPLATES`."""
    system: str | None = None
    """System message for templates that have one."""
    history: Literal["reference", "own"] = "reference"
    """CMB-Clin: the earlier answers of a case are the reference answers, as CMB does, or the model's own."""
    ask: str | None = None
    """Own words in place of the style's; fields {question}, {options}, {option_str}, {exam}, {question_type}."""
    write: str | None = None
    """Own completion in place of the style's; fields {letters}, {text}, {explanation}. `prompt.file: FILE` names a YAML
    file with `ask` and `write`, which become part of the run."""
    shots: Annotated[int, Field(ge=0, le=100)] = 0
    """At prediction: answered examples before each question, of the same exam class (CMB: three)."""
    shots_from: str | None = None
    """Questions file the examples are drawn from; default: `data.validation`. What is asked is never an example."""
    shots_seed: int = 0
    """Of the draw of the examples."""
    context: ContextConfig | None = None
    """At prediction: passages before each question, `{passages: FILE.jsonl, k: 3, by: bm25}`; together at most half as
    many characters as `max_source_length` has tokens. Those that hold the exam are refused without `leaks: true`."""
    option_order: str | None = None
    """At prediction: options in another order, `rotate:K` or `shuffle:SEED`; `answer` is in the exam's letters."""

    def __post_init__(self) -> None:
        """Refuse own words that cannot be filled, and what is no order of options."""
        if self.ask is not None:
            _check_fields("ask", self.ask, PROMPT_FIELDS, needed=("question",))
        if self.write is not None:
            _check_fields("write", self.write, COMPLETION_FIELDS, needed=COMPLETION_FIELDS)
        if self.option_order is not None:
            check_order(self.option_order)


def _check_fields(key: str, text: str, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    """Refuse a text with a field that does not exist, or without any of the fields it needs."""
    braces = "A brace that is only a brace is written twice: {{ or }}"
    try:
        fields = [(name, form, conversion) for _, name, form, conversion in string.Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(f"{key}: {error}. {braces}") from None
    fields = [field for field in fields if field[0] is not None]  # None: plain text up to the end
    for name, form, conversion in fields:
        if name not in known or form or conversion:
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
            near = suggest(str(name), known)
            raise ValueError(f"{key}: {{{shown}}} is unknown{near}; known: {_braced(known)}. {braces}")
    if not {name for name, _, _ in fields} & {*needed}:
        raise ValueError(f"{key}: has no {_braced(needed)}, so it would say the same for every question")


def _braced(names: tuple[str, ...]) -> str:
    return " or ".join(f"{{{name}}}" for name in names)


def check_order(order: str) -> None:
    """Refuse what is no order of options.

    Raises:
        ValueError: neither `rotate:K` nor `shuffle:SEED`.
    """
    if not ORDER.fullmatch(order):
        raise ValueError(
            f"option_order: {order!r} is no order of options. Use rotate:1 (each option one letter further back) or "
            "shuffle:7 (another order for every question, by that seed)"
        )


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The base model."""

    family: str
    """llama (any decoder of transformers), chatglm, bert or endpoint: a file in `cmexam_tune/models/families/`."""
    model_name_or_path: str
    """Folder of the checkpoint, a .gguf file, or a name on the model hub; endpoint: its name at the address."""
    engine: Literal["vllm", "sglang"] | None = None
    """llama only: who answers in place of transformers: a server that is started, and ended, by the command itself."""
    engine_command: str | None = None
    """What starts it; default: `python -m` of this Python, or of `$CMEXAM_TUNE_VLLM_PYTHON`. Command line only."""
    engine_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its own options, for example `{max_model_len: 4096, tensor_parallel_size: 2}`. Command line only."""
    base_url: str | None = None
    """endpoint only: where the server listens, for example `http://127.0.0.1:8000/v1`."""
    api_key_env: str | None = None
    """endpoint only: name of the environment variable that holds the key; the key itself stands in no file."""
    follow_redirects: bool = False
    """endpoint only: send the questions on where the server says; the key stays with the first host."""
    adapter_name_or_path: str | None = None
    """PEFT adapter that is merged into the base before tuning (Alpaca and Huatuo are adapters on LLaMA)."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of the frozen weights; auto: bfloat16 where the card has it, float16 on older cards, float32 on CPU."""
    head: Literal["choice", "label", "multilabel"] | None = None
    """bert only: score each option; softmax over answer strings; sigmoid for each letter."""
    load_in_4bit: bool = False
    """Frozen weights in 4 bits (NF4 with double quantisation, bitsandbytes): LoRA on 7B in 24 GB; not ChatGLM-6B."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Changes to the model's own config.json, for example `{hidden_dropout_prob: 0.4}`."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For the model's chat template, for example `{enable_thinking: false}` (Qwen3)."""
    attn_implementation: str = "sdpa"
    """Of transformers: `sdpa`, `eager`, or `flash_attention_2` where it is installed."""
    trust_remote_code: bool = False
    """Run Python code in the checkpoint, if you trust its author. Only the command line can set it."""
    revision: str | None = None
    """Version on the model hub: a branch, tag or commit."""

    @property
    def is_remote(self) -> bool:
        """Whether the model is behind an address: there are no weights here, and nothing to look up on a disk."""
        return self.base_url is not None

    @property
    def is_served(self) -> bool:
        """Whether a server answers, so that one process of this program asks for all cards."""
        return self.is_remote or self.engine is not None


@dataclass(frozen=True, config=STRICT)
class TuningConfig:
    """The tuning method and its own settings."""

    method: str | None = None
    """lora, ptuning, head or full: a file in `cmexam_tune/models/adapters/`. None: nothing is trained."""
    settings: Any = None
    """The `Settings` dataclass of the method's file."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """How to train; every other name goes as it is to `transformers.TrainingArguments`, or TRL's GRPO- or DPOConfig."""

    objective: str = "sft"
    """What is learnt from: sft (completions of known answers), grpo (rewards of sampled outputs) or dpo (pairs of
    outputs): a file in `cmexam_tune/training/objectives/`."""
    global_batch_size: Length | None = None
    """Questions (dpo: pairs) for each optimizer step, on any number of processes; sets the accumulation steps."""
    packing: bool = False
    """Several questions in one row, each seeing only itself; same loss, no padding."""
    max_tokens_per_batch: Count | None = None
    """Upper bound of token slots in a micro-batch, beside `per_device_train_batch_size`."""
    early_stopping_patience: Count | None = None
    """Evaluations without a better `metric_for_best_model` after which training ends."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Of everything: initial weights, order of questions and options, dropout."""
        return int(self.arguments.get("seed", 42))

    @property
    def micro_batch(self) -> int:
        """Most questions that a process computes at a time."""
        return int(self.arguments.get("per_device_train_batch_size", 8))

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step on each process, where `global_batch_size` does not say it."""
        return int(self.arguments.get("gradient_accumulation_steps", 1))


Weight = Annotated[float, Field(ge=0, le=1000)]


@dataclass(frozen=True, config=STRICT)
class RewardConfig:
    """What an output earns in `training.objective: grpo`: weights of the terms in `cmexam_tune.rewards`."""

    exact: Weight = 0.95
    """Exactly the right letters, strictly read: one statement of the answer where the style has it."""
    format: Weight = 0.05
    """The answer can be read strictly, right or wrong."""
    partial: Weight = 0.475
    """Jaccard similarity to the right letters where several are right, and not exactly these were given."""
    partial_steps: Count | None = 100
    """Steps over which `partial` fades to nothing; null: it stays."""
    overlong: Weight = 0.2
    """Up to -1 for the last 64 tokens before `training.max_completion_length`."""
    language: Weight = 0.0
    """Share of Chinese characters outside of the options' texts."""
    argues: Weight = 0.0
    """-1 for an explanation that concludes with other letters than are answered."""


class TrainingArguments(TypedDict, total=False):
    """Names of `transformers.TrainingArguments` with a range that is checked before anything is loaded."""

    learning_rate: Annotated[float, Field(gt=0, le=100)]
    weight_decay: Annotated[float, Field(ge=0, le=100)]
    adam_beta1: Share
    adam_beta2: Share
    adam_epsilon: Annotated[float, Field(gt=0, le=1)]
    max_grad_norm: Annotated[float, Field(ge=0, le=10**6)]
    label_smoothing_factor: Share
    neftune_noise_alpha: Annotated[float, Field(ge=0, le=1000)] | None
    num_train_epochs: Annotated[float, Field(gt=0, le=10**6)]
    max_steps: Count | Literal[-1]
    warmup_steps: Annotated[float, Field(ge=0, le=10**9)]
    logging_steps: Interval
    eval_steps: Interval | None
    save_steps: Interval
    save_total_limit: Count | None
    per_device_train_batch_size: Length
    per_device_eval_batch_size: Length
    gradient_accumulation_steps: Length
    dataloader_num_workers: Annotated[int, Field(ge=0, le=1024)]
    seed: Seed
    data_seed: Seed | None


@dataclass(frozen=True, config=STRICT)
class GenerationConfig:
    """How to answer; every other name is one of `transformers.GenerationConfig` and goes there as it is."""

    mode: Literal["generate", "constrained", "likelihood"] = "generate"
    """Free text; only legal answers can be written; the most probable legal answer."""
    batch_size: Rank | Literal["auto"] = 16
    """Questions for each forward pass at prediction, `auto`: what the card's free memory carries; changes no answer."""
    answer_sets: Literal["kind", "single", "multiple"] = "kind"
    """Legal answers: by what the exam prints (unknown kind: one letter), always one letter, always any subset."""
    length_normalization: bool = False
    """likelihood: mean instead of sum of token log-probabilities."""
    prior_normalization: bool = False
    """likelihood: subtract the log-probability of the same answer after a prompt without the question."""
    thinking_tokens: Annotated[int, Field(ge=0, le=131_072)] = 0
    """Tokens that a model may think (`<think>`) beside `max_new_tokens` for what follows."""
    stop_strings: Strings = ()
    """Texts that end what the model writes and are left out of it, beside those of the template."""
    votes: Annotated[int, Field(ge=1, le=1000)] = 1
    """Outputs for each question, of which the majority is the answer; more than one needs `do_sample: true`."""
    orders: Annotated[int, Field(ge=1, le=100)] = 1
    """Different orders of the options that each question is asked in; the first is the answer, all are reported."""
    seed: Seed = 0
    """Of sampling and of `orders`: the same seed gives the same outputs, in any batch, after any interruption."""
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 16
    """endpoint only: requests that are under way at once."""
    requests_per_minute: Annotated[float, Field(ge=0.001, le=10**6)] | None = None
    """endpoint only: upper bound of requests sent, repeated ones included."""
    timeout: Annotated[float, Field(gt=0, le=10**6)] = 300.0
    """endpoint only: seconds that a whole reply may take, each time that it is requested."""
    max_retries: Annotated[int, Field(ge=0, le=1000)] = 8
    """endpoint only: how often a request is repeated after 429, 5xx or a broken connection, with growing pauses."""
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """endpoint only: fields that are sent with every request as they are, for example `{reasoning_effort: low}`."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prompts_at_once(self) -> int:
        """`batch_size`, or its default where the model's own engine finds it."""
        return 16 if self.batch_size == "auto" else self.batch_size

    def __post_init__(self) -> None:
        """Refuse what would have no effect: several outputs that are all the same, sampling without `do_sample`."""
        if self.votes > 1 and (self.mode != "generate" or not self.arguments.get("do_sample")):
            raise ValueError(
                f"votes: {self.votes} outputs would all be the same. Add generation.mode=generate and "
                "generation.do_sample=true (and for example generation.temperature=0.7)"
            )
        if self.votes > 1 and self.orders > 1:
            raise ValueError(f"orders: {self.orders} orders of {self.votes} votes: ask for one of the two at a time")
        if "" in self.stop_strings:
            raise ValueError("stop_strings: an empty text would end every answer before its first token. Leave it out")
        for name in ("temperature", "top_p", "top_k"):
            silent = self.mode == "generate" and not self.arguments.get("do_sample")
            if silent and self.arguments.get(name) is not None:
                raise ValueError(f"{name}: has no effect without sampling; add generation.do_sample=true")


SPEED = frozenset({
    *("batch_size", "concurrency", "requests_per_minute", "timeout", "max_retries"),
    *("api_key_env", "follow_redirects", "engine_command"),
})  # fmt: skip
"""Settings of `generation` and `model` that change how fast answers come and no answer."""
LOCAL_ONLY = ("thinking_tokens",)
"""Settings that a model behind an address cannot keep: refused there, not ignored."""


class GenerationOptions(TypedDict, total=False):
    """Names of `transformers.GenerationConfig` with a range that is checked before anything is loaded."""

    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] | None
    max_length: Length | None
    min_new_tokens: Annotated[int, Field(ge=0, le=131_072)] | None
    num_beams: Annotated[int, Field(ge=1, le=256)] | None
    num_return_sequences: Literal[1] | None
    temperature: Annotated[float, Field(gt=0, le=100)] | None
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    top_k: Annotated[int, Field(ge=0, le=10**6)] | None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None
    min_p: Annotated[float, Field(ge=0, le=1)] | None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=10**4)] | None
    encoder_no_repeat_ngram_size: Annotated[int, Field(ge=0, le=10**4)] | None


@dataclass(frozen=True, config=STRICT)
class Config:
    """A resolved experiment."""

    data: DataConfig
    prompt: PromptConfig
    model: ModelConfig
    tuning: TuningConfig
    training: TrainingConfig
    generation: GenerationConfig
    reward: RewardConfig
    out: str
    """The run folder."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plain mapping that `parse_config` reads back to an equal Config."""
        plain: dict[str, Any] = adapter(Config).dump_python(self, mode="json", exclude={"tuning"})
        for section in ("training", "generation"):
            plain[section] |= plain[section].pop("arguments")
        cls: type = type(self.tuning.settings)
        settings = adapter(cls).dump_python(self.tuning.settings, mode="json") or {}
        plain["tuning"] = {"method": self.tuning.method, **settings}
        return {name: plain[name] for name in (*SECTIONS, "out")}


# In the order in which a recipe is written and a run records it.
SECTIONS: Mapping[str, type[Any]] = {
    "data": DataConfig,
    "prompt": PromptConfig,
    "model": ModelConfig,
    "tuning": TuningConfig,
    "training": TrainingConfig,
    "generation": GenerationConfig,
    "reward": RewardConfig,
}
