#!/usr/bin/env bash
# P-tuning v2 of ChatGLM-6B on CMExam, from the raw CSVs to the report; see run.sh for MODEL, DATA and OUT.
#   MODEL=/models/chatglm-6b DATA=data/raw bash recipes/chatglm_ptuning.sh training.max_steps=10
set -euo pipefail
exec bash "$(dirname "$0")/run.sh" ptuning_chatglm.yaml "$@"
