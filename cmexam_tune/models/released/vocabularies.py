"""Tokenizers of these releases, as fast ones made from the released files: `tokenizer.model` or `qwen.tiktoken`.

They can be saved as tokenizer.json, which other libraries read. What differs from the released tokenizers is listed in
docs/released.md.
"""

# transformers and tokenizers annotate their classes only in part.
# mypy: disable-error-code="no-untyped-call"

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode, import_protobuf
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from cmexam_tune import prompts
from cmexam_tune.core import documents
from cmexam_tune.models.features import Ids

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of pieces in a sentencepiece model."""
PRIVATE = 0xF0000
"""First code point of a plane that no text uses."""
MARK = "\ufdd0"
"""No character, which no text may hold: breaks a role token that somebody typed."""


DESCRIPTION = "tokenizer_config.json"
SAVED = "typed_special_tokens_stay_text"
"""Key of a tokenizer_config.json that `RoleTokenizer` wrote."""


class SpecialPieces(NamedTuple):
    """What the sentencepiece file of a release does not say."""

    roles: tuple[int, ...]
    """Pieces that only a chat template may write, by id: their names changed between Baichuan 1 and 2."""
    starts_with_bos: bool
    pad: int


BAICHUAN = SpecialPieces((195, 196), False, 0)
INTERNLM = SpecialPieces((103027, 103028), True, 2)
RELEASES = {
    "BaiChuanTokenizer": BAICHUAN,
    "BaichuanTokenizer": BAICHUAN,
    "InternLMTokenizer": INTERNLM,
    "InternLM2Tokenizer": SpecialPieces((92542, 92543), True, 2),
}
"""By the `tokenizer_class` of tokenizer_config.json."""
QWEN = "QWenTokenizer"
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


class RoleTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer that can tell role tokens of a chat template from those that a user typed."""

    def broken(self, text: str) -> str:
        """Return what somebody typed with its special tokens broken, which then are not those of a chat template."""
        return self._specials().sub(lambda match: match[0][0] + MARK + match[0][1:], text)

    def prompt_ids(self, text: str) -> Ids:
        """Return a rendered chat template as ids; text between special tokens is read by itself, as in the releases."""
        ids: Ids = []
        special = dict(zip(self.all_special_tokens, self.all_special_ids, strict=True))
        for part in self._specials().split(text):
            if part in special:
                ids.append(special[part])
            elif part:
                plain = part.replace(MARK, "")
                ids += self(plain, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Write a tokenizer that libraries read which do not know this class, and that `read` knows again."""
        files: tuple[str, ...] = super().save_pretrained(save_directory, *args, **kwargs)
        path = Path(save_directory) / DESCRIPTION
        values = {**documents.read_json(path), "tokenizer_class": "PreTrainedTokenizerFast", SAVED: True}
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return files

    def _specials(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self.all_special_tokens)) + ")")


def sentencepiece(path: Path, pieces: SpecialPieces) -> RoleTokenizer:
    """Return the tokenizer of a sentencepiece file.

    Symbols that its authors defined are never normalised and never part of a longer piece.

    Raises:
        ValueError: no sentencepiece model, or not one of byte pairs.
    """
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:
        raise ValueError(f"{path.name} is no sentencepiece model") from error
    if proto.trainer_spec.model_type != 2:
        raise ValueError(f"{path.name} is no sentencepiece model of byte pairs")
    roles = [proto.pieces[i].piece for i in pieces.roles if i < len(proto.pieces)]
    special = [piece.piece for piece in proto.pieces if piece.type in (UNKNOWN, CONTROL)]
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED and piece.piece not in roles]
    vocabulary = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    whole = {*special, *roles, *symbols}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == 1}
    merges = [
        (left, right)
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for left, right in ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        if left in vocabulary and right in vocabulary and left not in whole and right not in whole
    ]
    # A symbol is a word of its own, which `ignore_merges` looks up as it is.
    model = BPE(vocabulary, merges, unk_token=special[0], fuse_unk=True, byte_fallback=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(proto.normalizer_spec, symbols)
    # The names of byte pieces (`<0x0A>`), typed by somebody, are no words.
    alternatives = [*map(re.escape, sorted(symbols, key=len, reverse=True)), "(?<=<)0(?=x[0-9A-F]{2}>)"]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(alternatives)), "isolated")
    steps: list[object] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    names = {"unk_token": special[0], "bos_token": special[1], "eos_token": special[2]}
    if pieces.starts_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{special[1]} $A", f"{special[1]} $A {special[1]} $B", [(special[1], vocabulary[special[1]])]
        )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (*special, *roles)])
    return RoleTokenizer(
        tokenizer_object=tokenizer,
        pad_token=proto.pieces[pieces.pad].piece,
        extra_special_tokens=roles,
        padding_side="left",
        **names,
    )


def _normalizer(spec: Any, symbols: Iterable[str]) -> Any:
    """Return the file's own normaliser, which leaves symbols as they are, and its blank in front of a text."""
    steps: list[object] = []
    if spec.precompiled_charsmap:
        precompiled = normalizers.Precompiled(spec.precompiled_charsmap)
        changed = [symbol for symbol in symbols if precompiled.normalize_str(symbol) != symbol]
        escapes = [(symbol, chr(PRIVATE + i)) for i, symbol in enumerate(sorted(changed, key=len, reverse=True))]
        steps = [normalizers.Replace(symbol, code) for symbol, code in escapes]
        steps += [precompiled, *(normalizers.Replace(code, symbol) for symbol, code in escapes)]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])


def tiktoken(path: Path) -> RoleTokenizer:
    """Return the tokenizer of a file of lines `base64 rank`, Qwen-1's; byte pairs are recovered from the ranks.

    Raises:
        ValueError: a line of another form.
    """
    lines = [line.split() for line in path.read_bytes().splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    letters = bytes_to_unicode()
    names = {token: token.decode("latin-1").translate(letters) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = _merged(token, ranks, rank)
            if len(parts) == 2:
                merges.append((names[parts[0]], names[parts[1]]))
    tokenizer = Tokenizer(BPE({names[token]: rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in QWEN_SPECIAL])
    end = QWEN_SPECIAL[0]
    return RoleTokenizer(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        extra_special_tokens=list(QWEN_SPECIAL[1:]),
        padding_side="left",
    )


def _merged(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Return what byte pairs of a rank below `limit` make of a token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    pairs = [ranks.get(token[i : i + 2], limit) for i in range(len(token) - 1)]
    while pairs and (rank := min(pairs)) < limit:
        i = pairs.index(rank)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        del pairs[i]
        for j in range(max(i - 1, 0), min(i + 1, len(pairs))):
            pairs[j] = ranks.get(parts[j] + parts[j + 1], limit)
    return parts


def read(find: Callable[[str], Path | None]) -> RoleTokenizer | None:
    """Return the tokenizer of a checkpoint; None: it is not one of these releases, or brings a tokenizer.json.

    Args:
        find: returns where a file of the checkpoint lies, None where there is no such file.
    """
    described = find(DESCRIPTION)
    if described is None:
        return None
    values = documents.read_json(described, "file of a checkpoint", finite=False)
    if find("tokenizer.json") is not None:
        return RoleTokenizer.from_pretrained(described.parent) if values.get(SAVED) else None
    kind = str(values.get("tokenizer_class"))
    tokenizer = None
    if kind == QWEN and (ranks := find("qwen.tiktoken")) is not None:
        tokenizer = tiktoken(ranks)
    elif kind in RELEASES and (pieces := find("tokenizer.model")) is not None:
        tokenizer = sentencepiece(pieces, RELEASES[kind])
    if tokenizer is not None and (settings := find("generation_config.json")) is not None:
        _add_chat_template(tokenizer, documents.read_json(settings, "file of a checkpoint", finite=False))
    return tokenizer


def _add_chat_template(tokenizer: RoleTokenizer, settings: Mapping[str, object]) -> None:
    """Give a chat model's tokenizer the template of the released code; base models have no such settings."""
    template = None
    if settings.get("chat_format") == "chatml":
        template = "qwen_chat"
        tokenizer.eos_token = "<|im_end|>"
    elif settings.get("user_token_id") in BAICHUAN.roles:
        first = tokenizer.convert_ids_to_tokens(BAICHUAN.roles[0]) == "<reserved_102>"
        template = "baichuan" if first else "baichuan2_chat"
    if template is not None:
        tokenizer.chat_template = prompts.template(template).for_tokenizer(None, "")
