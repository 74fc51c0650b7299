"""Files of a checkpoint that somebody else wrote: looked at before a library reads them."""

from collections.abc import Mapping
from pathlib import Path

from cmexam_tune.core import documents
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.variants import suggest
from cmexam_tune.models import gguf

SMALL = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
"""Files that are looked at. tokenizer.json is read by a library that says itself what is wrong with it."""
SIZES = (
    "hidden_size", "num_hidden_layers", "num_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "inner_hidden_size", "ffn_hidden_size", "vocab_size", "padded_vocab_size", "max_position_embeddings", "seq_length",
    "max_sequence_length", "kv_channels", "multi_query_group_num", "head_dim",
)  # fmt: skip
"""Keys of config.json that make a network: numbers, none of which is small enough to be computed for ever."""
LAYERS, MOST = 1000, 100_000_000


def check_place(name: str) -> Path | None:
    """Refuse a model that is neither on this disk nor named like one on the hub.

    Returns:
        The GGUF file that the name means, None for a folder or a model of the hub.

    Raises:
        UserError: a file that is no GGUF or cannot be read here, or a folder that is not there.
    """
    path = Path(name).expanduser()
    if (file := gguf.find(name)) is not None:
        gguf.check(file)
        return file
    if path.is_dir() or (not path.exists() and name.count("/") == 1 and not name.startswith(("/", ".", "~"))):
        return None
    if path.exists():
        raise UserError(
            f"model.model_name_or_path={name}: a file, not a folder. Name the folder that holds config.json, or a "
            ".gguf file."
        )
    near = suggest(path.name, [other.name for other in path.parent.iterdir()]) if path.parent.is_dir() else ""
    raise UserError(
        f"model.model_name_or_path={name}: no such folder{near or '.'} Name the folder that holds the weights (with "
        f"config.json), or a model of the hub (owner/name). Relative paths start at {Path.cwd()}."
    )


def check(folder: Path) -> None:
    """Look at the small files of a checkpoint or adapter.

    Raises:
        UserError: one is no JSON object, names sizes that no network has, or leads outside the folder.
    """
    for path in sorted(folder.glob("*.json")):
        index = path.name.endswith(".index.json")
        if path.is_file() and (index or path.name in SMALL):
            values = documents.read_json(path, "file of a checkpoint", finite=False)
            _check_sizes(path, values)
            _check_ends(path, values)
            if index:
                _check_index(path, values)


def _check_sizes(path: Path, values: Mapping[str, object]) -> None:
    for key in SIZES:
        value = values.get(key)
        if value is None:
            continue
        most = LAYERS if key.endswith("layers") else MOST
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UserError(f"{path}: {key} is {value!r:.40}, a number from 1 to {most:,} is needed.")
    if not isinstance(values.get("model_type", ""), str):
        raise UserError(f"{path}: model_type is {values['model_type']!r:.40}, a name is needed.")


def _check_ends(path: Path, values: Mapping[str, object]) -> None:
    for key in [key for key in values if key.endswith("_token_id") or key == "num_image_tokens"]:
        ids = values[key]
        for number in ids if isinstance(ids, list) else [ids]:
            # bool is an int in Python: `true` would be token 1.
            is_id = isinstance(number, int) and not isinstance(number, bool) and -1 <= number <= MOST
            if number is not None and not is_id:
                raise UserError(f"{path}: {key} is {ids!r:.40}, numbers of tokens are needed.")


def _check_index(path: Path, values: Mapping[str, object]) -> None:
    """Every shard is a plain file name: an index must not make us read another file of the user's."""
    shards = values.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{path}: weight_map is needed, names of weights to names of files.")
    for name in sorted(set(shards.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise UserError(f"{path}: names the file {name!r}, which is not in its folder. It is not loaded.")
