"""The original `LoRA/infer.py` command line, answered by `cmexam-tune predict`."""

from cmexam_tune.__main__ import answer
from cmexam_tune.interop.compat.cmexam_repo import Script

RECIPE = "lora_llama_script.yaml"
FLAGS = {
    "base_model": "model.model_name_or_path",
    "lora_weights": "@run",
    "use_lora": "@use_run",
    "instruct_dir": "@questions",
    "output_dir": "@folder",
    "output_file_name": "@file",
    "prompt_id": "prompt.style",
    "prompt_template": "prompt.template",
    "batch_size": "generation.batch_size",
    "num_beams": "generation.num_beams",
    "max_new_tokens": "generation.max_new_tokens",
}
IGNORED = {
    "load_8bit": "the weights are loaded in the type that the card computes in (model.dtype)",
    "temperature": "had no effect without sampling; with generation.do_sample=true set generation.temperature",
    "top_p": "had no effect without sampling; with generation.do_sample=true set generation.top_p",
    "top_k": "had no effect without sampling; with generation.do_sample=true set generation.top_k",
    "num_return_sequences": "one answer for each question",
}

SCRIPT = Script(FLAGS, IGNORED, RECIPE, predicts=True)

if __name__ == "__main__":
    answer(SCRIPT)
