"""The papers: their tables, and the runs that were made beside them.

In: the name of an entry, a folder of runs. Out: its recipe and published numbers, and tables of both. Start reading in
`published_tables.py`; `entries.py` says which recipe reproduces what, `reproduced_tables.py` collects runs.
"""
