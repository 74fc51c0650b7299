"""Scores: from questions and predictions to numbers that can be trusted."""
