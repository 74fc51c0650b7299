"""CMB-Clin: answering a patient's case turn by turn, and judging the answers.

In: cases, predictions with ids `<case>:<turn>`, and what judges wrote. Out: dialogues to answer, judgements, their
agreement, and tables beside the paper's. Start reading in `dialogues.py`, what a model is asked; `rubric.py` is what a
judge is asked and how its answer is read, `results.py` what becomes of all judgements, `sheets.py` a person as judge.
`annotations.py` is another judgement of models: which categories of CMExam a question belongs to.
"""
