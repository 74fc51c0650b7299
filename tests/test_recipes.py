"""Every recipe loads, passes --dry-run and runs two steps (or answers, off the shelf) with a tiny model."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import docs_commands
import kit
import pytest
import shell_stubs
from fake_openai import KEY, serving

from cmexam_tune import __main__, config, export, prompts, tiny
from cmexam_tune.config import installed_versions
from cmexam_tune.core import documents, files, jsonl
from cmexam_tune.core.schema import Prediction
from cmexam_tune.predict import main as predict_main
from cmexam_tune.predict import predict
from cmexam_tune.preprocess import preprocess
from cmexam_tune.report.papers import entries, published_tables
from cmexam_tune.train import main as train_main
from cmexam_tune.train import train
from cmexam_tune.training.objectives import Objective

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "cmexam_tune" / "sample"
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
TRAINED = [name for name in NAMES if not name.startswith(entries.ZERO_SHOT)]
SHELL = sorted((ROOT / "recipes").glob("*.sh"))
# CMExam's Table 3 (fine-tuned and off the shelf) and CMB's Tables 3 and 4.
PAPER_ROWS = {
    "BERT-CMExam", "RoBERTa-CMExam", "Huatuo-CMExam", "ChatGLM-CMExam", "LLaMA-CMExam", "Alpaca-CMExam",
    "Vicuna-CMExam", "ChatGLM", "LLaMA", "Vicuna", "Alpaca", "Huatuo", "DoctorGLM", "GPT-4", "GPT-3.5-turbo",
} | {line.name for table in ("table3", "table4") for line in published_tables.table("cmb", table).lines}  # fmt: skip
ENDPOINT = [name for name in NAMES if config.load_config(name).model.family == "endpoint"]
LOCAL = [name for name in NAMES if name not in ENDPOINT]


def kinds(names: Iterable[str]) -> list[str]:
    """Return one recipe for each family, template, style, base and way of training: others differ in numbers only."""
    recipes = {}
    for name in names:
        it = config.load_config(name)
        base = it.model.model_name_or_path[-4:] if it.model.family == "chatglm" else None
        adapter = "adapter" if it.model.adapter_name_or_path else None
        trained = (it.tuning.method, it.training.objective, it.model.head)
        recipes[it.model.family, it.prompt.template, it.prompt.style, base, adapter, trained] = name
    return list(recipes.values())


def test_a_name_is_one_recipe_and_its_folder_the_method() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for path in RECIPES:
        settings = config.load_config(path)
        folders = (settings.tuning.method, settings.training.objective, "zeroshot")
        assert path.parent.name in folders and path.name.startswith(f"{path.parent.name}_"), path


def test_every_row_has_a_recipe_and_every_recipe_an_entry() -> None:
    assert len(RECIPES) >= len(PAPER_ROWS) and set(entries.by_recipe()) == set(NAMES)
    assert {row.paper[1] for row in entries.by_recipe().values() if row.paper} == PAPER_ROWS
    both = {row.paper[1] for row in entries.by_recipe().values() if row.paper and row.recipe.endswith("_script")}
    assert both == {"ChatGLM-CMExam", "LLaMA-CMExam", "Alpaca-CMExam", "Vicuna-CMExam", "Huatuo-CMExam"}
    for row in entries.by_recipe().values():
        if row.paper not in (None, ("cmexam", "DoctorGLM")):
            assert max(row.published.get("accuracy", 0), row.published.get("accuracy_macro", 0)) > 0, row.recipe


@pytest.mark.parametrize("page", ["released.md", "released.zh.md"])
def test_every_row_is_in_the_table_of_rows(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").rpartition("\n## ")[2]
    rows = PAPER_ROWS - entries.NOTHING_TO_RUN.keys()
    assert sorted(row for row in rows if row.split(" (")[0] not in text) == []
    assert all((ROOT / "tests" / name).is_file() for name in re.findall(r"`(?:tests/)?(test_\w+\.py)`", text))


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_it_loads_strictly_and_says_what_it_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config.load_config(path)
    assert capsys.readouterr().err == "", "a recipe uses our own names, not aliases"
    assert settings.out == f"runs/{path.stem}"
    assert prompts.resolve_style(settings.prompt.style)
    assert settings.prompt.template in ("auto", *prompts.TEMPLATES)
    assert not settings.model.trust_remote_code
    assert settings.data.train and settings.data.validation and settings.data.test
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_it_states_only_what_differs(path: Path) -> None:
    own = documents.read_yaml(path)
    if "extends" not in own:
        return
    parent = config.read_yaml(path.parent / own.pop("extends"))
    for section, values in own.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if (
                parent.get("tuning", {}).get("method") == own.get("tuning", {}).get("method", None)
                or section != "tuning"
            ):
                same = parent.get(section, {}).get(key)
                assert same != value or (section, key) == ("tuning", "method"), f"{section}.{key} is the parent's"


PAPER = [
    ("ptuning_chatglm", "tuning.num_virtual_tokens", 128),
    ("ptuning_chatglm", "training.learning_rate", 0.02),
    ("ptuning_chatglm", "training.global_batch_size", 64),
    ("ptuning_chatglm", "training.num_train_epochs", 10),
    ("ptuning_chatglm", "prompt.max_source_length", 256),
    ("ptuning_chatglm_script", "training.global_batch_size", 16),
    ("ptuning_chatglm_script", "training.max_steps", 50000),
    ("ptuning_chatglm_script", "generation.top_p", 0.7),
    ("lora_llama", "tuning.r", 8),
    ("lora_llama", "tuning.lora_alpha", 16),
    ("lora_llama", "tuning.lora_dropout", 0.05),
    ("lora_llama", "training.global_batch_size", 64),
    ("lora_llama_script", "training.global_batch_size", 128),
    ("lora_llama_script", "tuning.target_modules", ["q_proj", "v_proj"]),
    ("lora_alpaca", "tuning.r", 8),
    ("lora_alpaca_script", "tuning.r", 16),
    ("lora_huatuo_script", "tuning.r", 8),
    ("head_bert", "training.learning_rate", 2e-4),
    ("head_bert", "training.global_batch_size", 16),
    ("head_bert", "prompt.max_source_length", 192),
    ("head_bert", "model.config", {"hidden_dropout_prob": 0.4}),
    ("head_roberta", "model.head", "label"),
    ("full_disc_medllm_cmb", "training.learning_rate", 1e-5),
    ("full_disc_medllm_cmb", "training.global_batch_size", 32),
    ("full_disc_medllm_cmb", "training.num_train_epochs", 2),
    ("full_disc_medllm_cmb", "training.warmup_steps", 0.03),
]


@pytest.mark.parametrize(("recipe", "key", "value"), PAPER)
def test_numbers_of_the_papers(recipe: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert config.load_config(recipe).to_dict()[section][name] == value


# --- with tiny models ---------------------------------------------------------------------------------------------

Words = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """Return a function: recipe -> overrides that put sample data, a tiny model and two steps into it."""
    folder = tmp_path_factory.mktemp("recipes")
    for exam in ("cmexam", "cmb"):
        suffix = "csv" if exam == "cmexam" else "json"
        preprocess(exam, [SAMPLE / exam / f"train.{suffix}", SAMPLE / exam / f"val.{suffix}"], folder / exam)
    kinds = ("llama", "bert", "chatglm", "chatglm2")
    models = {kind: tiny.build(kind, folder / "models" / kind, hidden=32) for kind in kinds}

    def place(name: str) -> list[str]:
        settings, row = config.load_config(name), entries.by_recipe()[name]
        kind = "llama" if settings.model.family == "endpoint" else settings.model.family
        if kind == "chatglm" and settings.model.model_name_or_path[-4:] in ("2-6b", "3-6b"):
            kind = "chatglm2"
        data = folder / row.exam
        objective = settings.training.objective
        pairs = data / "pairs.questions.jsonl"
        if objective == "dpo" and not pairs.is_file():
            lines = jsonl.read_objects(data / "train.questions.jsonl")
            jsonl.write(pairs, [{**line, "chosen": "所以答案是A。", "rejected": "所以答案是B。"} for _, line in lines])
        train_file = pairs if objective == "dpo" else data / "train.questions.jsonl"
        return [
            *(["training.max_completion_length=4"] if objective == "grpo" else []),
            f"model.model_name_or_path={models[kind]}", f"data.train={train_file}",
            f"data.validation={data}/val.questions.jsonl", f"data.test={data}/val.questions.jsonl",
            "prompt.max_source_length=1024" if kind != "bert" else "prompt.max_source_length=192",
            "data.max_train_samples=6", "data.max_eval_samples=2", "generation.max_new_tokens=2",
            "training.max_steps=2", "training.logging_steps=1",
            "training.global_batch_size=2", "training.per_device_train_batch_size=2",
            "training.save_strategy=no", "training.load_best_model_at_end=false", f"out={folder}/runs/{name}",
        ]  # fmt: skip

    return place


@pytest.fixture(scope="module")
def adapters(words: Words, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LoRA adapter on tiny LLaMA, and a prefix of the ChatGLM authors' format."""
    folder = tmp_path_factory.mktemp("adapters")
    lora = train("lora_llama", [*words("lora_llama"), f"out={folder}/lora"])
    prefix = train(
        "ptuning_chatglm", [*words("ptuning_chatglm"), f"out={folder}/prefix", "tuning.num_virtual_tokens=4"]
    )
    export.main(["--run", str(prefix.path), "--out", str(folder / "authors"), "--format", "chatglm"])
    return {"llama": lora.adapter, "chatglm": folder / "authors"}


def with_adapter(name: str, adapters: dict[str, Path]) -> list[str]:
    model = config.load_config(name).model
    if model.adapter_name_or_path is None:
        return []
    kind = adapters[model.family]
    if name == "zeroshot_doctorglm_cmb":
        assert model.model_name_or_path == "THUDM/chatglm-6b"
    return [f"model.adapter_name_or_path={kind}"]


def asks_for_trl(names: list[str], fast: Iterable[str] | None = None) -> list[object]:
    """Return the names, those that need TRL to be skipped where it is not installed; all but `fast` are slow."""
    skip = pytest.mark.skipif(not installed_versions.has_trl(), reason="TRL is not installed")
    needy = {name for name in names if Objective.named(config.load_config(name).training.objective).trl_config}
    quick = set(names if fast is None else fast)
    marks = {name: [skip] * (name in needy) + [pytest.mark.slow] * (name not in quick) for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


@pytest.mark.parametrize("name", asks_for_trl(LOCAL, fast=kinds(LOCAL)))
def test_dry_run(name: str, words: Words, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    out = next(word for word in words(name) if word.startswith("out=")).removeprefix("out=")
    places = [*words(name), *with_adapter(name, adapters), f"out={out}-dry"]
    assert train_main(["--config", name, "--dry-run", *places]) is None
    assert capsys.readouterr().out
    assert not Path(f"{out}-dry").exists()


@pytest.mark.parametrize("name", asks_for_trl(TRAINED, fast=kinds(TRAINED)))
def test_two_steps(name: str, words: Words, adapters: dict[str, Path]) -> None:
    run = train(name, [*words(name), *with_adapter(name, adapters)])
    assert run.finished
    assert any("loss" in entry for entry in run.log)


@pytest.mark.parametrize("name", ENDPOINT)
def test_behind_an_address(
    name: str, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = config.load_config(name).model
    if model.api_key_env:
        monkeypatch.setenv(model.api_key_env, KEY)
    with serving(lambda body, count: "答案是A。") as server:
        places = [*words(name)[1:], f"model.base_url={server.url}"]
        questions = config.load_config(name, places).data.test[0]
        assert not predict_main(["--config", name, "--questions", questions, "--dry-run", "--limit", "2", *places])
        assert "2 questions, 2 requests" in capsys.readouterr().out and not server.bodies
        done = predict(name, questions, tmp_path / "p.jsonl", places, limit=2)
    assert [one.answer for one in jsonl.read(done, Prediction)] == ["A", "A"]
    assert server.bodies[0]["model"] == model.model_name_or_path
    assert KEY not in Path(f"{done}.meta.json").read_text()


@pytest.mark.parametrize("name", kinds(name for name in LOCAL if name.startswith(entries.ZERO_SHOT)))
def test_off_the_shelf(name: str, words: Words, adapters: dict[str, Path], tmp_path: Path) -> None:
    # A random model never stops thinking: give it little room for it.
    places = [*words(name), *with_adapter(name, adapters), "generation.thinking_tokens=4"]
    questions = config.load_config(name, places).data.test[0]
    done = predict(name, questions, tmp_path / "p.jsonl", places, limit=2)
    assert len(list(jsonl.read(done, Prediction))) == 2


# --- shell recipes ------------------------------------------------------------------------------------------------


def test_shell_recipes_are_short() -> None:
    assert {path.name for path in SHELL} >= {"chatglm_ptuning.sh", "llama_lora.sh", "bert_head.sh", "demo.sh", "run.sh"}
    for path in SHELL:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 20, path.name
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_under_slurm_a_checkpoint_has_the_time_that_slurm_gives(tmp_path: Path) -> None:
    """Torchrun's own parser says when it would kill the workers, from what the recipe makes of a job."""
    from torch.distributed.run import config_from_args, parse_args

    for name, text in {"scontrol": "echo node1", "srun": 'env > "$0.env"; printf "%s\\n" "$@" > "$0.words"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    recipe = ROOT / "recipes" / "slurm.sh"
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", str(recipe), "--config", "x.yaml"], env={**os.environ, **job, "PATH": path}, check=True)
    launcher, *words = (tmp_path / "srun.words").read_text().splitlines()
    environment = dict(line.partition("=")[::2] for line in (tmp_path / "srun.env").read_text().splitlines())
    with pytest.MonkeyPatch.context() as patch:
        if (value := environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")) is not None:
            patch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)
        launch, _, _ = config_from_args(parse_args(words))
    (seconds,) = re.findall(r"--signal=TERM@(\d+)", recipe.read_text())
    assert launcher == "torchrun"
    assert int(seconds) - 15 <= launch.shutdown_timeout < int(seconds)


def test_the_demo_empties_only_a_folder_that_it_made(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "cmexam-tune"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)

    def demo(out: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OUT": str(out), "PATH": f"{program.parent}:{os.environ['PATH']}"}
        command = ["bash", str(ROOT / "recipes" / "demo.sh")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    mine, file, of_other = tmp_path / "mine", tmp_path / "file", tmp_path / "export"
    mine.mkdir()
    (mine / "letter").write_text("dear")
    file.write_text("dear")
    of_other.mkdir()
    (of_other / ".cmexam_tune").write_text("export\n")
    for out in (mine, file, of_other):
        done = demo(out)
        assert done.returncode == 2 and "not made by make demo" in done.stderr and str(out) in done.stderr
    assert (mine / "letter").read_text() == file.read_text() == "dear" and (of_other / ".cmexam_tune").is_file()
    # Its own folder is emptied; the first command that it calls is ours, which stops it.
    for _ in range(2):
        assert demo(tmp_path / "new").returncode == 7
        assert [path.name for path in (tmp_path / "new").iterdir()] == [".cmexam_tune"]
        (tmp_path / "new" / "old").touch()


def test_a_shell_recipe_goes_from_raw_file_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again it trains nothing anew, and answers nothing again."""
    for name, value in {"MODEL": kit.checkpoint("bert"), "DATA": SAMPLE / "cmexam", "OUT": tmp_path / "a b"}.items():
        monkeypatch.setenv(name, str(value))
    shell_stubs.install(tmp_path)
    words = [str(ROOT / "recipes" / "bert_head.sh"), "training.max_steps=2", "training.eval_strategy=no"]
    programs: list[str] = []

    def call(called: shell_stubs.Call) -> int:
        command = docs_commands.ours(called.words)
        assert command is not None, called.words
        programs.append(command[0])
        return __main__.main(command) or 0

    times = []
    for _ in range(2):
        done = shell_stubs.run(shlex.join(["bash", *words]), tmp_path, call)
        assert done.returncode == 0, done.stdout
        times.append([(tmp_path / "a b" / name).stat().st_mtime_ns for name in ("run/log.jsonl", "predictions.jsonl")])
    assert times[0] == times[1]
    assert programs == ["preprocess", "train", "predict", "evaluate", "train", "predict", "evaluate"]
    assert len(list(jsonl.read(tmp_path / "a b" / "predictions.jsonl", Prediction))) == 30
    assert files.check_input(tmp_path / "a b" / "report" / "report.html")


def test_written_documents_are_current() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
