#!/usr/bin/env bash
# The fused all-reduce on the GPUs of this machine: build, test, measure, record. One GPU is enough for most of it.
#
#   scripts/check_fused.sh [FOLDER]        default FOLDER: bench/fused
#
# 1. builds the CUDA part as a debug build, in which tests can make ranks late and take protection away, and as a release
#    build, each in its own folder; says what registers and local memory the kernels take
# 2. runs the tests marked gpu of the fused kernel with both: virtual ranks, processes that share a GPU, 2 to 8 GPUs
# 3. runs `fc-eval bench allreduce`: virtual ranks at W = 2, 4, 8, processes, and between as many GPUs as there are, also
#    through memory of the host (staged)
# Everything said goes to FOLDER/check.txt, measurements to FOLDER/allreduce.csv, a page of them to FOLDER/allreduce.md.
# Exit status: 0 all went well, 1 something failed, 2 there is nothing to run it with.
# BUILT names a folder with both builds made elsewhere, fused_debug and fused_release, which are then taken as they are.
# SOURCE says of which commit a tree is that is not in git.
# PYTHON names the interpreter: with fc_eval's dependencies and pytest, but without an editable fc_eval, which would be
# taken instead of what is built here. NANOBIND names nanobind's cmake folder where that interpreter has none, QUICK=1
# leaves out the long sizes, LIMIT_S ends a step that takes longer (default 3600).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
folder=${1:-bench/fused}
python=${PYTHON:-python3}
BUILT=${BUILT:-}
nanobind=${NANOBIND:-$("$python" -m nanobind --cmake_dir 2>/dev/null)}
tools=(nvidia-smi)
[ -n "$BUILT" ] || tools+=(nvcc cmake)
for tool in "${tools[@]}"; do
  command -v "$tool" >/dev/null || { echo "error: $tool is not there" >&2; exit 2; }
done
[ -n "$nanobind$BUILT" ] || { echo "error: nanobind is not there: pip install nanobind, or name its cmake folder in NANOBIND" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus | wc -l)
mkdir -p "$folder"
record=$folder/check.txt
: >"$record"
failed=0
say() { printf '%s\n' "$*" | tee -a "$record"; }
run() {
  say ""
  say "\$ $*"
  timeout "${LIMIT_S:-3600}" "$@" 2>&1 | tail -n "${LINES_KEPT:-40}" | tee -a "$record"
  [ "${PIPESTATUS[0]}" = 0 ] || { say "FAILED"; failed=1; }
}

# build NAME DEBUG: the extensions, and a copy of the package with them in build/NAME/tree.
build() {
  local at=${BUILT:-build}/$1 tree=build/$1/tree
  if [ -n "$BUILT" ]; then
    say "built elsewhere: $1, $(sha256sum "$at"/_native_cuda*.so | cut -c1-16)"
  else
    compile "$@"
  fi
  mkdir -p "$tree"
  cp -r fc_eval conf tests "$tree/"
  find "$at" -maxdepth 1 -name '_native*.so' -exec cp {} "$tree/fc_eval/" \;
  cp "$at/_native_build.txt" "$tree/fc_eval/"
}

compile() {
  local at=build/$1
  FC_EVAL_CUDA=1 FC_EVAL_CUDA_ARCHITECTURES=${FC_EVAL_CUDA_ARCHITECTURES:-90-real} run cmake -S cuda_ext -B "$at" \
    -DFC_EVAL_FUSED_DEBUG="$2" -Dnanobind_DIR="$nanobind" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')"
  LINES_KEPT=5 run cmake --build "$at" --parallel "$(nproc)"
}

say "the fused all-reduce, $(date -u +%Y-%m-%d), source ${SOURCE:-$(git describe --always --dirty 2>/dev/null || echo 'not in git')}"
say "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader)"
build fused_debug ON
build fused_release OFF
if command -v cuobjdump >/dev/null; then
  say ""
  cuobjdump --dump-resource-usage build/fused_release/tree/fc_eval/_native_cuda*.so 2>/dev/null |
    grep -A1 'fused_kernel' | grep -oE 'fused_kernel[A-Za-z0-9_]*|REG:[0-9]+|STACK:[0-9]+|SHARED:[0-9]+' | paste -sd' ' | tee -a "$record"
fi

for build in fused_debug fused_release; do
  PYTHONPATH=$PWD/build/$build/tree run "$python" -m pytest -q -rs -m gpu \
    --rootdir "$PWD/build/$build/tree" -c pyproject.toml \
    "build/$build/tree/tests/test_fused.py" "build/$build/tree/tests/test_fused_gpu.py"
done

sizes=64,256,1024,4096,16384,65536,262144,1048576
[ "${QUICK:-0}" = 1 ] && sizes=64,1024,16384
bench() {
  PYTHONPATH=$PWD/build/fused_release/tree run "$python" -m fc_eval.cli bench allreduce "out=$folder/allreduce.csv" "$@"
}
for ranks in 2 4 8; do bench "ranks=$ranks" virtual=true kib="$sizes"; done
bench ranks=2 virtual=true transport=staged kib="$sizes"
for ranks in 2 4 8; do
  [ "$gpus" -ge "$ranks" ] || continue
  bench "ranks=$ranks" transport=peer kib="$sizes" blocks=0,16,32,64,132
  bench "ranks=$ranks" transport=staged kib="$sizes"
done
[ "$gpus" -ge 2 ] || bench ranks=2 kib=64,1024,16384
say ""
say "$([ $failed = 0 ] && echo 'result: all went well' || echo 'result: FAILED')"
exit $failed
