#!/usr/bin/env python3
"""What clients of the server see, by a client that stamps every token. Standard library only.

serve.py gap    --mlxcel BIN -m MODEL     worst pause of running streams while a long prompt arrives
serve.py load   --mlxcel BIN -m MODEL     streams beside prompts: tokens/s of all, pauses, TTFT
serve.py cached --mlxcel BIN -m MODEL     time to the first token, cold and with 95 % cached
serve.py one    --mlxcel BIN -m MODEL     one stream against `mlxcel generate`, interleaved

Arms of gap and load are servers that differ in MLXCEL_MIXED_STEP or in flags (--arm "NAME:VAR=V
--flag v"); all are up from the start and take turns within a round. Prompts are random token ids,
new ones every time unless said. Every table says the load of the machine.
"""
import argparse
import http.client
import json
import os
import platform
import random
import re
import shlex
import socket
import statistics
import subprocess
import threading
import time


class Server:
    def __init__(self, a, name, env, flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.name = name
        cmd = [a.mlxcel, "serve", "-m", a.model, "--port", str(self.port), "--device", a.device,
               "-c", str(a.ctx), "--n-parallel", "9", "--max-queue-depth", "64"]
        cmd += (["--threads", str(a.threads)] if a.threads else []) + flags
        self.proc = subprocess.Popen(cmd, env={**os.environ, **env}, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL)
        for _ in range(1200):
            if self.proc.poll() is not None:
                raise SystemExit("the server did not start: " + shlex.join(cmd))
            try:
                if self.get("/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.05)
        else:
            raise SystemExit("the server does not start: " + shlex.join(cmd))
        self.props = self.get("/props")[1]

    def get(self, path):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        c.request("GET", path)
        r = c.getresponse()
        return r.status, json.loads(r.read())

    def cpu_s(self):
        """Processor time of all threads so far; with one compute thread it is work, not waiting."""
        task = f"/proc/{self.proc.pid}/task"
        return sum(int(open(f"{task}/{t}/schedstat").read().split()[0])
                   for t in os.listdir(task)) * 1e-9

    def stop(self):
        self.proc.terminate()
        self.proc.wait()


class Stream(threading.Thread):
    """One streamed completion: when it was sent, when each token came."""

    def __init__(self, server, ids, n, cache=False):
        super().__init__(daemon=True)
        self.body = json.dumps({"prompt": ids, "n_predict": n, "temperature": 0, "stream": True,
                                "ignore_eos": True, "return_tokens": True, "cache_prompt": cache})
        self.port, self.at, self.last = server.port, [], {}
        self.sent, self.leave = 0.0, False
        self.live = True  # tokens are counted as they come, for wait_tokens

    def run(self):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        self.sent = time.monotonic()
        c.request("POST", "/completion", self.body, {"Content-Type": "application/json"})
        r = c.getresponse()
        open_event = b""
        pieces = []  # understood later: the client shares the server's processors
        while True:
            piece = r.read1(65536)
            if not piece:
                break
            pieces.append((time.monotonic(), piece))
            if self.live:
                open_event = self.count(*pieces[-1], open_event)
            if self.leave:
                break
        c.close()
        if not self.live:
            for now, piece in pieces:
                open_event = self.count(now, piece, open_event)
        if not self.leave:
            events = b"".join(piece for _, piece in pieces).split(b"\n\n")
            self.last = json.loads([e for e in events if e.startswith(b"data: ")][-1][6:])
            if "error" in self.last:
                raise SystemExit(self.last)

    def count(self, now, piece, open_event):
        """Stamps the tokens of the events that end in this piece; what is left over."""
        whole, _, rest = (open_event + piece).rpartition(b"\n\n")
        for tokens in re.findall(rb'"tokens":\[([^\]]+)\]', whole):
            self.at += [now] * (tokens.count(b",") + 1)
        return rest

    def wait_tokens(self, n):
        while len(self.at) < n and self.is_alive():
            time.sleep(0.001)


def ids(n):
    return [random.randrange(1000, 40000) for _ in range(n)]


def gaps(at, since, until):
    at = [t for t in at if t <= until]
    return [b - a for a, b in zip(at, at[1:]) if b > since]


def spread(xs, scale=1.0, fmt="%.1f"):
    xs = [x * scale for x in xs]
    return (fmt + " (" + fmt + " - " + fmt + ")") % (statistics.median(xs), min(xs), max(xs))


def head(a, servers):
    cpu = [x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")]
    print(f"{cpu[0]}, {len(cpu)} processors, {platform.release()}, load {os.getloadavg()[0]:.2f} "
          f"before, {os.path.basename(a.model)}")
    for s in servers:
        p = s.props
        print(f"  {s.name}: {p['device']} {p['arch']}, {p['threads']} threads, KV {p['kv_storage']}"
              f", prefill chunk {p['prefill_chunk']} ({p['prefill_chunk_why']})")


def open_arms(a, default):
    servers = []
    for text in a.arm or default:
        name, _, rest = text.partition(":")
        words = shlex.split(rest)
        env = dict(w.split("=", 1) for w in words if "=" in w and not w.startswith("-"))
        servers.append(Server(a, name, env, [w for w in words if w.startswith("-") or "=" not in w]))
    return servers


def run_gap(server, n_streams, n_prompt):
    streams = [Stream(server, ids(16), 4000) for _ in range(n_streams)]
    for s in streams:
        s.start()
    for s in streams:
        s.wait_tokens(20)
    time.sleep(0.2)
    prompt = Stream(server, ids(n_prompt), 1)
    prompt.start()
    prompt.join()
    inside = [g for s in streams for g in gaps(list(s.at), prompt.sent, prompt.at[0])]
    quiet = [g for s in streams for g in gaps(list(s.at), 0, prompt.sent)]
    return max(inside), statistics.median(quiet), prompt.at[0] - prompt.sent, len(inside), streams


def gap(a):
    servers = open_arms(a, ["default:"])
    head(a, servers)
    print(f"a prompt of {a.prompt} tokens beside running streams; ms; median (least - most) of "
          f"{a.rounds} rounds\n{'arm':10} {'streams':>7}  {'worst pause':26} {'quiet pause':20} "
          f"{'prompt TTFT':26} tokens meanwhile")
    for n in a.streams:
        rows = {s.name: [] for s in servers}
        for _ in range(a.rounds):
            for s in servers:
                *row, streams = run_gap(s, n, a.prompt)
                rows[s.name].append(row)
                for t in streams:
                    t.leave = True
                for t in streams:
                    t.join()
        for s in servers:
            w, q, t, k = zip(*rows[s.name])
            print(f"{s.name:10} {n:7}  {spread(w, 1e3):26} {spread(q, 1e3, '%.2f'):20} "
                  f"{spread(t, 1e3, '%.0f'):26} {spread(k, 1, '%.0f')}", flush=True)
    return servers


def run_load(server, n_streams, n_decode, n_prompts, n_prompt):
    streams = [Stream(server, ids(16), n_decode) for _ in range(n_streams)]
    start, cpu = time.monotonic(), server.cpu_s()
    for s in streams:
        s.start()
    for s in streams:
        s.wait_tokens(4)
    ttft, last = [], start
    for _ in range(n_prompts):
        p = Stream(server, ids(n_prompt), 1)
        p.start()
        p.join()
        ttft.append(p.at[0] - p.sent)
        last = p.at[0]
    for s in streams:
        s.join()
    stop = max([last] + [s.at[-1] for s in streams])
    inside = [g for s in streams for g in gaps(s.at, start, stop)]
    tokens = n_streams * (n_decode + 16) + n_prompts * (n_prompt + 1)
    return tokens / (stop - start), max(inside), statistics.mean(ttft), server.cpu_s() - cpu


def load(a):
    servers = open_arms(a, ["separate:", "mixed:MLXCEL_MIXED_STEP=1"])
    head(a, servers)
    print(f"streams of {a.decode} tokens beside {a.prompts} prompts of {a.prompt}, one after the "
          f"other; median (least - most) of {a.rounds} rounds\n{'arm':10} {'streams':>7}  "
          f"{'tokens/s of all':24} {'worst pause ms':24} {'mean TTFT ms':22} CPU s")
    for n in a.streams:
        rows = {s.name: [] for s in servers}
        for _ in range(a.rounds):
            for s in servers:
                rows[s.name].append(run_load(s, n, a.decode, a.prompts, a.prompt))
        for s in servers:
            r, w, t, c = zip(*rows[s.name])
            print(f"{s.name:10} {n:7}  {spread(r):24} {spread(w, 1e3):24} "
                  f"{spread(t, 1e3, '%.0f'):22} {spread(c, 1, '%.2f')}", flush=True)
    return servers


def cached(a):
    servers = open_arms(a, ["default:"])
    head(a, servers)
    s = servers[0]
    cold, warm, ratio = [], [], []
    n = a.prompt
    for _ in range(a.rounds):
        prefix = ids(n * 95 // 100)
        times = []
        for _ in range(2):
            t = Stream(s, prefix + ids(n - len(prefix)), 1, cache=True)
            t.start()
            t.join()
            times.append((t.at[0] - t.sent, t.last["tokens_cached"], t.last["timings"]["cache_n"]))
        cold.append(times[0][0])
        warm.append(times[1][0])
        ratio.append(times[0][0] / times[1][0])
    print(f"a prompt of {n} tokens, 95 % cached ({times[1][2]} taken from the cache); ms to the "
          f"first token; median (least - most) of {a.rounds}\ncold {spread(cold, 1e3)}\n"
          f"cached {spread(warm, 1e3)}\ncold/cached pair by pair {spread(ratio, 1, '%.2f')}")
    return servers


def one(a):
    servers = open_arms(a, ["default:"])
    head(a, servers)
    s, rates = servers[0], {"stream": [], "engine": [], "generate": [], "again": []}
    prompt = "Once upon a time"

    def generate():
        cmd = [a.mlxcel, "generate", "-m", a.model, "-p", prompt, "--no-chat-template", "-n",
               str(a.decode), "--ignore-eos", "--json", "--quiet", "--device", a.device]
        cmd += ["--threads", str(a.threads)] if a.threads else []
        out = json.loads(subprocess.run(cmd, check=True, capture_output=True).stdout)
        return out["timings"]["predicted_per_second"]

    for i in range(a.rounds + 1):
        t = Stream(s, prompt, a.decode)
        t.live = False
        t.start()
        t.join()
        row = {"stream": (len(t.at) - 1) / (t.at[-1] - t.at[0]),
               "engine": t.last["timings"]["predicted_per_second"], "generate": generate(),
               "again": generate()}
        for k, v in row.items():
            if i:  # the first round warms up
                rates[k].append(v)
    g = rates["generate"]
    print(f"{a.decode} tokens, one client; tokens/s; median (least - most) of {a.rounds} rounds")
    for k, what in (("generate", "mlxcel generate"), ("again", "the same again"),
                    ("stream", "stream, as received"), ("engine", "stream, as the server says")):
        over = [x / y for x, y in zip(rates[k], g)]
        print(f"{what:28} {spread(rates[k]):26} over generate {spread(over, 1, '%.3f')}")
    return servers


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["gap", "load", "cached", "one"])
    p.add_argument("--mlxcel", required=True)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--ctx", type=int, default=8192)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--streams", type=int, nargs="+")
    p.add_argument("--prompt", type=int)
    p.add_argument("--prompts", type=int, default=3)
    p.add_argument("--decode", type=int, default=256)
    p.add_argument("--arm", action="append")
    a = p.parse_args()
    a.streams = a.streams or ([1, 2, 4, 8] if a.what == "load" else [1, 4])
    a.prompt = a.prompt or {"gap": 4096, "load": 1024, "cached": 2048, "one": 0}[a.what]
    servers = {"gap": gap, "load": load, "cached": cached, "one": one}[a.what](a)
    for s in servers:
        s.stop()
    print(f"load {os.getloadavg()[0]:.2f} after")


main()
