"""The papers: their rows and numbers, and the runs that were made beside them."""
