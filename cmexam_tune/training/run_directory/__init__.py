"""The run folder: what training leaves behind, and how it is opened again.

In: a config, or the path of a run. Out: a `Run`, and its trained model. Start reading in `run.py`.
"""
