#!/usr/bin/env bash
# A classification head on BERT on CMExam, from the raw CSVs to the report; see run.sh for MODEL, DATA and OUT.
#   MODEL=/models/bert-base-chinese DATA=data/raw bash recipes/bert_head.sh training.max_steps=10
set -euo pipefail
exec bash "$(dirname "$0")/run.sh" head_bert.yaml "$@"
