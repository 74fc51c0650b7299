"""Tiny random models with tokenizers trained on the shipped sample: checkpoints for machines without weights."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from cmexam_tune.core import cli
from cmexam_tune.core.cli import Folder
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import check_folder, new_folder
from cmexam_tune.core.variants import suggest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE = Path(__file__).resolve().parent / "sample"
Kind = Literal["llama", "qwen", "bert", "chatglm", "chatglm2"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIZES = {"hidden": (16, 8192), "layers": (1, 200), "vocab": (0, 1_000_000), "seed": (0, 2**32 - 1)}
HEAD = 64
"""Width of an attention head from `hidden` 256 on; narrower models have four heads."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's chat template (ChatML), without its default system message."""
FRAME = (
    "问题: 选项: 答案: 解释: 下列关于的说法正确的是 以下不属于 ABCDEFGHIJ 0123456789 "
    ",.:;()[]{}<>#*/%+-=，。：；（）、“”《》？！…"
)

EXAMPLES = """example:
  cmexam-tune tiny --family llama --out runs/tiny_llama
  cmexam-tune train --config lora_llama.yaml model.model_name_or_path=runs/tiny_llama"""


def texts() -> Iterator[str]:
    """Yield what tokenizers are trained on: the shipped sample, and the words that prompts put around it."""
    yield FRAME
    for path in sorted(SAMPLE.glob("cm*/*")):  # the exams, not what was made of them
        if path.suffix in (".csv", ".json", ".jsonl", ".txt"):
            text = path.read_text(encoding="utf-8-sig")
            # JSON is decoded so that the tokenizer sees characters, not escapes.
            yield json.dumps(json.loads(text), ensure_ascii=False) if path.suffix == ".json" else text


def build(
    family: Kind,
    out: Folder,
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 0,
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write a tiny random checkpoint that `families.<family>.load` reads like a real one.

    Args:
        family: llama, qwen (chat template, tied embeddings), bert, chatglm (the first ChatGLM-6B's layout), chatglm2.
        out: folder to write.
        hidden: width: a multiple of 16 up to 256, of 128 above.
        layers: number of blocks.
        vocab: rows of the embedding; 0: as many as the tokenizer has words.
        seed: of the random weights.
        overwrite: replace a tiny model that is there; nothing else is ever replaced.

    Raises:
        UserError: unknown family, a size that cannot be, or `out` exists.
    """
    if family not in KINDS:
        raise UserError(f"tiny: {family!r} is no family{suggest(family, KINDS)}; known: {', '.join(KINDS)}.")
    sizes = {"hidden": hidden, "layers": layers, "vocab": vocab, "seed": seed}
    for name, size in sizes.items():
        if not SIZES[name][0] <= size <= SIZES[name][1]:
            raise UserError(f"tiny: {name}={size}: {SIZES[name][0]} to {SIZES[name][1]:,} are possible.")
    if hidden % 16 or (hidden > 4 * HEAD and hidden % (2 * HEAD)):
        raise UserError(f"tiny: hidden={hidden}: multiples of 16 up to {4 * HEAD}, of {2 * HEAD} above, are possible.")
    target = check_folder(out, "tiny", overwrite)
    from cmexam_tune.core import libraries

    libraries.quiet()
    from cmexam_tune.models import checkpoint

    checkpoint.hide_bars()
    with new_folder(target, "tiny", overwrite) as folder:
        if family.startswith("chatglm"):
            from cmexam_tune.models.families.chatglm import tiny_chatglm as chatglm

            chatglm.build(folder, texts(), version=2 if family == "chatglm2" else 1, **sizes)
        elif family == "bert":
            _bert(folder, **sizes)
        else:
            _decoder(folder, family, **sizes)
    return target


def _decoder(folder: Path, family: Kind, *, hidden: int, layers: int, vocab: int, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    qwen = family == "qwen"
    words = _bpe(("<|endoftext|>", "<|im_start|>", "<|im_end|>") if qwen else ())
    make: Any = PreTrainedTokenizerFast
    ends: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    if qwen:
        ends = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": CHAT}
    tokenizer = make(tokenizer_object=words, **ends)
    heads = max(4, hidden // HEAD)
    torch.manual_seed(seed)
    kinds: Any = (Qwen2Config, Qwen2ForCausalLM) if qwen else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
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
        tie_word_embeddings=qwen,
    )
    kinds[1](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bpe(marks: Sequence[str] = ()) -> "Tokenizer":
    """Return a byte-level BPE in which common Chinese characters are one token each.

    BOS starts every text, but where `marks` of a chat template do.
    """
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
    specials = ["<unk>", "<s>", "</s>", "<pad>", *marks]
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(texts(), trainer)
    if not marks:
        words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return words


def _bert(folder: Path, *, hidden: int, layers: int, vocab: int, seed: int) -> None:
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
        num_attention_heads=max(4, hidden // HEAD),
        max_position_embeddings=512,
        pad_token_id=0,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@cli.program(build, EXAMPLES)
def main(*, family: Kind, out: Folder, **options: Any) -> None:
    """Write a tiny random model with a tokenizer trained on the shipped sample, to try everything without weights."""
    cli.say(str(build(family, out, **options)))


if __name__ == "__main__":
    cli.run(main)
