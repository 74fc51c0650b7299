"""The run folder: what training leaves behind, and how it is opened again."""
