#!/usr/bin/env bash
# The original prediction.sh: answers of the test questions by a trained prefix.
# MODEL, DATA, CHECKPOINT and STEP say which; extra flags go to main.py and win over those here.
set -euo pipefail
PRE_SEQ_LEN=128
CHECKPOINT=${CHECKPOINT:-bio_prompt_1-chatglm-6b-pt-128-2e-2-bs8-accumulation2}
STEP=${STEP:-34900}
DATA=${DATA:-data}

python3 "$(dirname "$0")/main.py" \
    --do_predict \
    --validation_file "$DATA/val_prompt.json" \
    --test_file "$DATA/test_prompt.json" \
    --overwrite_cache \
    --prompt_column prompt \
    --response_column completion \
    --model_name_or_path "${MODEL:-THUDM/chatglm-6b}" \
    --ptuning_checkpoint "./output/$CHECKPOINT/checkpoint-$STEP" \
    --output_dir "./output/$CHECKPOINT" \
    --overwrite_output_dir \
    --max_source_length 256 \
    --max_target_length 256 \
    --per_device_eval_batch_size 1 \
    --predict_with_generate \
    --pre_seq_len $PRE_SEQ_LEN "$@"
