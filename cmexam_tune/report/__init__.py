"""The report of an evaluation.

In: graded questions. Out: a `FullReport`, and its JSON, Markdown, LaTeX and HTML files. Start reading in
`building.py`; `sections.py` computes what graded answers alone say, `result_tables.py` makes the tables, `page.py` the
page, `writing.py` the files. `table.py` is the table of all programs, `papers/` holds what the papers print.
"""
