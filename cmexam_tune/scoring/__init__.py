"""Scores: from questions and predictions to numbers that can be trusted.

In: questions and predictions. Out: every question graded by a profile, and scores of any part of them. Start reading
in `grading.py`; `profiles/` holds who reads and counts how, `significance.py` how far a difference can be trusted.
"""
