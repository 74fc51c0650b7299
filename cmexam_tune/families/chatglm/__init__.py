"""ChatGLM-6B, ChatGLM2-6B, ChatGLM3-6B and GLM-4 on current transformers, without remote code.

`load_model` and `load_tokenizer` are public; the rest is the family's part of training and prediction.
"""

from cmexam_tune.families.chatglm.loading import load_model, load_tokenizer

__all__ = ["load_model", "load_tokenizer"]
