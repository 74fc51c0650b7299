"""Formulas that know no exam: BLEU and ROUGE of Chinese texts, intervals and tests.

In: texts, counts, rows of numbers. Out: numbers, and how far they can be trusted. Start reading in `text_metrics.py`
for explanations, in `significance.py` for intervals and tests.
"""
