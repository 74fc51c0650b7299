"""As `standard`, with BLEU and ROUGE on the tokens of sacreBLEU's `zh` tokenizer."""

from cmexam_tune.scoring.profiles.standard import profile

PROFILE = profile("standard-zh", "zh", "BLEU and ROUGE on sacreBLEU's zh tokens")
