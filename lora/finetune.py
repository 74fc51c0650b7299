"""The original `LoRA/finetune.py` command line, answered by `cmexam-tune train`."""

from cmexam_tune.__main__ import answer
from cmexam_tune.interop.compat.cmexam_repo import Script

RECIPE = "lora_llama_script.yaml"
FLAGS = {
    "base_model": "model.model_name_or_path",
    "resume_from_checkpoint": "model.adapter_name_or_path",
    "data_path": "data.train",
    "valid_data_path": "data.validation",
    "val_set_size": "data.max_eval_samples",
    "sample": "data.max_train_samples",
    "output_dir": "out",
    "prompt_id": "prompt.style",
    "prompt_template_name": "prompt.template",
    "cutoff_len": "prompt.max_source_length prompt.max_target_length",
    "batch_size": "training.global_batch_size",
    "micro_batch_size": "training.per_device_train_batch_size",
    "num_epochs": "training.num_train_epochs",
    "lora_r": "tuning.r",
    "lora_alpha": "tuning.lora_alpha",
    "lora_dropout": "tuning.lora_dropout",
    "lora_target_modules": "tuning.target_modules",
    "wandb_run_name": "training.run_name",
}
IGNORED = {
    "train_on_inputs": "the loss is on the completion only",
    "group_by_length": "set training.train_sampling_strategy=group_by_length",
    "wandb_project": "set WANDB_PROJECT and training.report_to=wandb",
    "wandb_watch": "set WANDB_WATCH and training.report_to=wandb",
    "wandb_log_model": "set WANDB_LOG_MODEL and training.report_to=wandb",
}

SCRIPT = Script(FLAGS, IGNORED, RECIPE)

if __name__ == "__main__":
    answer(SCRIPT)
