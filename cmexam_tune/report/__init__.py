"""The report of an evaluation.

In: graded questions. Out: one `FullReport`, and its JSON, Markdown, LaTeX and HTML files. Start reading in
`building.py`; `sections.py` makes its tables, `writing.py` its files. `table.py` is the table of all programs.
"""
