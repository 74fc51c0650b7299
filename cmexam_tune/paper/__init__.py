"""The papers: their rows and numbers, and the runs that were made beside them.

In: the name of a row, a folder of runs. Out: its recipe and published numbers, and tables of both. Start reading in
`rows.py`; `results.py` collects runs.
"""
