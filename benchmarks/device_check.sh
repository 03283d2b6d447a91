#!/usr/bin/env bash
# All that a lent GPU is to check and time, in under five minutes: the tests marked `gpu`, then the
# default model served with torch on the device, alone, 32 at once and with drafts.
# Usage: benchmarks/device_check.sh [PYTHON] ; results go to ${OUT:-benchmarks/results}/device.txt
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${1:-.venv/bin/python}"
TWINFIRE="$(dirname "$PYTHON")/twinfire"
OUT="${OUT:-benchmarks/results}"
mkdir -p "$OUT"
exec > >(tee "$OUT/device.txt") 2>&1
date -u +%FT%TZ
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || exit 1
"$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())'
timeout 150 "$PYTHON" -m pytest -m gpu tests/gpu -q
for speculate in off suffix hybrid; do
    echo "== serve --device cuda --speculate $speculate"
    "$TWINFIRE" serve --device cuda --speculate "$speculate" --port 8123 &
    server=$!
    for _ in $(seq 60); do
        curl -sf http://127.0.0.1:8123/health > /dev/null && break
        sleep 1
    done
    timeout 60 "$TWINFIRE" bench load http://127.0.0.1:8123 single --num-requests 4
    timeout 60 "$TWINFIRE" bench load http://127.0.0.1:8123 concurrent --num-requests 128 --concurrency 32
    kill "$server"
    wait "$server"
done
date -u +%FT%TZ
