"""From questions to the micro-batches of every optimizer step.

In: questions, a family and a loaded model. Out: encoded questions (cached) and, for every step and process, its
micro-batches. Start reading in `encoding.py`; `sampler.py` plans the steps, `batches.py` draws them.
"""
