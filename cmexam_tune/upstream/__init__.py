"""The original CMExam repository's command lines in terms of this project's programs."""
