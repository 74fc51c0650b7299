"""Parts of `cmexam-tune export`, which puts them together: a run's model for other libraries.

In: a run and its loaded model. Out: averaged adapters (`averaging.py`), a model card, a Modelfile for Ollama, config
files in older spellings (`saved_files.py`), and an upload (`hub.py`).
"""
