"""Training: from a config and question files to a finished run folder.

In: a config and question files. Out: checkpoints while it goes, then the trained adapter or model, read back and
compared. Start reading in `loop.py`, the whole course; `task.py` is what a trainer is made of, `objectives/` what can
be learnt from, `safe_trainer.py` what keeps any run safe, `checkpoints.py` how it is resumed. `data/` turns questions
into the batches of a step, `run_directory/` is the folder that a run leaves; `arguments.py` are the settings of
transformers' Trainer, `estimate.py` what a training will need.
"""
