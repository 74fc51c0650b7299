"""What is wrong in question files, and which questions are also in others.

In: question files, and others to hold them against (the tests). Out: findings, pairs of questions with their score, and
the questions that may be trained on; of sampled answers, those that are worth learning from. Start reading in
`findings.py`, one check; `duplicates.py` finds equal and near questions (by `minhash.py`), `contamination.py` those
that were trained on, `wrong_keys.py` those whose key several runs contradict, `errata.py` knows what is wrong in the
released files, `splits.py` keeps together what belongs together. `selection.py` makes training data of sampled answers.
What is suspicious in one question is looked for in `prompts/question_checks.py`.
"""
