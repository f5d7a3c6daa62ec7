#!/usr/bin/env bash
# Everything that a GPU machine can say about this tree, in one go: the gpu tests, then the numbers.
# Usage: benchmarks/on_gpu.sh OUT [tests] [train] [distill] [quick] [fused] [session] [reproduce]
# Without a part: tests, train, session and reproduce.
# The machine needs torch with CUDA, pytest, hypothesis, and gigamlp's own dependencies on the path; nothing is installed.
set -uo pipefail
out=${1:?the folder for results}
shift
parts=${*:-tests train session reproduce}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
step() {
  local name=$1
  shift
  echo "== $name: $*"
  local begin=$SECONDS
  "$@" 2>&1 | tee "$out/$name.log" | tail -n "${LINES_SHOWN:-25}"
  local rc=${PIPESTATUS[0]}
  echo "== $name: exit $rc after $((SECONDS - begin)) s"
  [ "$rc" -eq 0 ] || status=1
}
for part in $parts; do
  case $part in
    tests) step gpu-tests timeout 240 python3 -m pytest -m gpu -q --maxfail=20 --durations=8 -p no:cacheprovider tests ;;
    train) step train-time timeout 200 python3 benchmarks/train_time.py --out "$out/train-time.json" ;;
    fused) step fused timeout 230 python3 benchmarks/fused_cuda.py --out "$out/fused-cuda.json" ;;
    distill) step distill timeout 280 python3 benchmarks/distill_h200.py --out "$out/distill" ;;
    session) step session-overhead timeout 120 python3 benchmarks/session_overhead.py --device cuda --out "$out/session-overhead.json" ;;
    quick) step quick timeout 150 python3 -m gigamlp reproduce --device cuda --quick --out "$out/quick" ;;
    reproduce) step reproduce timeout 560 python3 -m gigamlp reproduce --device cuda --out "$out/reproduce" ;;
    *) echo "unknown part $part" >&2; status=2 ;;
  esac
done
exit $status
