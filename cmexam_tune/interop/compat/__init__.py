"""The original CMExam repository's command lines.

In: their flags. Out: the command lines of this project that do the same. Start reading in `cmexam_repo.py`.
"""
