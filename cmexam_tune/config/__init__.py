"""One experiment is one YAML file.

In: a recipe by name or path, and `section.key=value` overrides. Out: a `Config` of frozen dataclasses. Start reading in
`settings.py`, what an experiment can say; `reading.py` is how it is read, `overrides.py` the command line,
`installed_versions.py` which names are transformers', `describing.py` what `--help`, the reference and editors show.
"""

from cmexam_tune.config.overrides import ALIASES
from cmexam_tune.config.reading import (
    dump_config,
    find_recipe,
    load_config,
    parse_config,
    read_prompt_file,
    read_yaml,
    recipe_folders,
)
from cmexam_tune.config.settings import (
    Config,
    DataConfig,
    GenerationConfig,
    ModelConfig,
    PromptConfig,
    RewardConfig,
    TrainingConfig,
    TuningConfig,
)

__all__ = [
    "ALIASES",
    "Config",
    "DataConfig",
    "GenerationConfig",
    "ModelConfig",
    "PromptConfig",
    "RewardConfig",
    "TrainingConfig",
    "TuningConfig",
    "dump_config",
    "find_recipe",
    "load_config",
    "parse_config",
    "read_prompt_file",
    "read_yaml",
    "recipe_folders",
]
