#!/bin/sh
# The speed table of the CUDA backend, on a machine with a GPU: bench/h200.sh > bench/h200.txt
# Weights are random, in the geometry of the models named; shares are of the read rate measured in
# the same run.
set -e
cd "$(dirname "$0")/.."
make -s build/release/tests/ops/bench_cuda "$@" >&2
exec build/release/tests/ops/bench_cuda
