"""A trained run for other libraries, questions as other tools' tasks, and results that others can recompute."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cmexam_tune.config import Config
from cmexam_tune.core import cli, files, libraries
from cmexam_tune.core.cli import File, Flag, Folder, Override
from cmexam_tune.core.errors import UserError
from cmexam_tune.interop import reward_files, tasks
from cmexam_tune.interop.sealing import sealed_folder

if TYPE_CHECKING:
    import torch

    from cmexam_tune.models.families import Loaded

Format = Literal["hf", "released", "peft", "chatglm"]
WHOLE: tuple[Format, ...] = ("hf", "released")
PROGRAM = "export"
PROBES = (
    "患者，男，45岁，反复上腹痛3年，餐后缓解，最可能的诊断是",
    "问题: 下列药物中属于β受体阻断药的是, \n 选项: A 普萘洛尔\nB 硝苯地平\nC 卡托普利",
    "Which of the following is 37.2?",
)
"""Texts on which the export must give the trained model's logits."""
TOLERANCE = {"torch.float32": 1e-3, "torch.float16": 2e-2, "torch.bfloat16": 1e-1}
"""Largest difference of logits, relative to the largest logit: rounding of merged weights in each type."""


def export(
    run: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    merge: bool = False,
    format: Format | None = None,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    push: str | None = None,
    licence: str | None = None,
    base_model: str | None = None,
    public: bool = False,
) -> Path:
    """Write the model of a run to the folder `out` and return it.

    Args:
        run: folder of a finished training run, or several with LoRA on one base: the exact mean of their updates.
        out: folder to write; it appears only when the export has been read back and gives the same logits.
        merge: put a LoRA adapter into its base; the result is a whole model.
        format: `hf` (whole model as transformers loads it), `released` (whole model in the layout of its release:
            Baichuan, Qwen-1, InternLM), `peft` (adapter) or `chatglm` (prefix in the ChatGLM authors' format).
            Default: adapters as adapters, whole models and with `merge` hf, or released where transformers has no
            such network (Baichuan-13B).
        overwrite: replace an earlier export at `out`; nothing else is ever replaced.
        overrides: changes to the run's config, for example a base model that has moved.
        push: put the export on the hub, too: `owner/name`.
        licence: identifier for the card, such as apache-2.0; needed to push.
        base_model: name of the base model on the hub; needed to push where the run has it in a folder.
        public: a repository that `push` makes can be seen by everybody.

    Raises:
        UserError: a combination that cannot be, an output that exists, or an export that answers differently.
    """
    libraries.quiet()
    from cmexam_tune.interop.exporting import averaging, hub, model_card, modelfile
    from cmexam_tune.training.run_directory import run as runs

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("export: one process writes a model. Start it without torchrun or another launcher.")
    folders = [run] if isinstance(run, str | Path) else [*run]
    run = folders[0]
    # Twice: the runs are not read before it is sure that the output is none of them, and only they name their base.
    target = files.check_folder(out, PROGRAM, overwrite, keep=folders)
    config = runs.open_run(run, overrides).config
    base = [config.model.model_name_or_path, config.model.adapter_name_or_path]
    files.check_folder(out, PROGRAM, overwrite, keep=[path for path in base if path and Path(path).exists()])
    chosen = _format(config, merge, format)
    if push is not None:
        hub.check(push, licence, base_model or model_card.hub_id(config))
    writer = {"hf": _whole, "released": _whole, "peft": _adapter, "chatglm": _authors}[chosen]
    # The adapter goes onto whole weights, also where it was trained beside weights of 4 bits.
    with contextlib.ExitStack() as stack:
        if len(folders) > 1:
            run = stack.enter_context(averaging.averaged(folders, overrides))
        scores = model_card.read_scores(run)  # a damaged file is told before minutes are spent on the weights
        _, loaded = runs.load(run, [*overrides, "model.load_in_4bit=false"])
        # Before the writer gives the tokenizer a chat template of its own.
        ollama = modelfile.written(config, loaded) if chosen in WHOLE else None
        staged = stack.enter_context(files.new_folder(target, PROGRAM, overwrite))
        writer(config, loaded, Path(run) / runs.ADAPTER, staged, chosen)
        if isinstance(ollama, modelfile.Modelfile):
            (staged / "Modelfile").write_text(ollama.text(), encoding="utf-8", newline="\n")
        card = model_card.card(
            config,
            loaded,
            chosen,
            ollama,
            scores=scores,
            averaged=len(folders),
            licence=licence,
            base_id=base_model,
        )
        (staged / "README.md").write_text(card, encoding="utf-8")
    if push is not None:
        cli.note(f"pushed to {hub.push(target, push, public=public)}")
    return target


def _format(config: Config, merge: bool, requested: Format | None) -> Format:
    """Return the format, or say why it cannot be."""
    from cmexam_tune.training.run_directory import run as runs

    family, method = runs.parts(config)
    standalone, name = method.standalone, config.tuning.method
    format: Format = requested or ("hf" if merge or standalone else "peft")
    if merge and format not in WHOLE:
        raise UserError(f"--merge gives a whole model, --format {format} does not. Leave one of them out.")
    if merge and standalone:
        raise UserError(f"--merge: a run with tuning.method={name} is a whole model already. Leave it out.")
    if format in WHOLE and not standalone and not method.merges:
        raise UserError("a prefix cannot be merged into weights. Use --format peft, or chatglm for ChatGLM models.")
    if format in WHOLE and not standalone and not merge:
        raise UserError(f"--format {format}: the run is an adapter. Add --merge to put it into its base model.")
    if format == "peft" and standalone:
        raise UserError(f"--format peft: a run with tuning.method={name} is a whole model. Use --format hf.")
    if format == "chatglm" and not (method.is_prefix and family.takes_authors_prefix):
        raise UserError(f"--format chatglm: needs P-tuning on a ChatGLM, this is {name} on {config.model.family}.")
    if format == "peft" and config.model.adapter_name_or_path is not None:
        raise UserError(
            f"--format peft: the adapter sits on {config.model.model_name_or_path} plus "
            f"{config.model.adapter_name_or_path}, which PEFT cannot name as a base. Use --merge."
        )
    if format in WHOLE and format not in (possible := family.whole_formats(config.model)):
        if requested is None:
            return possible[0]
        why = {
            "hf": "transformers has no class that computes what this model does (ALiBi)",
            "released": f"{config.model.model_name_or_path} is laid out as transformers' own class",
        }
        raise UserError(f"--format {format}: {why[format]}. Use --format {possible[0]}.")
    return format


def _whole(config: Config, loaded: "Loaded", adapter: Path, out: Path, format: Format) -> None:
    """Write a whole model, merged if the run is an adapter, as transformers' own class or as it was released."""
    from cmexam_tune.interop.exporting import saved_files
    from cmexam_tune.models.released import Release
    from cmexam_tune.training.run_directory import run as runs

    family, method = runs.parts(config)
    expected = logits(loaded)
    model: Any = loaded.model
    if not method.standalone:
        model = model.merge_and_unload(safe_merge=True)
    if family.task == "generate":
        # Training turned the cache off; whoever loads the export expects transformers' default.
        model.config.use_cache = True
    if format == "hf" and isinstance(model, Release):
        model = model.in_transformers()
    model.save_pretrained(out)
    saved_files.save_tokenizer(config, loaded, out)
    saved_files.add_older_names(out)
    exported = dataclasses.replace(
        config.model,
        load_in_4bit=False,
        model_name_or_path=str(out),
        adapter_name_or_path=None,
        revision=None,
        config={},
    )
    # Read back from the disk alone, as its next user will.
    del model
    _compare(expected, lambda: family.load(exported), "the exported model")


def _adapter(config: Config, loaded: "Loaded", adapter: Path, out: Path, format: Format) -> None:
    """Copy the adapter, with the tokenizer, and read it back with PEFT alone."""
    from cmexam_tune.interop.exporting import saved_files
    from cmexam_tune.models.families import Loaded
    from cmexam_tune.training.run_directory import run as runs

    shutil.copytree(adapter, out, dirs_exist_ok=True)
    saved_files.save_tokenizer(config, loaded, out)
    family, method = runs.parts(config)
    expected = logits(loaded)

    def plain() -> "Loaded":
        return Loaded(method.open_in_peft(loaded.model, lambda: family.load(config.model).model, out), loaded.tokenizer)

    if method.in_peft(family):
        _compare(expected, plain, "the adapter in plain PEFT")
    else:
        cli.note("note: PEFT has no prefix for this family's models; the adapter works with cmexam_tune only.")


def _authors(config: Config, loaded: "Loaded", adapter: Path, out: Path, format: Format) -> None:
    """Write the prefix as the ChatGLM authors' trainer does."""
    from cmexam_tune.models.families.chatglm.authors_prefix import write_authors_prefix

    write_authors_prefix(loaded.model, out)


def logits(loaded: "Loaded") -> "list[torch.Tensor]":
    """Return the logits [tokens or 1, outputs] of the probe texts, in float32 on the CPU."""
    from cmexam_tune.models.precision import inference

    rows = []
    for text in PROBES:
        ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"].to(loaded.model.device)
        with inference(loaded.model):
            rows.append(loaded.model(input_ids=ids).logits[0].float().cpu())
    return rows


def _compare(expected: "list[torch.Tensor]", load: "Callable[[], Loaded]", what: str) -> None:
    """Refuse an export whose logits are not those of the trained model."""
    loaded = load()
    model: Any = loaded.model
    model.eval()
    limit = TOLERANCE.get(str(loaded.model.dtype), max(TOLERANCE.values()))
    for text, before, after in zip(PROBES, expected, logits(loaded), strict=True):
        difference = float((before - after).abs().max() / before.abs().max().clamp(min=1e-6))
        if not difference <= limit:
            raise UserError(
                f"{what} does not answer like the trained one: on {text[:20]!r} logits differ by {difference:.2g} of "
                f"the largest, at most {limit:g} is rounding. Nothing was written; train with model.dtype=float32."
            )


EXAMPLES = """examples:
  cmexam-tune export --run runs/lora_llama --out models/exam-llama --merge
  cmexam-tune export --run runs/lora_baichuan2 --out models/exam-baichuan2 --merge --format released
  cmexam-tune export --run runs/lora_llama --out adapters/exam-llama --format peft
  cmexam-tune export --run runs/ptuning_chatglm --out adapters/exam-chatglm --format chatglm
  cmexam-tune export --run runs/lora_qwen --out models/exam-qwen --push my-name/exam-qwen --license apache-2.0
  cmexam-tune export --task lm-eval --questions data/cmexam/test.questions.jsonl --out tasks/cmexam
  cmexam-tune export --rewards verl --questions data/cmexam/train.questions.jsonl --out rewards/verl
  cmexam-tune export --results predictions.jsonl --questions data/cmexam/test.questions.jsonl --out sealed/lora_llama
  cmexam-tune export --average runs/seed1 runs/seed2 runs/seed3 --out adapters/exam-mean"""


@cli.program(export, EXAMPLES)
def main(
    *overrides: Override,
    run: Folder | None = None,
    average: Annotated[Sequence[str], Flag("RUN")] = (),
    task: tasks.Tool | None = None,
    rewards: reward_files.Framework | None = None,
    results: File | None = None,
    questions: File | None = None,
    style: Annotated[str | None, Flag("NAME|FILE")] = None,
    name: str = "",
    benchmark: Annotated[str | None, Flag("OWNER/NAME")] = None,
    limit: int | None = None,
    out: Folder,
    merge: bool = False,
    format: Format | None = None,
    overwrite: bool = False,
    push: Annotated[str | None, Flag("OWNER/NAME")] = None,
    licence: Annotated[str | None, Flag("ID", names=("--license",))] = None,
    base_model: Annotated[str | None, Flag("OWNER/NAME")] = None,
    public: bool = False,
) -> None:
    """Write the model of a run so that transformers, PEFT or the ChatGLM authors' scripts load it.

    The export is read back first: it is kept only if it gives the trained model's logits. Or, with --task, write
    questions as the task files of another evaluation tool; `evaluate` reads what it predicts. Or, with --rewards, write
    questions and the rewards of their answers for another framework of reinforcement learning. Or, with --results, seal
    predictions: outputs, config and scores without the questions' texts, which `evaluate --verify` recomputes
    and `leaderboard` ranks.

    Args:
        run: folder of a finished training run.
        average: several runs: the mean of their LoRA adapters.
        task: write --questions as this tool's task files.
        rewards: write the reward file of this framework, and --questions in its format.
        results: predictions to seal, with what `predict` recorded beside them.
        questions: with --task, --rewards or --results: a questions file.
        style: with --task or --rewards: prompt style or file (default: cmb_answer, for --rewards cmb_cot).
        name: with --results: what the system is called (default: its run, model or file).
        benchmark: with --results: dataset of the hub whose leaderboard the score is for; adds eval_results.yaml.
        limit: with --results: seal only the first so many questions (after `predict --limit`).
    """
    source = cli.exactly_one(run=run, average=average, task=task, rewards=rewards, results=results)
    of_models = any((merge, format, overrides, push, licence, base_model, public))
    of_results = bool(name or benchmark or limit is not None)
    # A flag of another kind of export is refused and not passed over: whoever gives it expects it to count.
    if results and (questions is None or of_models or style):
        raise cli.WrongUsage(
            "--results takes --questions, --name, --benchmark, --limit, --out and --overwrite, and needs the first."
        )
    if of_results and not results:
        raise cli.WrongUsage("--name, --benchmark and --limit belong to --results.")
    if (task or rewards) and (questions is None or of_models):
        raise cli.WrongUsage(
            "--task and --rewards take --questions, --style, --out and --overwrite, and need --questions."
        )
    if (questions or style) and not (task or rewards or results):
        raise cli.WrongUsage("--questions belongs to --task, --rewards and --results, --style to the first two.")
    if average and len(average) < 2:
        raise cli.WrongUsage("--average: name at least two runs.")

    exam = questions or ""  # there wherever it is read, as was checked
    if results:
        day = date.today().isoformat()
        seal = sealed_folder.seal(
            results, exam, out, PROGRAM, day, name=name, benchmark=benchmark, limit=limit, overwrite=overwrite
        )
        cli.say(f"{out}\nseal: {seal}")
    elif task:
        cli.say(str(tasks.export(task, exam, out, PROGRAM, style=style or tasks.STYLE, overwrite=overwrite)))
    elif rewards:
        chosen = style or reward_files.STYLE
        cli.say(str(reward_files.export(rewards, exam, out, PROGRAM, style=chosen, overwrite=overwrite)))
    else:
        folder = export(
            source,
            out,
            merge=merge,
            format=format,
            overwrite=overwrite,
            overrides=overrides,
            push=push,
            licence=licence,
            base_model=base_model,
            public=public,
        )
        cli.say(str(folder))


if __name__ == "__main__":
    cli.run(main)
