"""Installation of cmexam_tune. Metadata lives here; pyproject.toml holds the build system and tool settings."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "cmexam_tune/core/__init__.py").read_text(encoding="utf-8"))
assert VERSION is not None
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]
# Before 1.55 the async client repeats a broken connection never, or for ever.
ENDPOINT = ["openai>=1.55.3"]
# TRL needs Python 3.11; 1.16 is what the trainers here were written against.
RL = ['trl>=1.16,<2; python_version >= "3.11"']
NOTEBOOKS = ["ipykernel>=6.29", "ipywidgets>=8.1", "matplotlib>=3.9", "nbclient>=0.10", "pandas>=2.2"]

setup(
    name="cmexam_tune",
    version=VERSION.group(1),
    description="Fine-tuning library and recipes for Chinese medical-exam language models (CMExam, CMB)",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["cmexam_tune", "cmexam_tune.*"]), "cmexam_tune.recipes"],
    package_dir={"cmexam_tune.recipes": "recipes"},
    package_data={
        "cmexam_tune": ["*.yaml", "*/*.yaml", "*/*/*.yaml", "report/assets/*", "sample/**", "py.typed"],
        "cmexam_tune.recipes": ["*/*.yaml", "*/*.json", "*.sh", "*.md"],
    },
    # Without a bound: transformers chooses the version.
    install_requires=[
        "accelerate>=1.12",
        "datasets>=4.5",
        "deepspeed>=0.19.8",
        "defusedxml>=0.7.1",
        "evaluate>=0.4.6",
        "gguf>=0.19",
        "huggingface_hub",
        "jieba>=0.42.1",
        "jinja2",
        "numpy>=2.0.2",
        "openpyxl>=3.1.5",
        "peft>=0.20",
        "protobuf",
        "psutil",
        "pyarrow",
        "pydantic>=2.12",
        "PyYAML>=6.0.2",
        "rapidfuzz>=3.13",
        "rouge-score>=0.1.2",
        "sacrebleu>=2.5.1",
        "safetensors>=0.8",
        "scipy>=1.13",
        "sentencepiece>=0.2.1",
        "tokenizers",
        "torch>=2.8",
        "tqdm",
        "transformers>=5.20,<6",
        "typing_extensions",
    ],
    extras_require={
        "dev": [
            *ENDPOINT,
            *SERVE,
            *NOTEBOOKS,
            *RL,
            "bitsandbytes>=0.46",
            "jsonschema>=4.20",
            "mypy>=1.15",
            "pytest>=8.0",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "scikit-learn>=1.5",
            "tensorboard>=2.16",
            "types-PyYAML",
        ],
        "endpoint": ENDPOINT,
        "plots": ["matplotlib>=3.7"],
        "4bit": ["bitsandbytes>=0.46"],
        "rl": RL,
        "serve": SERVE,
        "notebooks": NOTEBOOKS,
        "modelscope": ["modelscope>=1.40"],
        "tensorboard": ["tensorboard>=2.16"],
    },
    entry_points={"console_scripts": ["cmexam-tune = cmexam_tune.__main__:entry"]},
)
