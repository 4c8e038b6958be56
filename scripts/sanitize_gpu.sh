#!/usr/bin/env bash
# The CUDA codec's kernels under compute-sanitizer: memcheck, initcheck, racecheck and synccheck over
# cuda_ext/tests/gpu_check.py, which needs a GPU and the built extension (pip install -e .) but no torch.
#
#   scripts/sanitize_gpu.sh [RECORD]        default RECORD: reports/native/sanitizer.txt
#
# First two mistakes are planted, which memcheck and initcheck must see; a tool that sees nothing proves nothing.
# (The kernels use no shared memory, so racecheck and synccheck have no mistake of ours to be shown.)
# Writes the record only after every tool has run. Exit status: 0 all clean, 1 something was found or not seen, 2 no tool.
# PYTHON names the interpreter, SANITIZER the tool, EVERY=n takes every n-th case.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
record=${1:-reports/native/sanitizer.txt}
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
check=(cuda_ext/tests/gpu_check.py --every "${EVERY:-1}")
if ! [ -x "$sanitizer" ]; then
  echo "error: compute-sanitizer is not there: install the CUDA toolkit, or name it in SANITIZER" >&2
  exit 2
fi

text=$(mktemp)
trap 'rm -f "$text"' EXIT
failed=0
say() { printf '%s\n' "$*" | tee -a "$text"; }

# run EXPECTED-EXIT TOOL ARGUMENTS...: 0 means that the tool must find nothing, 1 that it must find something.
run() {
  local expected=$1 tool=$2 status=0 found
  shift 2
  say ""
  say "\$ compute-sanitizer --tool $tool --error-exitcode 66${padding[*]:+ ${padding[*]}} python ${check[*]}${*:+ $*}"
  found=$("$sanitizer" --tool "$tool" --error-exitcode 66 "${padding[@]}" "$python" "${check[@]}" "$@" 2>&1) || status=$?
  printf '%s\n' "$found" | grep -E 'SUMMARY|compared|planted|differs|^error|Error:|not supported' | tail -n 8 | tee -a "$text"
  if [ "$expected" = 0 ] && { [ $status != 0 ] || ! grep -q 'SUMMARY: 0 ' <<<"$found"; }; then
    printf '%s\n' "$found" | tail -n 40 >&2
    say "FAILED: exit status $status, expected a clean run"
    failed=1
  elif [ "$expected" = 1 ] && { [ $status = 0 ] || grep -q 'SUMMARY: 0 ' <<<"$found" || ! grep -q SUMMARY <<<"$found"; }; then
    printf '%s\n' "$found" | tail -n 40 >&2
    say "FAILED: exit status $status, the planted mistake was not seen"
    failed=1
  else
    say "$([ "$expected" = 0 ] && echo clean || echo seen, as it must be)"
  fi
}

say "compute-sanitizer over the kernels of the CUDA codec, $(date -u +%Y-%m-%d)"
say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1 || echo 'GPU unknown')"
say "$("$sanitizer" --version 2>/dev/null | grep -iE 'version' | head -n 1)"
say "$("$python" -c 'import platform, numpy; print("python", platform.python_version() + ", numpy", numpy.__version__)')"
say "source $(git describe --always --dirty 2>/dev/null || echo 'not in git')"

padding=(--padding 256) # room behind every allocation, so that a short step beyond one does not end in the next
run 1 memcheck --plant out-of-bounds
run 0 memcheck
padding=()
run 1 initcheck --no-poison --plant uninitialized
run 0 initcheck --no-poison
run 0 racecheck
run 0 synccheck

say ""
say "$([ $failed = 0 ] && echo 'result: all clean, both planted mistakes seen' || echo 'result: FAILED')"
mkdir -p "$(dirname "$record")"
cp "$text" "$record"
echo "written: $record"
exit $failed
