#!/usr/bin/env bash
# The whole pipeline on the shipped sample with tiny random models, on a CPU in minutes: P-tuning v2 of ChatGLM, LoRA of
# LLaMA, a head on BERT. Such models learn little more than the form of an answer. OUT= names a new folder, or a demo's.
set -euo pipefail; export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; cd "$(dirname "$0")/.." # one thread is fastest here
out=${OUT:-demo} raw=cmexam_tune/sample/cmexam
[ ! -e "$out" ] || [ "$(cat "$out/.cmexam_tune" 2>/dev/null)" = demo ] ||
  { echo "error: $out: was not made by make demo, so it stays. Choose another with OUT=..." >&2; exit 2; }
rm -rf "$out"; mkdir -p "$out"; echo demo > "$out/.cmexam_tune"
cmexam-tune preprocess cmexam --input $raw/train.csv $raw/val.csv $raw/test_with_annotations.csv --out "$out/data"
while read -r row words; do
  family=${row#*_} run="$out/$row/seed1" test="$out/data/test_with_annotations.questions.jsonl"
  cmexam-tune tiny --family "$family" --out "$out/models/$family"
  cmexam-tune train --config "$row" "model.model_name_or_path=$out/models/$family" "out=$run/run" \
    "data.train=$out/data/train.questions.jsonl" "data.validation=[]" training.eval_strategy=no \
    training.num_train_epochs=12 training.global_batch_size=8 training.save_strategy=no $words "$@"
  cmexam-tune predict --run "$run/run" --questions "$test" --out "$run/predictions.jsonl"
  cmexam-tune evaluate --predictions "$run/predictions.jsonl" --questions "$test" --out "$run/report"
done <<< $'ptuning_chatglm training.learning_rate=3e-1\nlora_llama training.learning_rate=1e-2 tuning.modules_to_save=[lm_head] training.num_train_epochs=4\nhead_bert'
cmexam-tune reproduce --table3 --out "$out"
echo "Tiny models' scores mean nothing. Reports: $out/*/seed1/report/report.html, all three: $out/table3.html"
