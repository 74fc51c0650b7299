"""What is wrong in question files, and which questions are also in others.

In: question files, and others to hold them against (the tests). Out: findings, pairs of questions with their score, and
the questions that may be trained on. Start reading in `checking.py`; `pairs.py` finds equal and near questions (by
`minhash.py`), `findings.py` looks at one question at a time, `errata.py` knows what is wrong in the released files.
"""
