"""The report of an evaluation: built once, shown as JSON, text, Markdown, LaTeX and one HTML page."""
