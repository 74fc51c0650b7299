"""`standard-jieba`: `standard` with BLEU and ROUGE on jieba's words."""

from cmexam_tune.evaluation.scorers.standard import with_units

SCORER = with_units("standard-jieba", "jieba", "BLEU and ROUGE on jieba words")
