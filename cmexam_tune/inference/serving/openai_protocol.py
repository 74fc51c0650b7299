"""OpenAI's protocol: a request model for each route, and how answers, events and errors look.

Source: https://platform.openai.com/docs/api-reference.
"""

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from cmexam_tune.evaluation.answer_parsing import HALF
from cmexam_tune.inference.serving import GenerationRequest, Prompt, ProtocolRequest, Refused, TokenIds, event

if TYPE_CHECKING:
    from cmexam_tune.models.completion import Completion

MAX_CHOICES = 128
"""Completions that one request may ask for, as OpenAI allows; of all its prompts together."""
MAX_ALLOWED = 1024
"""Texts that a request may allow; the sets of ten letters are 1,023."""
MAX_TOP = 20
"""Most probable tokens that a request may ask for, as OpenAI and vLLM allow."""
SERVER_ERRORS = (500, 504)


def _integer(value: object) -> object:
    # JSON has one type of numbers: 8.0 is what some clients write for 8.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_ids(value: object) -> bool:
    # bool is an int in Python: `true` would be token 1.
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value) and bool(value)


def _prompts(value: Any) -> Any:
    """Return the texts and rows of token ids in the four forms that OpenAI allows."""
    values = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not values or not all((isinstance(prompt, str) and prompt) or _is_ids(prompt) for prompt in values):
        raise ValueError("a text, token ids, or a list of either is needed, and none of them empty")
    return [prompt if isinstance(prompt, str) else TokenIds(tuple(prompt)) for prompt in values]


def only(neutral: object) -> AfterValidator:
    """Return the check of a field that is not supported: any value but the one that asks for nothing is refused."""

    def check(value: object) -> object:
        if value != neutral:
            raise ValueError(f"only {neutral!r} is possible here")
        return value

    return AfterValidator(check)


Integer = Annotated[int, BeforeValidator(_integer)]
Top = Annotated[Integer, Field(ge=0, le=MAX_TOP)]


class TextPart(BaseModel):
    """A part of a message; images and the like are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a conversation; names and other fields of it change nothing."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return role and text; `developer` is OpenAI's newer word for `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class StructuredOutputs(BaseModel):
    """`structured_outputs` of vLLM."""

    model_config = ConfigDict(strict=True, extra="forbid")

    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ALLOWED)]


class OpenAIRequest(ProtocolRequest):
    """What the routes have in common."""

    kind: ClassVar[str]
    """`object` of an answer."""
    event_kind: ClassVar[str]
    """`object` of an event."""
    id_prefix: ClassVar[str]

    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: str | list[str] = ""
    seed: int | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None

    # They change no answer, whatever they hold.
    user: object = None
    store: object = None
    metadata: object = None
    parallel_tool_calls: object = None
    service_tier: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None

    # They would change answers and are not supported.
    best_of: Annotated[object, only(1)] = None
    presence_penalty: Annotated[object, only(0)] = None
    frequency_penalty: Annotated[object, only(0)] = None
    logit_bias: Annotated[object, only({})] = None
    tools: Annotated[object, only([])] = None
    tool_choice: Annotated[object, only("none")] = None
    response_format: Annotated[object, only({"type": "text"})] = None

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """Return what is to be answered or continued."""

    @abstractmethod
    def top(self) -> int | None:
        """Return how many of the most probable tokens are wanted at each place; None: no log-probabilities."""

    @abstractmethod
    def content(self, completion: "Completion") -> dict[str, object]:
        """Return the text of a choice of a whole answer."""

    @abstractmethod
    def delta(self, text: str | None, first: bool) -> dict[str, object]:
        """Return more text of a choice, None at its end, as an event holds it."""

    @abstractmethod
    def token_logs(self, completion: "Completion") -> dict[str, object]:
        """Return the log-probabilities of a completion's tokens."""

    @staticmethod
    def key(headers: Mapping[str, str]) -> str:
        """Return the bearer's token."""
        return headers.get("authorization", "").removeprefix("Bearer ")

    @staticmethod
    def error(refused: Refused) -> dict[str, object]:
        """Return OpenAI's error object."""
        kind = "server_error" if refused.status in SERVER_ERRORS else "invalid_request_error"
        kind = "authentication_error" if refused.status == 401 else kind
        return {"error": {"message": str(refused), "type": kind, "param": refused.field, "code": None}}

    def generation(self) -> GenerationRequest:
        """Return what is wanted of the model.

        Raises:
            Refused: fields that do not go together.
        """
        prompts, top = self.prompts(), self.top()
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options: only with stream.", "stream_options")
        if top is not None and self.stream:
            raise Refused(400, "logprobs: not while streaming. Leave out stream.", "logprobs")
        if self.structured_outputs is not None and self.stream:
            raise Refused(400, "structured_outputs: not while streaming. Leave out stream.", "structured_outputs")
        if (total := len(prompts) * self.n) > MAX_CHOICES:
            raise Refused(400, f"n: {total} answers to all prompts; {MAX_CHOICES} are possible.", "n")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        return GenerationRequest(
            prompts,
            n=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p or 1.0,
            stop=[stop for stop in stops if stop],
            seed=self.seed,
            top_logprobs=top,
            choices=self.structured_outputs.choice if self.structured_outputs is not None else (),
        )

    def answer(self, completions: "Sequence[Completion]", name: str) -> dict[str, object]:
        """Return the completions as one object."""
        choices = [
            {
                "index": index,
                **self.content(completion),
                "finish_reason": completion.finish,
                "logprobs": None if self.top() is None else self.token_logs(completion),
            }
            for index, completion in enumerate(completions)
        ]
        return {**self.envelope(self.kind, name), "choices": choices, "usage": self.usage(completions)}

    def events(self, name: str) -> "Stream":
        """Return the completions as events."""
        return Stream(self, name)

    def envelope(self, kind: str, name: str) -> dict[str, object]:
        """Return what an object of this kind begins with."""
        return {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
        }

    def usage(self, completions: "Sequence[Completion]") -> dict[str, int]:
        """Return the numbers of tokens; a prompt counts once, however many of the completions are of it."""
        prompt_tokens = sum(completion.prompt_tokens for completion in completions[:: self.n])
        completion_tokens = sum(completion.completion_tokens for completion in completions)
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


class ChatRequest(OpenAIRequest):
    """A conversation to be continued by its next message."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: Top | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    echo: Annotated[object, only(False)] = None

    def prompts(self) -> Sequence[Prompt]:
        """Return the one conversation."""
        return [[message.plain() for message in self.messages]]

    def generation(self) -> GenerationRequest:
        """Return what is wanted of the model; see vLLM's documentation for `continue_final_message`.

        Raises:
            Refused: fields that do not go together.
        """
        # vLLM's default is true, also beside continue_final_message, where it then refuses both.
        opens = self.add_generation_prompt is not False
        if self.add_generation_prompt is not None and opens == self.continue_final_message:
            field = "add_generation_prompt"
            raise Refused(400, f"{field}: false with continue_final_message, and only with it.", field)
        return replace(super().generation(), continues=self.continue_final_message)

    def top(self) -> int | None:
        """Return how many of the most probable tokens are wanted at each place; None: no log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs: needs logprobs: true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def content(self, completion: "Completion") -> dict[str, object]:
        """Return a message."""
        return {"message": {"role": "assistant", "content": completion.text}}

    def delta(self, text: str | None, first: bool) -> dict[str, object]:
        """Return more of a message; the first event of each says whose it is."""
        role = {"role": "assistant"} if first else {}
        return {"delta": {} if text is None else {**role, "content": text}}

    def token_logs(self, completion: "Completion") -> dict[str, object]:
        """Return one object for each token."""

        def entry(text: str, logprob: float) -> dict[str, object]:
            # A token that is part of a character has no bytes of its own here: its text is U+FFFD.
            return {"token": text, "logprob": logprob, "bytes": None if HALF in text else list(text.encode())}

        content = [
            {**entry(token.text, token.logprob), "top_logprobs": [entry(*top) for top in token.top]}
            for token in completion.logprobs
        ]
        return {"content": content, "refusal": None}


class CompletionRequest(OpenAIRequest):
    """Texts or token ids to continue; they go to the model without its template."""

    kind = event_kind = "text_completion"
    id_prefix = "cmpl"

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: Annotated[Integer, Field(ge=0)] | None = None
    logprobs: Annotated[Top | None, BeforeValidator(lambda value: None if value is False else value)] = None
    echo: bool = False

    def prompts(self) -> Sequence[Prompt]:
        """Return texts and rows of ids."""
        return self.prompt

    def generation(self) -> GenerationRequest:
        """Return what is wanted of the model.

        Raises:
            Refused: fields that do not go together.
        """
        if self.max_tokens == 0 and not self.echo:
            raise Refused(400, "max_tokens: 0 is possible with echo only.", "max_tokens")
        if self.echo and self.stream:
            raise Refused(400, "echo: not while streaming. Leave out stream.", "echo")
        request = super().generation()
        # The model always writes; with max_tokens 0 that is not shown.
        return replace(request, echo=self.echo, max_tokens=1 if self.max_tokens == 0 else request.max_tokens)

    def answer(self, completions: "Sequence[Completion]", name: str) -> dict[str, object]:
        """Return the completions as one object."""
        if self.max_tokens == 0:
            nothing: dict[str, Any] = {"text": "", "finish": "length", "completion_tokens": 0, "logprobs": ()}
            completions = [replace(completion, **nothing) for completion in completions]
        return super().answer(completions, name)

    def top(self) -> int | None:
        """Return how many of the most probable tokens are wanted at each place; None: no log-probabilities."""
        return self.logprobs

    def content(self, completion: "Completion") -> dict[str, object]:
        """Return the continuation, behind the prompt if that is wanted too."""
        return {"text": completion.prompt_text + completion.text}

    def delta(self, text: str | None, first: bool) -> dict[str, object]:
        """Return more of the continuation."""
        return {"text": text or ""}

    def token_logs(self, completion: "Completion") -> dict[str, object]:
        """Return one list for each property of the tokens."""
        before, front = completion.prompt_logprobs, len(completion.prompt_text)
        tokens = [*before, *completion.logprobs]
        # Tokens of equal text are one key: the most probable one, the first, is to stay.
        tops: list[dict[str, float] | None] = [dict(reversed(token.top)) for token in tokens]
        logs: list[float | None] = [token.logprob for token in tokens]
        if before:
            tops[0] = logs[0] = None
        offsets = [token.start for token in before] + [front + token.start for token in completion.logprobs]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": logs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class Stream:
    """The completions of one request as server-sent events, while they are written."""

    def __init__(self, request: OpenAIRequest, name: str) -> None:
        """Begin the stream of an answer by the model called `name`."""
        self._request, self._head = request, request.envelope(request.event_kind, name)
        self._counted = request.stream_options is not None and request.stream_options.include_usage
        self._sent: dict[int, str] = {}
        """Of each choice that has begun, the text that was sent."""

    def progress(self, index: int, text: str) -> str:
        """Return an event with what is new in a choice's text so far; empty if nothing is."""
        first = index not in self._sent
        part = text[len(self._sent.get(index, "")) :]
        if not part and not first:
            return ""
        self._sent[index] = self._sent.get(index, "") + part
        return self._choice(index, self._request.delta(part, first), None)

    def end(self, completions: "Sequence[Completion]") -> Iterator[str]:
        """Yield the rest of the texts, why they ended, and the numbers of tokens if they are wanted."""
        for index, completion in enumerate(completions):
            yield self.progress(index, completion.text)
            yield self._choice(index, self._request.delta(None, False), completion.finish)
        if self._counted:
            yield event({**self._head, "choices": [], "usage": self._request.usage(completions)})
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, delta: Mapping[str, object], finish: str | None) -> str:
        choice = {"index": index, **delta, "finish_reason": finish, "logprobs": None}
        return event({**self._head, "choices": [choice], **({"usage": None} if self._counted else {})})


ROUTES: Mapping[str, type[OpenAIRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


def model_object(name: str) -> dict[str, object]:
    """Return how `/v1/models` describes the model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "cmexam_tune"}
