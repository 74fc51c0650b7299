"""`standard-zh`: `standard` with BLEU and ROUGE on sacreBLEU's Chinese tokens."""

from cmexam_tune.evaluation.scorers.standard import with_units

SCORER = with_units("standard-zh", "zh", "BLEU and ROUGE on sacreBLEU's zh tokens")
