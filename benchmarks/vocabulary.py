"""A tokenizer as long-worded as those of Chinese models, for the benchmarks' random models."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cmexam_tune.core.schema import Question


def learn(model: Path, questions: Iterable[Question], size: int) -> None:
    """Give the checkpoint in folder `model` a tokenizer learned from questions, with words as in Chinese models.

    The shipped tiny models have one token a character, as LLaMA has: half as many questions would fit into 512.
    """
    bpe = Tokenizer(models.BPE())
    words = Regex(r"[A-Z]|[a-z]+|\d| ?[^\w\s]|\s+|[\u4e00-\u9fff]+")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), pieces])
    bpe.decoder = decoders.ByteLevel()
    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    bpe.train_from_iterator(
        ("\n".join((q.stem, *q.options.values(), q.explanation or "")) for q in questions),
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=specials, initial_alphabet=pieces.alphabet(), show_progress=False
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(model)
