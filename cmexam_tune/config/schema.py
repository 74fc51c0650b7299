"""The sections of a configuration as frozen dataclasses; `cmexam_tune.config` reads them from YAML.

`training.arguments` holds `transformers.TrainingArguments` names, `tuning.settings` PEFT's and `generation.arguments`
`transformers.GenerationConfig`'s, all unchanged; the fields here are what those libraries do not have.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cmexam_tune.config import words

SECTIONS = ("data", "prompt", "model", "tuning", "training", "generation")


@dataclass(frozen=True)
class DataConfig:
    """Question files, as `cmexam-tune preprocess` writes them."""

    train: tuple[str, ...] = ()
    mixture: tuple[float, ...] = ()
    """For each training file how often an epoch shows its questions, `[1, 0.5]`; default: each question once."""
    shuffle_options: bool = False
    """Train on options in another order, by `training.seed`; questions that this could break stay as they are."""
    validation: tuple[str, ...] = ()
    """Questions for the loss and exam accuracy while training."""
    test: tuple[str, ...] = ()
    """Questions that `reproduce` and the shell recipes predict after training."""
    max_train_samples: int | None = None
    """Use only the first so many training questions."""
    max_eval_samples: int | None = None
    """Use only the first so many validation questions."""
    cache_dir: str | None = None
    """Where encoded questions are cached; default: `cache/` in the run folder. Set to share between runs."""
    num_workers: int | None = None
    """Processes that encode questions; default: one for each core."""


@dataclass(frozen=True)
class PromptConfig:
    """What the model reads and is to write."""

    style: str
    """A style of `cmexam_tune.prompts`: `answer` or `1`, `answer_explain` or `4`, `cmb_answer`, ..."""
    max_source_length: int
    """Tokens of the prompt without examples; a longer one loses the middle of its stem, never an option."""
    max_target_length: int
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
    shots: int = 0
    """At prediction: answered examples before each question, of the same exam class (CMB: three)."""
    shots_from: str | None = None
    """Questions file the examples are drawn from; default: `data.validation`. What is asked is never an example."""
    shots_seed: int = 0
    """Of the draw of the examples."""
    option_order: str | None = None
    """At prediction: options in another order, `rotate:K` or `shuffle:SEED`; `answer` is in the exam's letters."""

    def __post_init__(self) -> None:
        """Refuse own words that cannot be filled, and what is no order of options."""
        if self.ask is not None:
            words.check_text(self.ask, "ask", words.ASK, ("question",))
        if self.write is not None:
            words.check_text(self.write, "write", words.WRITE, words.WRITE)
        if self.option_order is not None:
            words.check_order(self.option_order)


@dataclass(frozen=True)
class ModelConfig:
    """The base model."""

    family: str
    """llama (any decoder of transformers), chatglm, bert or endpoint: a file in `cmexam_tune/models/families/`."""
    model_name_or_path: str
    """Folder of the checkpoint, or its name on the model hub; endpoint: its name at the address."""
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
    """Frozen weights in 4 bits (NF4 with double quantisation, bitsandbytes): LoRA on 7B in 24 GB. Family llama."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the model's own config.json, for example `{hidden_dropout_prob: 0.4}`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the model's chat template, for example `{enable_thinking: false}` (Qwen3)."""
    attn_implementation: str = "sdpa"
    trust_remote_code: bool = False
    """Run Python code in the checkpoint, if you trust its author. Only the command line can set it."""
    revision: str | None = None


@dataclass(frozen=True)
class TuningConfig:
    """The tuning method and its own settings."""

    method: str
    """lora, ptuning, head or full: a file in `cmexam_tune/models/adapters/`."""
    settings: Any
    """The `Settings` dataclass of the method's file."""


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; `arguments` goes to `transformers.TrainingArguments` as it is."""

    global_batch_size: int | None = None
    """Questions for each optimizer step, on any number of processes; sets the accumulation steps."""
    packing: bool = False
    """Several questions in one row, each seeing only itself; same loss, no padding."""
    max_tokens_per_batch: int | None = None
    """Upper bound of token slots in a micro-batch, beside `per_device_train_batch_size`."""
    early_stopping_patience: int | None = None
    """Evaluations without a better `metric_for_best_model` after which training ends."""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Of everything: initial weights, order of questions and options, dropout."""
        return int(self.arguments.get("seed", 42))


@dataclass(frozen=True)
class GenerationConfig:
    """How to answer; `arguments` goes to `transformers.GenerationConfig` as it is."""

    mode: Literal["generate", "constrained", "likelihood"] = "generate"
    """Free text; only legal answers can be written; the most probable legal answer."""
    batch_size: int = 16
    """Questions for each forward pass at prediction; changes speed, never an answer."""
    answer_sets: Literal["kind", "single", "multiple"] = "kind"
    """Legal answers: by what the exam prints (unknown kind: one letter), always one letter, always any subset."""
    length_normalization: bool = False
    """likelihood: mean instead of sum of token log-probabilities."""
    prior_normalization: bool = False
    """likelihood: subtract the log-probability of the same answer after a prompt without the question."""
    thinking_tokens: int = 0
    """Tokens that a model may think (`<think>`) beside `max_new_tokens` for what follows."""
    votes: int = 1
    """Outputs for each question, of which the majority is the answer; more than one needs `do_sample: true`."""
    seed: int = 0
    """Of sampling: the same seed gives the same outputs, in any batch, after any interruption."""
    concurrency: int = 16
    """endpoint only: requests that are under way at once."""
    requests_per_minute: float | None = None
    """endpoint only: upper bound of requests sent, repeated ones included."""
    timeout: float = 300.0
    """endpoint only: seconds that a whole reply may take, each time that it is requested."""
    max_retries: int = 8
    """endpoint only: how often a request is repeated after 429, 5xx or a broken connection, with growing pauses."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """endpoint only: fields that are sent with every request as they are, for example `{reasoning_effort: low}`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse several outputs that would all be the same."""
        if self.votes > 1 and (self.mode != "generate" or not self.arguments.get("do_sample")):
            raise ValueError(
                f"votes: {self.votes} outputs would all be the same. Add generation.mode=generate and "
                "generation.do_sample=true (and for example generation.temperature=0.7)"
            )


@dataclass(frozen=True)
class Config:
    """A resolved experiment."""

    data: DataConfig
    prompt: PromptConfig
    model: ModelConfig
    tuning: TuningConfig
    training: TrainingConfig
    generation: GenerationConfig
    out: str

    def to_dict(self) -> dict[str, Any]:
        """Return the plain mapping that `parse_config` reads back to an equal Config."""
        plain: dict[str, Any] = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        for section in ("training", "generation"):
            plain[section].update(plain[section].pop("arguments"))
        plain["tuning"] = {"method": self.tuning.method, **dataclasses.asdict(self.tuning.settings)}
        return {**_lists(plain), "out": self.out}


_ALL: Any = (DataConfig, PromptConfig, ModelConfig, TuningConfig, TrainingConfig, GenerationConfig)
CLASSES: Mapping[str, type[Any]] = dict(zip(SECTIONS, _ALL, strict=True))
"""The dataclass of each section."""


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
