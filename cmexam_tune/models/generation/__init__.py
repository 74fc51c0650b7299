"""Writing and choosing answers: the decoder, and what it is made of. Start reading in `decoder.py`."""
