"""The original `preprocess/generate_prompt.py --filepath F --templates 1,4`, answered by `cmexam-tune preprocess`."""

from cmexam_tune.upstream.translation import prompts

FLAGS = {"filepath": "@input", "templates": "@styles"}

if __name__ == "__main__":
    prompts(FLAGS)
