"""As `standard`, with BLEU and ROUGE on jieba's words."""

from cmexam_tune.scoring.profiles.standard import profile

PROFILE = profile("standard-jieba", "jieba", "BLEU and ROUGE on jieba words")
