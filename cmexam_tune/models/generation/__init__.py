"""Writing and choosing answers with a loaded decoder.

In: a model, its tokenizer and prompts. Out: completions. Start reading in `decoder.py`, the loop and the modes
(`generation.mode`); `prompt_tokens.py` goes from requests to ids and back to text, `sampling.py` from a config to
transformers' settings, `allowed_answers.py` knows which letters may come next, `kv_cache.py` reads common beginnings
once, `streaming.py` shows text while it is written.
"""
