"""From what a model wrote to scores: answers read, graded and counted by the rules of a scorer.

In: questions, predictions and a scorer. Out: every question graded, and scores of any part of them, with how far they
can be trusted. Start reading in `answer_parsing.py`, the letters of an output; `grading.py` counts them,
`text_metrics.py` scores explanations, `comparison.py` and `significance.py` set runs beside each other, `breakdowns.py`
scores parts of a run. `scorers/` holds one file for each published script, `metrics/` one for each number that is
added on request, `prediction_metadata.py` knows how a run was asked.
"""
