"""Base: what everything else stands on; standard library and PyYAML, on demand pydantic (`strict.py`) and openpyxl.

In: files and command lines. Out: records, errors with a remedy, and files that are never half-written. Start reading in
`schema.py`, the records.
"""
