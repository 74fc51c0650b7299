"""Base: what everything else stands on; standard library and PyYAML only.

In: files and command lines. Out: records, errors with a remedy, files that are never half-written, and the
configuration (`config/`). Start reading in `schema.py`, the records.
"""
