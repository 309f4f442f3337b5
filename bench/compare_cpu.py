#!/usr/bin/env python3
"""mlxcel against llama.cpp on the CPU: whole processes, interleaved, with a null arm.

compare_cpu.py --mlxcel BIN --llama-speed BIN --ours MODEL --theirs MODEL [--pairs 7] [--threads 2]
               [--prefill 256] [--decode 64] [--depth 0]

Order of a round: ours, theirs, ours again (the null arm is the second over the first). Prints a
table of medians with lowest and highest, and the ratio pair by pair; writes nothing.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess


def ours(a, what):
    cmd = [a.mlxcel, "bench", "-m", a.ours, "-r", "1", "-t", str(a.threads), "-o", "json",
           "--device", "cpu", "-p", str(a.prefill if what == "prefill" else 0),
           "-n", str(a.decode if what == "decode" else 0), "-d", str(a.depth)]
    out = json.loads(subprocess.run(cmd, check=True, capture_output=True, text=True).stdout)
    row = [r for r in out["rows"] if r["test"] == what][0]
    return statistics.median(row["tok_s"]), out


def theirs(a, what):
    cmd = [a.llama_speed, a.theirs, str(a.threads), str(a.prefill if what == "prefill" else 0),
           str(a.decode if what == "decode" else 0), str(a.depth)]
    out = json.loads(subprocess.run(cmd, check=True, capture_output=True, text=True).stdout)
    return out[0]["avg_ts"], out[0]


def spread(xs):
    return f"{statistics.median(xs):8.2f} ({min(xs):.2f} – {max(xs):.2f})"


def main():
    p = argparse.ArgumentParser()
    for name in ("mlxcel", "llama-speed", "ours", "theirs"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--pairs", type=int, default=7)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--prefill", type=int, default=256)
    p.add_argument("--decode", type=int, default=64)
    p.add_argument("--depth", type=int, default=0)
    a = p.parse_args()
    cpu = [x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")]
    print(f"{cpu[0]}, {len(cpu)} processors, {platform.release()}, load {os.getloadavg()[0]:.2f}")
    print(f"ours {os.path.basename(a.ours)}, theirs {os.path.basename(a.theirs)}, "
          f"{a.threads} threads, depth {a.depth}, {a.pairs} rounds")
    for what, n in (("decode", a.decode), ("prefill", a.prefill)):
        if n == 0:
            continue
        x, y, z, info = [], [], [], None
        ours(a, what)
        theirs(a, what)
        for _ in range(a.pairs):
            v, info = ours(a, what)
            x.append(v)
            y.append(theirs(a, what)[0])
            z.append(ours(a, what)[0])
        print(f"{what} {n}: ours {spread(x)} tok/s, theirs {spread(y)} tok/s")
        print(f"   ours / theirs {spread([i / j for i, j in zip(x, y)])}"
              f"   null arm {spread([i / j for i, j in zip(z, x)])}")
        if what == "decode":
            rate = statistics.median(x) * info["bytes_per_token"] / 1e9
            print(f"   {info.get('arch', '')} {info['format']}: {rate:.1f} GB/s of "
                  f"{info['read_gb_s']:.1f} read in the run = {100 * rate / info['read_gb_s']:.0f} %")


if __name__ == "__main__":
    main()
