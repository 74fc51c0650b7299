"""GRPO (arXiv 2402.03300) by TRL: answers are sampled, and those that the key judges better become more probable."""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.errors import ConfigError, DataError
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family
from cmexam_tune.rewards import Reward, answer_place
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.task import Task

if TYPE_CHECKING:
    from cmexam_tune.training.safe_trainer import SafeTrainer

GENERATIONS = 8
"""TRL's own default."""
COMPLETION_LENGTH = 512
"""TRL's own default."""


class GRPO(Objective):
    """Reinforcement by the terms of the section `reward`."""

    trl_config: ClassVar[str | None] = "GRPOConfig"
    defaults: ClassVar[Mapping[str, object]] = {
        "scale_rewards": "none",
        "loss_type": "dr_grpo",
        "epsilon_high": 0.28,
        "disable_dropout": True,
        # Weights of the terms stand in the section `reward`.
        "log_completions": False,
    }

    def check(self, config: Config, family: Family, method: Method) -> None:
        """Refuse what TRL or the strict reader cannot do."""
        super().check(config, family, method)
        style = prompts.resolve_style(config.prompt)
        if "{letters}" not in style.write:
            raise ConfigError(
                f"prompt.style={style.name}: its completions state no letters, so no output could earn a reward. Use "
                "answer, cmb_answer, cmb_cot or answer_explain."
            )
        if "reward_weights" in config.training.arguments:
            raise ConfigError("training.reward_weights: the weights of the terms stand in the section reward.")
        values = config.training.arguments
        if not values.get("use_vllm"):
            return
        if values.get("vllm_mode") != "server":
            if not importlib.util.find_spec("vllm"):
                # It pins a torch and a transformers of its own; see docs/verdicts.md.
                raise ConfigError(
                    "training.use_vllm: vLLM is not installed here, and hardly can be: it pins other versions. Start "
                    "its server in an environment of its own and set training.vllm_mode=server (docs/verdicts.md)."
                )
        elif method.standalone:
            raise ConfigError(
                "training.vllm_mode=server: the server is sent an adapter after each step, and cannot be sent a whole "
                "model. Use tuning.method=lora."
            )
        elif config.model.adapter_name_or_path:
            raise ConfigError(
                "model.adapter_name_or_path: with training.vllm_mode=server the server has to know the model that is "
                "started from. Merge it (`export --merge`), serve that, and name it as model.model_name_or_path."
            )

    def rows_per_question(self, config: Config) -> int:
        """Return how many outputs are sampled for a question."""
        return int(config.training.arguments.get("num_generations") or GENERATIONS)

    def foreseen(self, config: Config, shape: Any, longest: int) -> list[str]:
        """Return the outputs and tokens of a step, and the cache of keys and values of the largest generation."""
        values = config.training.arguments
        micro = int(values.get("per_device_train_batch_size", 8)) * int(values.get("gradient_accumulation_steps", 1))
        questions = config.training.global_batch_size
        outputs = questions * self.rows_per_question(config) if questions else micro
        length = int(values.get("max_completion_length") or COMPLETION_LENGTH)
        rows, slots = min(config.generation.prompts_at_once, outputs), longest + length
        heads = int(getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads)
        width = int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
        # Keys and values, of 2 bytes a number.
        cache = 4 * int(shape.num_hidden_layers) * heads * width * rows * slots
        return [
            f"outputs in each step      {outputs:>8}  ({self.rows_per_question(config)} of each question, at most "
            f"{length} tokens: {outputs * length:,} written, {outputs * slots:,} trained on)",
            f"largest generation        {cache / 2**30:>8.2f} GiB of keys and values in half precision ({rows} outputs "
            f"of {slots} tokens), beside what is listed below",
        ]

    def trainer(self, task: Task) -> "SafeTrainer":
        """Return the trainer of sampled outputs."""
        from cmexam_tune.training.policy_trainer import PolicyTrainer

        questions = list(task.train)
        if unanswered := [question.id for question in questions if question.answer is None]:
            raise DataError(
                f"{', '.join(task.train.paths)}: {len(unanswered):,} questions have no answer, the first is "
                f"{unanswered[0]}; no output for them could be judged. Leave them out."
            )
        place = answer_place(prompts.resolve_style(task.config.prompt))
        if place == "start" and task.arguments.process_index == 0:
            cli.note(
                "note: the style states the answer before its explanation, so what is rewarded is the answer alone; "
                "cmb_cot reasons first"
            )
        return PolicyTrainer(task, questions, Reward(task.config.reward, place))
