"""Scores: from questions and predictions to numbers by the rules of a profile.

In: questions, predictions and a profile. Out: every question graded, and scores of any part of them. Start reading in
`grading.py`; `comparison.py` sets runs beside each other, `breakdowns.py` makes the papers' tables.
"""
