"""Many clients of `mlxcel serve` for a while: no error, every answer is what it is alone, memory stands still.

    python3 bench/soak.py -m MODEL [--clients 64] [--minutes 10] [--parallel 8] [--program build/release/mlxcel]

Alone means: one request at a time, without the prompt cache, before the load. Then each client asks again
and again for one of these answers, at random: as a stream or whole, greedy or with a seed, from a prompt of
a few to some hundred tokens, most with a beginning that others share; one in eight leaves in the middle.
Memory is RssAnon + VmSwap, every second; after a quarter of the time a line is fitted to it."""
import argparse
import collections
import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from urllib.parse import urlparse

BEGINNINGS = [
    "You are a careful assistant who answers in short sentences. " * k for k in (1, 4, 12, 40)
] + ["", "Einige W\u00f6rter auf Deutsch, \u65e5\u672c\u8a9e\u3082\u5c11\u3057. "]
QUESTIONS = ["Why is the sky blue?", "Name three rivers.", "What is 12 times 12?", "Tell a story about a fox.",
             "Write a list of fruits.", "How do magnets work?", "Explain rain to a child.", "x"]


def cases():
    rng = random.Random(7)
    for i, begin in enumerate(BEGINNINGS):
        for j, question in enumerate(QUESTIONS):
            case = {"max_tokens": rng.choice([1, 8, 24, 48, 96]), "temperature": 0}
            if (i + j) % 5 == 4:
                case.update(temperature=1.2, seed=i * 100 + j)
            if (i + j) % 7 == 3:
                case["stop"] = ["\n", "the"]
            text = begin + question
            if (i + j) % 2:
                yield "/v1/completions", {"prompt": text, **case}
            else:
                yield "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **case}


def text_of(choice):
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


class Client:
    def __init__(self, address):
        self.where = urlparse(address)

    def open(self, path, body):
        c = http.client.HTTPConnection(self.where.hostname, self.where.port, timeout=600)
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return c, c.getresponse()

    def whole(self, path, body):
        c, r = self.open(path, body)
        data = r.read()
        c.close()
        assert r.status == 200, (r.status, data[:300])
        choice = json.loads(data)["choices"][0]
        return text_of(choice), choice["finish_reason"]

    def stream(self, path, body, leave_after=None):
        c, r = self.open(path, {**body, "stream": True})
        text, finish, done, n = "", None, False, 0
        assert r.status == 200, (r.status, r.read()[:300])
        for line in r:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                done = True
                break
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += text_of(choice)
                finish = choice["finish_reason"] or finish
            n += 1
            if n == leave_after:
                c.close()
                return None
        c.close()
        assert done, "a stream without an end"
        return text, finish


def memory_kib(pid):
    with open(f"/proc/{pid}/status") as f:
        return sum(int(n) for n in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+)", f.read()))


def slope(points):
    """Least squares: (per minute, standard error)."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    sxx = sum((x - mx) ** 2 for x, _ in points)
    b = sum((x - mx) * (y - my) for x, y in points) / sxx
    rest = sum((y - my - b * (x - mx)) ** 2 for x, y in points)
    return b, (rest / max(n - 2, 1) / sxx) ** 0.5


def start(args, folder):
    log = open(os.path.join(folder, "log"), "w+")
    p = subprocess.Popen([args.program, "serve", "-m", args.model, "--port", "0", "--max-queue-depth", str(args.clients),
                          "--n-parallel", str(args.parallel), "--prompt-cache-bytes", args.cache, "--no-request-log",
                          "-c", "4096"], stderr=log, stdin=subprocess.DEVNULL)
    while True:
        with open(log.name) as f:
            text = f.read()
        found = re.search(r"ready at (http://\S+)", text)
        if found:
            return p, found[1], log.name
        if p.poll() is not None:
            sys.exit(text)
        time.sleep(0.05)


def get(client, path, method="GET"):
    c = http.client.HTTPConnection(client.where.hostname, client.where.port, timeout=60)
    c.request(method, path)
    data = json.loads(c.getresponse().read())
    c.close()
    return data


class Load:
    def __init__(self, client, wanted, seconds):
        self.client, self.wanted, self.end = client, wanted, time.monotonic() + seconds
        self.counts, self.faults = collections.Counter(), []
        self.lock = threading.Lock()

    def run(self, number):
        rng = random.Random(number)
        while time.monotonic() < self.end:
            path, body, want = rng.choice(self.wanted)
            kind = rng.choice(["whole"] * 3 + ["stream"] * 4 + ["left"])
            try:
                if kind == "whole":
                    got = self.client.whole(path, body)
                else:
                    got = self.client.stream(path, body, rng.randint(1, 12) if kind == "left" else None)
                    kind = "stream" if got and kind == "left" else kind  # ended before it could leave
                fault = None if kind == "left" or got == want else f"{path} {body}: {got!r}, alone {want!r}"
            except Exception as e:
                fault = f"{kind} {path}: {type(e).__name__}: {e}"
            with self.lock:
                self.counts[kind] += 1
                if fault:
                    self.faults.append(fault)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("-m", "--model", required=True)
    a.add_argument("--program", default="build/release/mlxcel")
    a.add_argument("--clients", type=int, default=64)
    a.add_argument("--parallel", type=int, default=8)
    a.add_argument("--minutes", type=float, default=10)
    a.add_argument("--cache", default="32M", help="bytes of prompt cache; full well before the fit begins")
    args = a.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        p, address, log = start(args, folder)
        try:
            good = soak(args, p, Client(address))
        finally:
            p.terminate()
            status = p.wait(60)
        print("exit status", status)
        if status != 0:
            print(open(log).read()[-2000:])
    sys.exit(0 if good and status == 0 else 1)


def soak(args, p, client):
    t = time.monotonic()
    wanted = [(path, body, client.whole(path, {**body, "cache_prompt": False})) for path, body in cases()]
    print(f"{len(wanted)} answers alone, {time.monotonic() - t:.0f} s", flush=True)
    before = get(client, "/v1/stats")
    load = Load(client, wanted, args.minutes * 60)
    threads = [threading.Thread(target=load.run, args=(i,)) for i in range(args.clients)]
    t = time.monotonic()
    points = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        points.append(((time.monotonic() - t) / 60, memory_kib(p.pid)))
        time.sleep(1)
    stats = get(client, "/v1/stats")
    get(client, "/v1/cache/reset", "POST")
    for _ in range(100):  # the engine does it between two steps
        idle = get(client, "/v1/stats")
        if idle["kv_pages_free"] == idle["kv_pages"]:
            break
        time.sleep(0.1)
    late = [(x, y) for x, y in points if args.minutes / 4 <= x <= args.minutes]
    b, error = slope(late)
    mean = sum(y for _, y in late) / len(late)
    tokens = stats["decode_tokens"] - before["decode_tokens"]
    print(f"{args.clients} clients, {args.minutes:g} minutes, {args.parallel} places:", dict(load.counts))
    print(f"{tokens} tokens generated, {tokens / args.minutes / 60:.0f} a second; prompt tokens "
          f"{stats['prompt_tokens'] - before['prompt_tokens']}, of them cached "
          f"{stats['prompt_tokens_cached'] - before['prompt_tokens_cached']}; "
          f"cache hits {stats['cache_hits'] - before['cache_hits']}")
    print(f"errors and answers that differ: {len(load.faults)}")
    for fault in load.faults[:10]:
        print("   ", fault[:600])
    print(f"memory (RssAnon + VmSwap): {late[0][1]} KiB after the warm-up, {late[-1][1]} KiB at the end, "
          f"largest {max(y for _, y in points)}; slope {b:.1f} +- {error:.1f} KiB a minute = {b / mean * 100:.4f} %")
    print("memory by the minute, KiB:", *[y for i, (x, y) in enumerate(points) if i and int(x) > int(points[i - 1][0])])
    pages = (idle["running"], idle["queued"], idle["kv_pages_free"] == idle["kv_pages"])
    print(f"afterwards: running {pages[0]}, queued {pages[1]}, all pages free: {pages[2]}")
    still = abs(b) * args.minutes <= max(0.005 * mean, 1024)
    return not load.faults and still and pages == (0, 0, True)


main()
