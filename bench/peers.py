#!/usr/bin/env python3
"""mlxcel and llama.cpp on the same files: decode, prefill and loading, figures side by side.

    peers.py --mlxcel build/release/mlxcel [--llama FOLDER] [MODEL:FORMAT ...]

FOLDER has a program lcpp_bench that times llama.cpp through its library (MODEL THREADS N_PREFILL
N_DECODE REPS DEPTH N_SEQS; a line of JSON with load_s, pp and tg) and the libraries it needs, but
for CUDA's. Without it llama.cpp's columns stay empty. Files are made by make_gguf.py, one at a
time, in a folder that is removed at the end. Each figure is the median of --reps repetitions within
one process; the two programs run one after the other.
"""
import argparse
import glob
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = [
    "smollm2-135m:q4_1",
    "smollm2-135m:bf16",
    "qwen3-8b:q4_0",
    "qwen3-8b:q4_1",
    "llama-3.1-8b:bf16",
]
ROOM = 20 << 30  # the largest file and some
CUDA_FOLDERS = ["/usr/local/cuda*/lib64", "/usr/local/cuda*/lib", "/usr/local/cuda*/targets/*/lib"]
CUDA_FOLDERS += ["/usr/lib/x86_64-linux-gnu", "/usr/local/lib/python3*/dist-packages/nvidia/*/lib"]
CUDA_FOLDERS += [os.path.join(sysconfig.get_paths()["purelib"], "nvidia/*/lib")]


def run(args, env=None):
    """Standard output; raises RuntimeError with the last line of what the program said."""
    name = os.path.basename(args[0])
    try:
        p = subprocess.run(args, capture_output=True, text=True, env=env, timeout=300)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name}: no exit in 300 s") from None
    except OSError as e:
        raise RuntimeError(f"{name}: no exit code: {e.strerror}") from None
    if p.returncode:
        said = (p.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise RuntimeError(f"{name}: exit {p.returncode}: {said}")
    return p.stdout


def bench_mlxcel(o, path):
    def rows(n_prefill, n_decode, depth):
        args = [o.mlxcel, "bench", "-m", path, "--device", o.device, "-r", str(o.reps)]
        args += ["-p", str(n_prefill), "-n", str(n_decode), "-d", str(depth), "-o", "json"]
        return json.loads(run(args + ["--allow-fallback"]))

    prefill, decode = rows(o.prefill, 0, 0), rows(0, o.decode, o.depth)

    def median(j):
        return statistics.median(j["rows"][0]["tok_s"])

    return {
        "decode": median(decode),
        "prefill": median(prefill),
        "load": min(prefill["load_s"], decode["load_s"]),
        "roof": decode["roof_share"],
        "rate": decode["read_gb_s"],
        "notes": prefill["fallbacks"] + decode["fallbacks"],
    }


def bench_llama(o, path):
    env = dict(os.environ)
    folders = [o.llama] + [d for f in CUDA_FOLDERS for d in sorted(glob.glob(f))]
    old = [env["LD_LIBRARY_PATH"]] if env.get("LD_LIBRARY_PATH") else []
    env["LD_LIBRARY_PATH"] = ":".join(folders + old)
    env.setdefault("LCPP_NGL", "0" if o.device == "cpu" else "99")
    env.setdefault("LCPP_UB", "2048")
    counts = [o.threads, o.prefill, o.decode, o.reps, o.depth, 1]
    j = json.loads(run([os.path.join(o.llama, "lcpp_bench"), path, *map(str, counts)], env))
    return {
        "decode": statistics.median(j["tg"]),
        "prefill": statistics.median(j["pp"]),
        "load": j["load_s"],
    }


def table_row(name, ours, theirs):
    cells = [f"{name:20}"]
    for key, form in (("decode", "10.1f"), ("prefill", "10.0f"), ("load", "8.3f")):
        both = (ours[key], theirs[key] if theirs else None)
        cells += [format(v, form) if v else " " * (len(format(0, form)) - 1) + "-" for v in both]
        if key == "load":
            continue
        cells.append(f"{both[0] / both[1]:6.2f}" if theirs and both[1] else "     -")
    roof = f"{100 * ours['roof']:5.0f} %" if ours["roof"] else "      -"
    return " ".join(cells) + roof


def compare(o, name, folder):
    geometry, fmt = name.split(":")
    path = os.path.join(folder, f"{geometry}-{fmt}.gguf")
    run([sys.executable, os.path.join(HERE, "make_gguf.py"), geometry, fmt, path])
    notes, theirs = [], None
    try:
        ours = bench_mlxcel(o, path)
        notes += [f"mlxcel: {n}" for n in ours["notes"]]
        if o.llama:
            try:
                theirs = bench_llama(o, path)
            except RuntimeError as e:
                notes.append(str(e))
        print(table_row(name, ours, theirs))
    except RuntimeError as e:
        notes.append(str(e))
        print(f"{name:20} no figures")
    finally:
        os.remove(path)
    for n in dict.fromkeys(notes):
        print(f"    {n}")
    sys.stdout.flush()
    return not any("exit" in n for n in notes)


def folder_for_files():
    if os.environ.get("TMPDIR"):
        return os.environ["TMPDIR"]
    shm = "/dev/shm"
    return shm if os.path.isdir(shm) and shutil.disk_usage(shm).free > ROOM else "/tmp"


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument("--mlxcel", required=True)
    a.add_argument("--llama", default="")
    a.add_argument("--device", default="cuda")
    a.add_argument("--threads", type=int, default=8, help="of llama.cpp")
    a.add_argument("--prefill", type=int, default=1024)
    a.add_argument("--decode", type=int, default=128)
    a.add_argument("--depth", type=int, default=1024)
    a.add_argument("--reps", type=int, default=3)
    a.add_argument("models", nargs="*", default=MODELS)
    o = a.parse_args()
    if not o.llama:
        print("llama.cpp: not given, rows left out")
    print(f"decode of {o.decode} tokens behind {o.depth}, prefill of {o.prefill}; tok/s, seconds")
    print(
        f"{'model':20} {'decode':>10} {'llama.cpp':>10} {'ratio':>6} {'prefill':>10} "
        f"{'llama.cpp':>10} {'ratio':>6} {'load':>8} {'l.cpp':>8}   roof"
    )
    folder = tempfile.mkdtemp(prefix="mlxcel-peers-", dir=folder_for_files())
    try:
        good = [compare(o, m, folder) for m in o.models]
    finally:
        shutil.rmtree(folder)
    sys.exit(0 if all(good) else 1)


main()
