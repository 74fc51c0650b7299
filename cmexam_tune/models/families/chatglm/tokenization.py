"""The tokenizers of ChatGLM-6B and ChatGLM2/3-6B over their original sentencepiece models.

Text never becomes a special token: those are put in by `build_inputs_with_special_tokens` and the chat layout only.
"""

# transformers annotates its base classes only in part.
# mypy: disable-error-code="no-untyped-call, override, misc, attr-defined, no-any-return"

import re
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from sentencepiece import SentencePieceProcessor
from transformers import BatchEncoding, PreTrainedTokenizer
from transformers.utils import PaddingStrategy

from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.models import checkpoint
from cmexam_tune.models.families.chatglm.configuration import find_file, read_values

Ids = list[int]


class SentencePieceTokenizer(PreTrainedTokenizer):
    """What the versions share: batches through sentencepiece, the originals' truncation and left padding."""

    vocab_files_names: ClassVar[dict[str, str]] = {}
    padding_side = "left"
    special_after: int
    """Special tokens that one text gets; truncation leaves room for them."""

    def __init__(self, vocab_file: str, **kwargs: object) -> None:
        """Open the sentencepiece model `vocab_file`."""
        self.vocab_file = vocab_file
        self.pieces = SentencePieceProcessor(model_file=vocab_file)
        super().__init__(padding_side="left", **kwargs)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {self._convert_id_to_token(i): i for i in range(self.vocab_size)}

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return dict(self._vocabulary)

    def __len__(self) -> int:
        """Return the number of tokens; none can be added."""
        return int(self.vocab_size)

    def _convert_token_to_id(self, token: str) -> int:
        return self._vocabulary.get(token, int(self.unk_token_id))

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        return [self._convert_id_to_token(i) for i in self.text_ids([text])[0]]

    def tokenize(self, text: str, **kwargs: object) -> list[str]:
        """Return the tokens of a text, which never are special ones."""
        return self._tokenize(text)

    def text_ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts without special tokens, all in one call of sentencepiece."""
        raise NotImplementedError

    def positions(self, rows: list[Ids], width: int) -> dict[str, object]:
        """Return `attention_mask` and `position_ids`, as nested lists, of rows padded on the left to `width` tokens."""
        raise NotImplementedError

    def build_inputs_with_special_tokens(self, token_ids_0: Ids, token_ids_1: Ids | None = None) -> Ids:
        """Return ids with the special tokens of a prompt, or of a prompt and its answer."""
        raise NotImplementedError

    def _encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
        truncation_strategy: object = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: Any = None,
        **kwargs: object,
    ) -> BatchEncoding:
        batched = isinstance(text, list | tuple) and not (text and isinstance(text[0], int))
        rows = self._rows(list(text) if batched else [text])
        pairs: Sequence[Ids | None] = [None] * len(rows)
        if text_pair is not None:
            pairs = self._rows(list(text_pair) if batched else [text_pair])
        if truncation_strategy is not None and truncation_strategy.value != "do_not_truncate" and max_length:
            room = max_length - (self.special_after if add_special_tokens else 0)
            rows = [row[: max(0, room - len(pair or ()))] for row, pair in zip(rows, pairs, strict=True)]
        if add_special_tokens:
            rows = [self.build_inputs_with_special_tokens(*both) for both in zip(rows, pairs, strict=True)]
        else:
            rows = [row + (pair or []) for row, pair in zip(rows, pairs, strict=True)]
        fields = self._padded(rows, padding_strategy, max_length, pad_to_multiple_of)
        if not batched and return_tensors is None:
            fields = {name: value[0] for name, value in fields.items()}
        return BatchEncoding(fields, tensor_type=return_tensors)

    def _rows(self, items: list[Any]) -> list[Ids]:
        if items and isinstance(items[0], str):
            return self.text_ids(items)
        return [list(item) for item in items]

    def _padded(
        self, rows: list[Ids], strategy: PaddingStrategy, max_length: int | None, multiple: int | None
    ) -> dict[str, Any]:
        if strategy == PaddingStrategy.DO_NOT_PAD:
            return {"input_ids": rows, **self._unpadded(rows)}
        width = max((len(row) for row in rows), default=0)
        if strategy == PaddingStrategy.MAX_LENGTH and max_length:
            width = max(width, max_length)
        width += -width % (multiple or 1)
        pad = int(self.pad_token_id)
        return {"input_ids": [[pad] * (width - len(row)) + row for row in rows], **self.positions(rows, width)}

    def _unpadded(self, rows: list[Ids]) -> dict[str, object]:
        return {}

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Copy the sentencepiece model into a folder."""
        name = self.vocab_files_names["vocab_file"]
        target = Path(save_directory) / (f"{filename_prefix}-{name}" if filename_prefix else name)
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)


class ChatGLMTokenizer(SentencePieceTokenizer):
    """ChatGLM-6B: `ice_text.model`, whose ids start after `num_image_tokens` image tokens (0, first release: 20000)."""

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "ice_text.model"}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask", "position_ids"]
    special_after = 2

    def __init__(self, vocab_file: str, num_image_tokens: int = 0, **kwargs: object) -> None:
        """Open the sentencepiece model `vocab_file`."""
        self.num_image_tokens = num_image_tokens
        names = {"unk_token": "<unk>", "bos_token": "<sop>", "eos_token": "<eop>", "pad_token": "<pad>"}
        super().__init__(vocab_file, num_image_tokens=num_image_tokens, **{**names, "mask_token": "[MASK]", **kwargs})
        self.gmask_token_id = num_image_tokens + self.pieces.piece_to_id("[gMASK]")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, image tokens included; the model's embedding is padded to a larger number."""
        return int(self.num_image_tokens + self.pieces.get_piece_size())

    def _convert_id_to_token(self, index: int) -> str:
        if index < self.num_image_tokens:
            return f"<image_{index}>"
        return str(self.pieces.id_to_piece(index - self.num_image_tokens))

    def text_ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts; newlines, tabs and runs of spaces have tokens of their own."""
        # The vocabulary has a token for each run of 2 to 80 spaces.
        replaced = [
            re.sub(
                " {2,80}", lambda run: f"<|blank_{len(run[0])}|>", text.replace("\n", "<n>").replace("\t", "<|tab|>")
            )
            for text in texts
        ]
        rows: list[Ids] = self.pieces.encode(replaced)
        return [[i + self.num_image_tokens for i in row] for row in rows] if self.num_image_tokens else rows

    def build_inputs_with_special_tokens(self, token_ids_0: Ids, token_ids_1: Ids | None = None) -> Ids:
        """Return `prompt [gMASK] sop`, and `answer eop` behind it where there is one."""
        prompt = [*token_ids_0, self.gmask_token_id, int(self.bos_token_id)]
        return prompt if token_ids_1 is None else [*prompt, *token_ids_1, int(self.eos_token_id)]

    def positions(self, rows: list[Ids], width: int) -> dict[str, list[object]]:
        """Return the original's `attention_mask` `[b, 1, s, s]` (True = hidden) and `position_ids` `[b, 2, s]`."""
        fields: dict[str, list[object]] = {"attention_mask": [], "position_ids": []}
        for row in rows:
            pad, sop = width - len(row), row.index(int(self.bos_token_id)) if self.bos_token_id in row else len(row)
            # Here the original looks for [MASK] before [gMASK]; it matters only where both occur.
            marks = [row.index(i) for i in (int(self.mask_token_id), self.gmask_token_id) if i in row]
            anchor = marks[0] if marks else sop
            first = [0] * pad + list(range(sop)) + [anchor] * (len(row) - sop)
            second = [0] * (pad + sop) + list(range(1, len(row) - sop + 1))
            fields["position_ids"].append([first, second])
            hidden = [[True] * width for _ in range(pad)]
            hidden += [[k < pad or (k > q and k >= pad + sop) for k in range(width)] for q in range(pad, width)]
            fields["attention_mask"].append([hidden])
        return fields

    def _decode(self, token_ids: int | Ids, skip_special_tokens: bool = False, **kwargs: object) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        dropped = set(self.all_special_ids) if skip_special_tokens else {self.pad_token_id}
        words = [i for i in ids if i not in dropped and i < self.vocab_size]
        start = self.num_image_tokens
        parts: list[str] = []
        for run in re.finditer("t+|i", "".join("i" if i < start else "t" for i in words)):
            group = words[run.start() : run.end()]
            parts.append(f"<image_{group[0]}>" if run[0] == "i" else self.pieces.decode([i - start for i in group]))
        text = "".join(parts).replace("<n>", "\n").replace("<|tab|>", "\t")
        return re.sub(r"<\|blank_(\d+)\|>", lambda run: " " * int(run[1]), text)


ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


class ChatGLM2Tokenizer(SentencePieceTokenizer):
    """ChatGLM2-6B, or ChatGLM3-6B with its role tokens: `tokenizer.model` and special ids appended to it."""

    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": "tokenizer.model"}
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask", "position_ids"]
    special_after = 2

    def __init__(
        self, vocab_file: str, glm_version: int = 2, encode_special_tokens: bool = False, **kwargs: object
    ) -> None:
        """Open the sentencepiece model `vocab_file`; version 3 may read role tokens from text if told to."""
        self.glm_version = glm_version
        self.encode_special_tokens = encode_special_tokens
        size = SentencePieceProcessor(model_file=vocab_file).get_piece_size()
        names = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *(ROLES if glm_version >= 3 else ())]
        self.special_ids = {name: size + i for i, name in enumerate(names)}
        self._special_names = {i: name for name, i in self.special_ids.items()}
        options = {"unk_token": "<unk>", "pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **kwargs}
        super().__init__(vocab_file, glm_version=glm_version, encode_special_tokens=encode_special_tokens, **options)
        self.gmask_token_id = self.special_ids["[gMASK]"]

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's embedding is padded to a larger number."""
        return int(self.pieces.get_piece_size() + len(self.special_ids))

    def _convert_id_to_token(self, index: int) -> str:
        return self._special_names.get(index) or str(self.pieces.id_to_piece(index))

    def text_ids(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of texts; with `encode_special_tokens` role tokens in them count."""
        if not (self.encode_special_tokens and self.glm_version >= 3):
            rows: list[Ids] = self.pieces.encode(list(texts))
            return rows
        pattern = "(" + "|".join(re.escape(role) for role in ROLES) + ")"
        parts = [[part for part in re.split(pattern, text) if part] for text in texts]
        return [
            [i for part in row for i in ([self.special_ids[part]] if part in ROLES else self.pieces.encode(part))]
            for row in parts
        ]

    def build_inputs_with_special_tokens(self, token_ids_0: Ids, token_ids_1: Ids | None = None) -> Ids:
        """Return `[gMASK] sop prompt`, and `answer eos` behind it where there is one."""
        prompt = [self.gmask_token_id, self.special_ids["sop"], *token_ids_0]
        return prompt if token_ids_1 is None else [*prompt, *token_ids_1, int(self.eos_token_id)]

    def positions(self, rows: list[Ids], width: int) -> dict[str, object]:
        """Return `attention_mask` and `position_ids` `[b, s]`, 0 on padding."""
        pads = [width - len(row) for row in rows]
        return {
            "attention_mask": [[0] * pad + [1] * (width - pad) for pad in pads],
            "position_ids": [[0] * pad + list(range(width - pad)) for pad in pads],
        }

    def _unpadded(self, rows: list[Ids]) -> dict[str, object]:
        mask = [[1] * len(row) for row in rows]
        return {"attention_mask": mask, "position_ids": [list(range(len(row))) for row in rows]}

    def _decode(self, token_ids: int | Ids, skip_special_tokens: bool = False, **kwargs: object) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens and ids and ids[-1] in self.stop_ids[1:]:
            # A role token that ended the answer is not part of it.
            ids = ids[:-1]
        ids = [i for i in ids if i < self.vocab_size]
        if self.glm_version < 3:
            ids = [i for i in ids if i not in self._special_names]
        return str(self.pieces.decode([self._convert_id_to_token(i) for i in ids]))

    @property
    def stop_ids(self) -> Ids:
        """Ids that end an answer: EOS, and for ChatGLM3 a turn of the user or of a tool."""
        ends = [self.special_ids[name] for name in ("<|user|>", "<|observation|>") if name in self.special_ids]
        return [int(self.eos_token_id), *ends]

    def build_single_message(self, role: str, metadata: str, message: str) -> Ids:
        """Return the ids of one ChatGLM3 message: role token, metadata with a newline, content."""
        head, content = self.pieces.encode([f"{metadata}\n", message])
        return [self.special_ids[f"<|{role}|>"], *head, *content]


def load_tokenizer(
    folder: str | Path, version: int | None = None, revision: str | None = None
) -> SentencePieceTokenizer:
    """Load the tokenizer of a ChatGLM checkpoint.

    Args:
        folder: holds `ice_text.model` (version 1) or `tokenizer.model` (2 and 3); or a hub name.
        version: 1, 2 or 3, where the folder does not tell: 3 has the role tokens of a conversation.
        revision: on the hub.

    Raises:
        UserError: no such file, or one that is not a sentencepiece model.
    """
    stored = read_values(folder, "tokenizer_config.json", revision)
    ice_text = None if version in (2, 3) else find_file(folder, "ice_text.model", revision)
    path = ice_text or (None if version == 1 else find_file(folder, "tokenizer.model", revision))
    if path is None:
        raise UserError(f"{folder}: holds neither ice_text.model (ChatGLM-6B) nor tokenizer.model (ChatGLM2/3-6B).")
    try:
        if ice_text is not None:
            images = stored.get("num_image_tokens", _image_tokens(folder, revision))
            return ChatGLMTokenizer(str(path), num_image_tokens=int(images))
        version = version or stored.get("glm_version") or _version(folder, revision)
        encode_special = bool(stored.get("encode_special_tokens", False))
        return ChatGLM2Tokenizer(str(path), glm_version=version, encode_special_tokens=encode_special)
    except checkpoint.LOADING as error:
        raise UserError(
            f"{path}: not a sentencepiece model ({first_line(error)}). GLM-4's tokenizer is another "
            "kind: use its '-hf' checkpoint, which transformers reads."
        ) from None


def _image_tokens(folder: str | Path, revision: str | None) -> int:
    """Return 20000 for the first release's vocabulary, whose text ids start after the image tokens, else 0."""
    values = read_values(folder, revision=revision)
    return 20000 if values.get("bos_token_id") == 150004 or values.get("vocab_size") == 150528 else 0


def _version(folder: str | Path, revision: str | None) -> int:
    """Tell ChatGLM3 from ChatGLM2, whose networks are the same, by what the checkpoint's own files say."""
    for name in ("tokenization_chatglm.py", "tokenizer_config.json"):
        path = find_file(folder, name, revision)
        if path is not None and "<|assistant|>" in path.read_text(encoding="utf-8"):
            return 3
    named = f"{read_values(folder, revision=revision).get('_name_or_path', '')} {folder}".lower()
    return 3 if "chatglm3" in named else 2
