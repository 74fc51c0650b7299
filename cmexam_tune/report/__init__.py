"""The report of an evaluation.

In: graded questions. Out: a `FullReport`, and its JSON, Markdown, LaTeX and HTML files. Start reading in
`building.py`; `sections.py` makes its tables, `page.py` its page, `writing.py` its files. `table.py` is the table of
all programs, `papers/` holds what the papers print.
"""
