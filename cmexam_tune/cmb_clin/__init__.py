"""CMB-Clin: answering a patient's case turn by turn, and judging the answers.

In: cases, predictions with ids `<case>:<turn>`, and what judges wrote. Out: dialogues to answer, judgements, their
agreement, and tables beside the paper's. Start reading in `cases.py`, how cases are answered (their words are in
`prompts/dialogue.py`); `rubric.py` is what a judge is asked and how its answer is read, `judging.py` asks a judge,
`judging_folder.py` is all that is judged and where judgements lie, `results.py` what becomes of them, `human_scores.py`
a person as judge. `explanations.py` puts an exam's explanations before the same judges.
"""
