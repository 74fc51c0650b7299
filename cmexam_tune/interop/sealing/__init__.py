"""Sealed results: outputs, config and scores in one folder, without the questions' texts, that anybody can recompute.

In: questions, and predictions with what `predict` recorded beside them. Out: a folder, and what of such a folder does
not reproduce. Start reading in `sealed_folder.py` (what is in it, how it is written), then `verifying.py`;
`shared_records.py` writes the same results in two public formats.
"""
