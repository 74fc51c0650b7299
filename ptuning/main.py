"""The original `ptuning/main.py` command line, answered by `cmexam-tune train` and `predict`."""

from cmexam_tune.__main__ import answer
from cmexam_tune.interop.compat.cmexam_repo import Script

RECIPE = "ptuning_chatglm_script.yaml"
FLAGS = {
    "do_train": "@train",
    "do_predict": "@predict",
    "train_file": "data.train",
    "validation_file": "data.validation",
    "test_file": "data.test",
    "max_train_samples": "data.max_train_samples",
    "max_eval_samples": "data.max_eval_samples",
    "max_source_length": "prompt.max_source_length",
    "max_target_length": "prompt.max_target_length generation.max_new_tokens",
    "model_name_or_path": "model.model_name_or_path",
    "pre_seq_len": "tuning.num_virtual_tokens",
    "prefix_projection": "tuning.prefix_projection",
    "ptuning_checkpoint": "@run",
    "output_dir": "out",
    "gradient_accumulation_steps": "@accumulation",
    "per_device_eval_batch_size": "training.per_device_eval_batch_size generation.batch_size",
    "num_beams": "generation.num_beams",
}
IGNORED = {
    "prompt_column": "prompts are rendered from questions by prompt.style",
    "response_column": "completions are rendered from questions by prompt.style",
    "overwrite_cache": "the cache knows its data, tokenizer and settings",
    "predict_with_generate": "predict always writes answers",
    "overwrite_output_dir": "a run that is started again resumes; to begin anew, name another --output_dir",
    "resume_from_checkpoint": "a run that is started again resumes by itself",
}

SCRIPT = Script(FLAGS, IGNORED, RECIPE)

if __name__ == "__main__":
    answer(SCRIPT)
