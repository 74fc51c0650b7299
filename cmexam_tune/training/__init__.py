"""Training: from batches to a saved adapter.

In: a run folder and questions. Out: checkpoints while it goes, and the adapter. Start reading in `loop.py`.
"""
