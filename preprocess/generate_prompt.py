"""The original `preprocess/generate_prompt.py --filepath F --templates 1,4`, answered by `cmexam-tune preprocess`."""

from cmexam_tune.__main__ import answer
from cmexam_tune.interop.compat.cmexam_repo import Script

FLAGS = {"filepath": "@input", "templates": "@styles"}
SCRIPT = Script(FLAGS)

if __name__ == "__main__":
    answer(SCRIPT)
