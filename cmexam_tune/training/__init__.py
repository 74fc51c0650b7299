"""Training: from batches to a saved adapter.

In: a run folder and questions. Out: checkpoints while it goes, and the adapter. Start reading in `loop.py`;
`objectives/` are what can be learnt from, `safe_trainer.py` is what keeps any run safe.
"""
