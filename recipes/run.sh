#!/usr/bin/env bash
# A recipe on CMExam, from the raw CSVs to the report: bash recipes/run.sh RECIPE [key=value ...]
#   MODEL=/models/chatglm-6b   the weights (default: the name in the recipe)
#   DATA=data/raw              folder with train.csv, val.csv and test_with_annotations.csv
#   OUT=runs/RECIPE            where everything goes
# Extra arguments change the recipe: training.max_steps=10. Started again it goes on where it stopped.
set -euo pipefail
recipe=${1:?name a recipe, for example lora_llama.yaml}; shift
DATA=${DATA:-data/raw} OUT=${OUT:-runs/${recipe%.yaml}}
data="$OUT/data" test=test_with_annotations
[ -f "$data/$test.questions.jsonl" ] || python -m cmexam_tune.preprocess cmexam --out "$data" \
  --input "$DATA/train.csv" "$DATA/val.csv" "$DATA/$test.csv"
python -m cmexam_tune.train --config "$recipe" ${MODEL:+"model.model_name_or_path=$MODEL"} "out=$OUT/run" \
  "data.train=$data/train.questions.jsonl" "data.validation=$data/val.questions.jsonl" "$@"
python -m cmexam_tune.predict --run "$OUT/run" --questions "$data/$test.questions.jsonl" --out "$OUT/predictions.jsonl"
python -m cmexam_tune.evaluate --predictions "$OUT/predictions.jsonl" --questions "$data/$test.questions.jsonl" \
  --out "$OUT/report" --overwrite
