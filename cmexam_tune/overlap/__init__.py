"""Questions that occur more than once.

In: questions of one file or several. Out: groups of equal ones. Start reading in `duplicates.py`.
"""
