#!/bin/sh
# The speed tables of the CUDA backend, on a machine with a GPU:
#
#     bench/h200.sh > bench/h200.txt                    all parts
#     bench/h200.sh chain peers                         some: ops load chain launch profile peers
#     LLAMA_CPP=folder bench/h200.sh peers              with llama.cpp's figures beside ours
#
# BUILD is the build folder (build/release); what is not there is made. LLAMA_CPP is a folder with
# lcpp_bench, see bench/peers.py. Weights are random, in the geometry of the models named; shares are
# of the read rate measured in the same run. The exit status is 1 when a part failed.
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build/release}
all="ops load chain launch profile peers"
parts=${*:-$all}
for part in $parts; do
    case " $all " in
    *" $part "*) ;;
    *) echo "h200.sh: no part '$part'; there are $all" >&2 && exit 2 ;;
    esac
done
mlxcel=$build/mlxcel
bench_cuda=$build/tests/ops/bench_cuda
for program in "$mlxcel" "$bench_cuda"; do
    [ -x "$program" ] || make -s "B=$build" "$program" >&2 || exit 1
done
failed=0

# Prints a command as somebody would type it, and runs it.
show() {
    echo
    echo "\$ $*"
    "$@" || { echo "FAILED: exit $?"; failed=1; }
}

m() {
    show "$mlxcel" "$@" --device cuda
}

run_part() {
    case $1 in
    ops) show "$bench_cuda" gemv batch attn gemm step ;;
    load) show "$bench_cuda" load ;;
    chain) m profile --chain 3200 ;;
    launch)
        m profile --launch-heavy
        m profile --launch-heavy -m synthetic:llama-3.1-8b-bf16 -r 5
        ;;
    profile)
        m profile -m synthetic:smollm2-135m-q4_1 -d 1000
        m profile -m synthetic:smollm2-135m-bf16 -d 1000
        m profile -m synthetic:qwen3-8b-affine4 -d 1024
        m profile -m synthetic:llama-3.1-8b-bf16 -d 1024
        ;;
    peers)
        show python3 bench/peers.py --mlxcel "$mlxcel" ${LLAMA_CPP:+--llama "$LLAMA_CPP"}
        ;;
    esac
}

echo "# bench/h200.sh $parts, $("$mlxcel" --version), $(date -u +%Y-%m-%d)"
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader 2>/dev/null
for part in $parts; do
    t0=$(date +%s)
    run_part "$part"
    echo
    echo "# $part: $(($(date +%s) - t0)) s"
done
exit $failed
