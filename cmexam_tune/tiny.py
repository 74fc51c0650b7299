"""Tiny random models with tokenizers trained on the shipped sample: checkpoints for machines without weights."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune.core import cli
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import check_output
from cmexam_tune.core.variants import suggest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE = Path(__file__).resolve().parent / "sample"
KINDS = ("llama", "bert", "chatglm", "chatglm2")
FRAME = (
    "问题: 选项: 答案: 解释: 下列关于的说法正确的是 以下不属于 ABCDEFGHIJ 0123456789 "
    ",.:;()[]{}<>#*/%+-=，。：；（）、“”《》？！…"
)


def texts() -> Iterator[str]:
    """Yield what tokenizers are trained on: the shipped sample, and the words that prompts put around it."""
    yield FRAME
    for path in sorted(SAMPLE.rglob("*")):
        if path.suffix in (".csv", ".json", ".jsonl", ".txt"):
            text = path.read_text(encoding="utf-8-sig")
            # JSON is decoded so that the tokenizer sees characters, not escapes.
            yield json.dumps(json.loads(text), ensure_ascii=False) if path.suffix == ".json" else text


def build(family: str, out: str | Path, overwrite: bool = False, **sizes: int) -> Path:
    """Write a tiny random checkpoint that `families.<family>.load` reads like a real one.

    Args:
        family: llama, bert, chatglm (the first ChatGLM-6B's layout) or chatglm2.
        out: folder to write.
        overwrite: replace what lies there.
        sizes: `hidden`, `layers`, `vocab` (rows of the embedding, at least the tokenizer's) and `seed`.

    Raises:
        UserError: unknown family or size, or `out` exists.
    """
    if family not in KINDS:
        raise UserError(f"tiny: {family!r} is no family{suggest(family, KINDS)}; known: {', '.join(KINDS)}.")
    for name in sizes:
        if name not in ("hidden", "layers", "vocab", "seed"):
            raise UserError(f"tiny: {name!r} is no size; known: hidden, layers, vocab, seed.")
    folder = check_output(out, overwrite)
    if folder.is_dir():
        shutil.rmtree(folder)
    if family.startswith("chatglm"):
        from cmexam_tune.families.chatglm import tiny as chatglm

        chatglm.build(folder, texts(), version=2 if family == "chatglm2" else 1, **sizes)
    else:
        (_llama if family == "llama" else _bert)(folder, **sizes)
    return folder


def _llama(folder: Path, hidden: int = 64, layers: int = 2, vocab: int = 0, seed: int = 0) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = _bpe()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    heads = max(4, hidden // 64)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=max(vocab, words.get_vocab_size()),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bpe() -> "Tokenizer":
    """Return a byte-level BPE in which common Chinese characters are one token each and BOS starts every text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        # No token is longer than a character, a number or a Latin word, as in LLaMA's tokenizers for Chinese.
        [
            pre_tokenizers.Split(Regex(r"[A-Z]|[a-z]+|\d| ?[^\sA-Za-z0-9]|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(texts(), trainer)
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return words


def _bert(folder: Path, hidden: int = 64, layers: int = 2, vocab: int = 0, seed: int = 0) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    characters = sorted({character for text in texts() for character in text.lower() if not character.isspace()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    pieces += [f"##{c}" for c in characters if c.isascii() and c.isalnum()]
    tokenizer = BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, do_lower_case=True)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=max(vocab, len(pieces)),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64),
        max_position_embeddings=512,
        pad_token_id=0,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and write one checkpoint."""
    parser = cli.Parser(
        "tiny",
        "Write a tiny random model with a tokenizer trained on the shipped sample, to try everything without weights.",
        "example:\n  cmexam-tune tiny --family llama --out runs/tiny_llama\n"
        "  cmexam-tune train --config lora_llama.yaml model.model_name_or_path=runs/tiny_llama",
    )
    parser.add_argument("--family", required=True, choices=KINDS, help="layout of the model")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--hidden", type=int, default=64, help="width; default: %(default)s")
    parser.add_argument("--layers", type=int, default=2, help="blocks; default: %(default)s")
    parser.add_argument("--vocab", type=int, default=0, help="rows of the embedding; default: the tokenizer's words")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights; default: %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    got = parser.parse_args(list(argv))
    sizes = {name: getattr(got, name) for name in ("hidden", "layers", "vocab", "seed")}
    cli.say(str(build(got.family, got.out, got.overwrite, **sizes)))
    return None


if __name__ == "__main__":
    cli.run(main)
