"""What a user sees while a program works.

In: how much of a piece of work is done. Out: a bar on a terminal, a widget in a notebook, else a line now and then; and
libraries that keep their own lines to themselves. Start reading in `progress.py`.
"""
