#!/usr/bin/env bash
# The real model before and after LoRA, sealed and beside the papers' rows: the end of demo_real.sh, which gives its folder and
# its model. The folders in cmexam_tune/sample/sealed were made so. About three minutes on two cores.
set -euo pipefail; cd "$(dirname "$0")/.."; out=$1 model=$2
to=$out/sample asked=$out/sample/data/test_with_annotations.questions.jsonl
cmexam-tune preprocess cmexam --input cmexam_tune/sample/cmexam/test_with_annotations.csv --out "$to/data" --overwrite
for system in "zeroshot SmolLM2-135M" "lora SmolLM2-135M after LoRA"; do
  name=${system%% *} from=(--config lora_smollm2 "$model"); [ "$name" = lora ] && from=(--run "$to/run")
  cmexam-tune predict "${from[@]}" --questions "$asked" --out "$to/$name.jsonl" generation.mode=likelihood generation.orders=5
  cmexam-tune export --results "$to/$name.jsonl" --questions "$asked" --out "$out/sealed/$name" --name "${system#* }" --overwrite
done
cmexam-tune leaderboard "$out"/sealed/* --questions "$asked" --published cmexam,cmb --out "$out/leaderboard" --overwrite
