"""`PolicyTrainer`: TRL's GRPO with our prompts, our decoder, our rewards, and checkpoints that survive a kill."""

import contextlib
import copy
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from cmexam_tune.core import cli
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.models import Loaded
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation.decoder import Decoder
from cmexam_tune.rewards import Output, Reward
from cmexam_tune.rewards.total import DECISIVE
from cmexam_tune.training.monitor import PolicyMonitor, TrainingMonitor
from cmexam_tune.training.policy_server import PolicyServer
from cmexam_tune.training.task import Task
from cmexam_tune.training.trl_trainer import TRLTrainer

RewardFunction = Callable[..., list[float]]


class PolicyTrainer(TRLTrainer, GRPOTrainer):  # type: ignore[misc]
    """GRPO on exam questions; a prompt is known to TRL by its question's id."""

    def __init__(self, task: Task, questions: Sequence[Question], reward: Reward) -> None:
        """Take what is trained, the questions to ask, and what outputs earn."""
        self.reward = reward
        self.by_id = {question.id: question for question in questions}
        args: Any = task.arguments
        args.reward_weights = list(reward.weights.values())
        served = args.use_vllm and args.vllm_mode == "server"
        args.use_vllm = args.use_vllm and not served  # TRL would look for a vLLM in this environment
        prompts = Dataset.from_dict({"prompt": list(self.by_id)})
        # TRL calls `rollout_func` experimental; tests/test_objectives.py fails when it changes.
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        super().__init__(
            task,
            questions,
            reward_funcs=[self._term(name) for name in reward.weights],
            train_dataset=prompts,
            eval_dataset=prompts,
            rollout_func=_rollout,
        )
        if served:
            # What TRL has to do with log-probabilities of another engine, it does as with its own.
            args.use_vllm = self.use_vllm = True
            self.vllm_generation, self._last_loaded_step = self, -1
        address = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        self.server = PolicyServer(address, self.run_folder / ".policy") if served else None
        self._served_name = ""
        # Between two generations TRL takes steps on stored outputs, which a checkpoint does not hold.
        steps = args.steps_per_generation * args.num_iterations
        self.resumable_every = math.lcm(steps, args.gradient_accumulation_steps) // args.gradient_accumulation_steps
        self._tokens_before = 0

    def make_monitor(self, fp16: bool) -> TrainingMonitor:
        """Return what judges rewards: on policy a loss of exactly 0 is no failure."""
        return PolicyMonitor(fp16=fp16, tell=cli.note)

    def summary(self) -> str:
        """Return what is trained, on what."""
        args: Any = self.args
        completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        text = (
            f"{self.trained_share()}; {len(self.questions):,} questions, {completions} outputs in each step "
            f"({args.num_generations} of each question, at most {args.max_completion_length} tokens)"
        )
        if self.resumable_every > 1:
            text += f"; checkpoints after every {self.resumable_every} steps, where outputs are drawn anew"
        return text

    def shown(self) -> str:
        """Return mean reward, share right and share of groups without signal of the last outputs."""
        seen = cast(PolicyMonitor, self.monitor).seen
        return ", ".join(f"{name} {value:.2f}" for name, value in seen.items())

    # Outputs

    def write(self, prompt_ids: Sequence[Ids]) -> list[Ids]:
        """Return what the model writes behind each prompt, up to and with its end, `generation.batch_size` at a time.

        TRL would let it write everything of a step at once, whatever the card holds.
        """
        args: Any = self.args
        chosen = copy.deepcopy(self.generation_config)
        chosen.use_cache = True
        ends, size, written = {*self.eos_token_ids}, self.config.generation.prompts_at_once, list[Ids]()
        with unwrap_model_for_generation(
            self.model_wrapped, self.accelerator, gather_deepspeed3_params=args.ds3_gather_for_generation
        ) as model:
            training = bool(model.training)
            decoder = self.family.engine(Loaded(model.eval(), self.loaded.tokenizer), self.config)
            assert isinstance(decoder, Decoder)
            for start in range(0, len(prompt_ids), size):
                for row in decoder.run(prompt_ids[start : start + size], chosen):
                    end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                    written.append(row[:end])
            model.train(training)
        return written

    def sync_weights(self) -> None:
        """Send the server the current adapter; TRL calls this before the first generation after a step."""
        assert self.server is not None
        state = self.state_dict_on_rank0()
        if self.args.process_index == 0:
            gathered = state if self.is_deepspeed_enabled else None
            self._served_name = self.server.load(lambda place: self.method.save(self.unwrapped_model, place, gathered))
        self._served_name = broadcast_object_list([self._served_name])[0]

    def written_by_server(self, prompt_ids: Sequence[Ids]) -> tuple[list[Ids], list[list[float]]]:
        """Return what the server writes behind each prompt, and the log-probabilities of the tokens."""
        assert self.server is not None
        args: Any = self.args
        chosen = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_completion_length,
                  "top_k": args.top_k, "min_p": args.min_p, "repetition_penalty": args.repetition_penalty}  # fmt: skip
        sampling = {name: value for name, value in chosen.items() if value is not None}
        return self.server.write(self._served_name, prompt_ids, sampling | (args.generation_kwargs or {}))

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, and let a server forget what it was given."""
        try:
            return super().train(*arguments, **options)
        finally:
            if self.server is not None and self.args.process_index == 0:
                with contextlib.suppress(UserError):  # a server that has gone has forgotten
                    self.server.unload()

    def prompt_ids(self, names: Sequence[str]) -> list[Ids]:
        """Return the prompts of the questions with these ids, one for each time that an id is named."""
        distinct = list(dict.fromkeys(names))
        items = self.decoder.ask(self.requests([self.by_id[name] for name in distinct]))
        ids = {item.question.id: item.ids for item in items}
        return [ids[name] for name in names]

    # Rewards

    def _term(self, name: str) -> RewardFunction:
        """Return a term as TRL calls it."""

        def term(
            prompts: list[str], completions: list[str], completion_ids: list[Ids], trainer_state: Any, **_: object
        ) -> list[float]:
            limit, ends = int(cast(Any, self.args).max_completion_length), {*self.eos_token_ids}
            return [
                self.reward.term(
                    name,
                    self.by_id[prompt],
                    Output(self.decoder.text(ids, ends), len(ids), limit),
                    trainer_state.global_step,
                )
                for prompt, ids in zip(prompts, completion_ids, strict=True)
            ]

        term.__name__ = name
        return term

    def _generate_and_score_completions(self, inputs: list[dict[str, str]]) -> dict[str, object]:
        """Zero the advantages of groups whose outputs are all right or all wrong, and collect metrics for the log.

        Whatever the other terms say: of a group that is all wrong only the differences of form would be learnt, at full
        size where advantages are scaled.
        """
        self.monitor.on_step_begin(list(dict.fromkeys(row["prompt"] for row in inputs)))
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        mode = "train" if self.unwrapped_model.training else "eval"
        total = len(inputs) * self.accelerator.num_processes
        # TRL has gathered them over all processes, a group's outputs side by side.
        exact = torch.tensor(list(self._logs["rewards"][DECISIVE])[-total:])
        groups = exact.view(-1, self.num_generations)
        silent = (groups == groups[:, :1]).all(dim=1)
        first = len(inputs) * self.accelerator.process_index
        mine = silent.repeat_interleave(self.num_generations)[first : first + len(inputs)]
        output["advantages"] = output["advantages"].masked_fill(mine.to(output["advantages"].device), 0.0)

        lengths = self.accelerator.gather(output["completion_mask"].sum(dim=1)).cpu().float()
        measured = {
            "share_right": float(exact.mean()),
            "groups_without_signal": float(silent.float().mean()),
            "length_right": float(lengths[exact == 1].mean()),
            "length_wrong": float(lengths[exact != 1].mean()),
        }
        for name, value in measured.items():
            self._metrics[mode][name].append(value)
        seen = {"reward": self._metrics[mode]["reward"][-1], "right": measured["share_right"]}
        cast(PolicyMonitor, self.monitor).on_groups(seen, measured["groups_without_signal"])
        self.tokens_done += self.state.num_input_tokens_seen - max(self._tokens_before, 0)
        self._tokens_before = self.state.num_input_tokens_seen
        return output


def _rollout(prompts: list[str], trainer: PolicyTrainer) -> dict[str, object]:
    """Write an output for each prompt: by our decoder, or by the engine that TRL is told to use."""
    args: Any = trainer.args
    ids, logprobs = trainer.prompt_ids(prompts), None
    if trainer.server is not None:
        completions, logprobs = trainer.written_by_server(ids)
    elif args.use_vllm or args.use_transformers_continuous_batching:
        completions, logprobs = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
    else:
        completions = trainer.write(ids)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs}
