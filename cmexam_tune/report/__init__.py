"""The report of an evaluation.

In: graded questions. Out: a `FullReport`, and its JSON, Markdown, LaTeX and HTML files. Start reading in
`building.py`; `sections.py` computes what graded answers alone say, and a row there is a table of every file.
`result_tables.py` makes the other tables of report.md and report.tex, `page.py` the page, whose tables `assets/*.js`
draw, `writing.py` the files. `table.py` is the table of all programs, `papers/` holds what the papers print.
"""
