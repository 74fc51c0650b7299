"""Base: what everything else stands on; standard library and PyYAML, on demand pydantic (`strict.py`) and openpyxl.

In: files and command lines. Out: records, errors with a remedy, and files that are never half-written. Start reading in
`schema.py`, the records; `jsonl.py` reads and writes them, `files.py` opens and replaces files, `documents.py` reads
JSON and YAML of others, `cli.py` makes a command line of a function, `variants.py` finds what is named by its file.
"""

__version__ = "0.1.0"
