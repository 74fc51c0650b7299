"""Predictions: a model answers what is not answered yet, and a file on disk keeps every answer.

In: a run folder or a recipe, and questions. Out: a predictions file that grows line by line, and beside it a file that
says what the predictions came from. Start reading in `answering.py`, the way from a question to a line; `records.py` is
the file, `provenance.py` what it came from, `loading.py` opens a run or recipe and puts its model on the device,
`sharing.py` lets the processes of a launcher share the questions, `shards.py` several machines. `conversation.py` and
`serving/` are chat and the server, `request_estimate.py` the dry run, `annotations.py` what `annotate` asks.
"""
