"""A model that vLLM or SGLang computes, asked in token ids: its answers are those of the model in this process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import HALF, THINK, THOUGHT
from cmexam_tune.models import Loaded
from cmexam_tune.models.causal import Codec
from cmexam_tune.models.completion import LEAST, Completion
from cmexam_tune.models.engines.server import EngineServer
from cmexam_tune.models.families.endpoint.client import Body
from cmexam_tune.models.families.endpoint.remote import Remote
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation import sampling
from cmexam_tune.models.generation.allowed_answers import AnswerTrie
from cmexam_tune.models.generation.prompt_tokens import Item, PromptTokens, Ranking, Scores
from cmexam_tune.prompts import PromptRequest

RETRIES = 2
"""Times that a request is repeated: nobody else is on the way to a server of our own."""
QUESTIONS_AHEAD = 8
"""Questions for each request under way whose answers are walked down together."""


@dataclass(frozen=True)
class Place:
    """A place inside the allowed answers of a question, and how probable the way there is."""

    item: Item
    node: AnswerTrie
    ids: Ids
    """The prompt, and the way."""
    logprob: float = 0.0


class ServedModel(PromptTokens, Remote):
    """A model at a server that this program has started; a `models.completion.TextEngine`.

    Prompts, stop texts, allowed answers and the reading of what was written are those of a local model; sending,
    repeating and counting are those of any address.
    """

    local_only = ()

    def __init__(self, codec: Codec, loaded: Loaded, config: Config) -> None:
        """Check the settings; the server is started when it is first needed.

        Raises:
            UserError: a setting that no server keeps.
        """
        remote: Any = loaded.model
        self._server: EngineServer = remote.server
        address = replace(
            config.model,
            model_name_or_path=self._server.model_name,
            base_url=f"{self._server.url}/v1",
            api_key_env=None,
            follow_redirects=False,
        )
        patient = replace(config.generation, max_retries=min(RETRIES, config.generation.max_retries))
        Remote.__init__(self, replace(config, model=address, generation=patient))
        PromptTokens.__init__(self, codec, loaded.tokenizer, config, remote.positions)
        self._ends = sampling.named_ends(remote.generation_config, loaded.tokenizer)
        self._thinking_end: Ids = loaded.tokenizer(THOUGHT, add_special_tokens=False)["input_ids"]
        self._settings["max_tokens"] = self.new_tokens
        if thinking := config.generation.thinking_tokens:
            # The longest possible text; each is cut by its own budget, see `_within_budget`.
            self._settings["max_tokens"] += thinking + len(self._thinking_end)
        self._extra = {
            **self._extra,
            "stop_token_ids": sorted(self._ends),
            "return_token_ids": True,
            "skip_special_tokens": True,
        }
        self._compared = False
        self._scores: bool | None = None

    @property
    def chats(self) -> bool:
        """Whether the prompts are the server's own: never."""
        return False

    def effective_generation_config(self) -> dict[str, object]:
        """Return what computed the answers, and the fields that every request has."""
        self._server.start()
        return {**self._server.provenance(), **self._settings, **self._extra, "stop": list(self.stops)}

    def generate(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Let the model write, up to an EOS, a stop text or the limit; see `Remote.generate`."""
        return map(self._as_local, super().generate(requests))

    def _as_local(self, completion: Completion) -> Completion:
        """Return a text as a local model would have written the same tokens."""
        if completion.finish == "error":
            return completion
        if not completion.token_ids:  # an older server, or nothing was written
            text = completion.text.rstrip(HALF) if completion.finish == "length" else completion.text
            return replace(completion, text=THINK * self.codec.thinks + text)
        ids = self._within_budget(list(completion.token_ids))
        written = self.read(ids, self._ends, self.stops)
        return replace(completion, text=written.text, finish=written.finish, completion_tokens=len(ids))

    def _within_budget(self, ids: Ids) -> Ids:
        """Return the tokens up to where a local model would have stopped thinking, or writing after it."""
        thinking, end = self.config.generation.thinking_tokens, self._thinking_end
        if not thinking:
            return ids
        behind = (at + len(end) for at in range(thinking - len(end) + 1) if ids[at : at + len(end)] == end)
        thought = next(behind, None)
        return ids[:thinking] if thought is None else ids[: thought + self.new_tokens]

    def _constrained(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield completions that can only be allowed answers: of each place's tokens the most probable one."""
        if not self._scores_tokens(requests[0]):
            yield from super()._constrained(requests)
            return
        for item, outcome in self._walk(requests, whole=False, greedy=True):
            yield outcome if isinstance(outcome, Completion) else self.choice(item, *outcome)

    def _likelihood(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield the most probable of all allowed answers.

        Raises:
            UserError: the server sends only its most probable tokens, and the mode needs more; see `Remote`.
        """
        if not self._scores_tokens(requests[0]):
            yield from super()._likelihood(requests)
            return
        ranking = Ranking(self, self.scores)
        for item, outcome in self._walk(requests, whole=ranking.whole):
            yield outcome if isinstance(outcome, Completion) else ranking.best(item, outcome)

    def scores(self, items: Sequence[Item], whole: bool = True) -> Iterator[tuple[Item, Scores]]:
        """Yield each item with the log-probability of each of its allowed answers, summed over the answer's tokens.

        Without `whole` the tokens that all answers of a question start with are left out of the sums.

        Raises:
            UserError: a request fails.
        """
        for item, outcome in self._walk([item.request for item in items], whole=whole):
            if isinstance(outcome, Completion):
                raise UserError(f"{self._server.name}: {outcome.reason}")
            yield item, outcome

    def _walk(
        self, requests: Sequence[PromptRequest], *, whole: bool, greedy: bool = False
    ) -> Iterator[tuple[Item, Scores | Completion]]:
        """Yield each item with the log-probabilities of its allowed answers, or with the request that failed.

        The server is asked for the tokens that may follow at each place of the tree of allowed answers; places at the
        same depth are asked together.

        Args:
            requests: the questions.
            whole: ask also for what all answers of a question start with.
            greedy: go on from the most probable token only: one answer is left.
        """
        size = QUESTIONS_AHEAD * self.config.generation.concurrency
        for first in range(0, len(requests), size):
            places = [self._root(item, whole=whole) for item in self.ask(requests[first : first + size])]
            open_places = dict.fromkeys((place.item.question.id for place in places), 1)
            outcomes: dict[str, Scores | Completion] = {key: {} for key in open_places}
            while places:
                deeper = []
                for place, reply in self._logprobs(places):
                    key = place.item.question.id
                    open_places[key] -= 1
                    outcome = outcomes[key]
                    if isinstance(reply, Completion):
                        outcomes[key] = reply
                    elif isinstance(outcome, dict):
                        best = max(reply, key=lambda token: (reply[token], -token))
                        for token in [best] if greedy else reply:
                            node, logprob = place.node.children[token], place.logprob + reply[token]
                            if node.children:
                                deeper.append(Place(place.item, node, [*place.ids, token], logprob))
                                open_places[key] += 1
                            else:
                                outcome[str(node.letters)] = logprob
                    if not open_places[key]:
                        yield place.item, outcomes[key]
                places = deeper

    def _root(self, item: Item, *, whole: bool) -> Place:
        start, trie = self.answer_trie(item.question)
        if not whole:
            return Place(item, trie, item.row + start)
        for token in reversed(start):
            trie = AnswerTrie({token: trie})
        return Place(item, trie, item.row)

    def _logprobs(self, places: Sequence[Place]) -> Iterator[tuple[Place, dict[int, float] | Completion]]:
        """Yield each place with token -> log-probability of what may follow there, or the completion that failed."""
        # Each place has a request of its own, by which its completion is known again.
        asked = {id(request): (request, place) for place in places for request in [replace(place.item.request)]}
        bodies = ((request, self._scoring(place)) for request, place in asked.values())
        for completion in self._sent(self.client.send(bodies)):
            _, place = asked[id(completion.request)]
            logprobs = _by_token(completion, place.node)
            failed = replace(completion, request=place.item.request, text="", finish="error")
            if completion.finish != "error" and logprobs is None:
                failed = replace(failed, reason="the server sent no log-probabilities of the letters.")
            yield place, failed if logprobs is None else logprobs

    def _scoring(self, place: Place) -> dict[str, object]:
        """Return a request for the log-probabilities of what may follow at a place."""
        tokens = list(place.node.children)
        beyond = {"logprob_token_ids": tokens, "return_tokens_as_token_ids": True}
        fields = {"prompt": place.ids, "max_tokens": 1, "temperature": 0.0, "logprobs": len(tokens)}
        return {**fields, "extra_body": beyond}

    def _scores_tokens(self, first: PromptRequest) -> bool:
        """Return whether the server tells the log-probability of any token that it is asked for; found out once."""
        if self._scores is None:
            (item,) = self.ask([first])
            place = self._root(item, whole=False)
            self._begin(first)
            completion = self.client.ask(first, self._scoring(place))
            self._scores = _by_token(completion, place.node) is not None
            if not self._scores:
                cli.note(
                    f"{self._server.name} does not tell the log-probabilities of given tokens (logprob_token_ids, vLLM "
                    "0.32): its list of allowed texts and its most probable tokens are used."
                )
        return self._scores

    def _send(
        self, requests: Sequence[PromptRequest], request: Callable[[PromptRequest], Body]
    ) -> Iterator[Completion]:
        if requests:
            self._begin(requests[0])
        return self._sent(super()._send(requests, request))

    def _sent(self, completions: Iterator[Completion]) -> Iterator[Completion]:
        """Yield the completions; a server that has ended ends this program, too."""
        for completion in completions:
            if completion.finish == "error":
                self._server.check()
            yield completion

    def _begin(self, first: PromptRequest) -> None:
        """Start the server, and look once whether it makes the same tokens of a prompt."""
        self._server.start()
        template = self.codec.template
        if self._compared or template is None:
            return
        self._compared = True
        dialogue = first.dialogue()
        if dialogue.system is None:
            dialogue = dialogue._replace(system=self.config.prompt.system)
        told = self._server.get(
            "/tokenize",
            {
                "model": self._server.model_name,
                "prompt": template.render(dialogue),
                "add_special_tokens": not template.is_models_own,
            },
        )
        tokens = told.get("tokens") if isinstance(told, dict) else None
        (ours,) = self.codec.sources([dialogue])
        if tokens is not None and tokens != ours:
            cli.note(
                f"warning: {self._server.name} makes {len(tokens)} other tokens of a prompt than the {len(ours)} that "
                "the model was trained and is asked with here. It is sent ours."
            )

    def _head(self, question: Question) -> tuple[str, str]:
        """Return the answer's words before the letters, and what of them is not in the tokens all answers share."""
        head = "".join(super()._head(question))
        shared = str(self.tokenizer.decode(self.answer_trie(question)[0]))
        return (shared, head[len(shared) :]) if head.startswith(shared) else super()._head(question)

    def _prompt(self, item: PromptRequest, *, forced: bool) -> tuple[Body, Body]:
        """Return the prompt as ids, with the beginning that all allowed answers share if it is forced."""
        (asked,) = self.ask([item])
        start = self.answer_trie(item.question)[0] if forced else []
        stop = {"stop": self.stops} if self.stops else {}
        return {"prompt": asked.row + start, **stop}, {}


def _by_token(completion: Completion, node: AnswerTrie) -> dict[int, float] | None:
    """Return token of a child -> log-probability; None if the server did not report any of them."""
    if completion.finish == "error" or not completion.logprobs:
        return None
    logprob_of = dict(completion.logprobs[0].top)
    # A log-probability of minus infinity is not in the list.
    logprobs = {token: logprob_of.get(f"token_id:{token}") for token in node.children}
    if all(value is None for value in logprobs.values()):
        return None
    return {token: LEAST if value is None else value for token, value in logprobs.items()}
