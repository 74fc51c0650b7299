#!/usr/bin/env bash
# Everything that only a card can show, in one call of less than ten minutes on one card:
#   bash benchmarks/gpu.sh [--questions train.questions.jsonl] [--json gpu.json] [--markdown gpu.md]
# Without a card:  bash benchmarks/gpu.sh --device cpu --tiny       What is done:  bash benchmarks/gpu.sh --list
set -euo pipefail
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,memory.total,driver_version,compute_mode --format=csv || true
fi
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/gpu.py" "$@"
