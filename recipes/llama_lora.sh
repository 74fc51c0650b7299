#!/usr/bin/env bash
# LoRA of LLaMA-7B on CMExam, from the raw CSVs to the report; see run.sh for MODEL, DATA and OUT.
#   MODEL=/models/llama-7b DATA=data/raw bash recipes/llama_lora.sh training.max_steps=10
set -euo pipefail
exec bash "$(dirname "$0")/run.sh" lora_llama.yaml "$@"
