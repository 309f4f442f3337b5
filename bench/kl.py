#!/usr/bin/env python3
"""Mean KL to float32 transformers of two logits dumps, and argmax differences at clear gaps.

kl.py ref MODEL_DIR GGUF IDS.txt OUT.f32   float32 logits of the dequantised weights (transformers)
kl.py cmp REF.f32 N A.f32 [B.f32 …]        table; N = positions
"""
import sys
import numpy as np


def ref(model_dir, gguf, ids_path, out):
    import torch
    from transformers import AutoModelForCausalLM
    ids = [int(x) for x in open(ids_path).read().split()]
    model = AutoModelForCausalLM.from_pretrained(model_dir, gguf_file=gguf, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    logits.numpy().astype(np.float32).tofile(out)


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def cmp(ref_path, n, paths):
    r = np.fromfile(ref_path, dtype=np.float32).reshape(n, -1)
    lr = log_softmax(r)
    top2 = np.sort(r, axis=-1)[:, -2:]
    clear = (top2[:, 1] - top2[:, 0]) >= 0.1
    for p in paths:
        a = np.fromfile(p, dtype=np.float32).reshape(n, -1)
        la = log_softmax(a)
        kl = (np.exp(lr) * (lr - la)).sum(axis=-1)
        flips = (a.argmax(-1) != r.argmax(-1)) & clear
        print(f"{p}: mean KL {kl.mean():.6f}  median {np.median(kl):.6f}  max {kl.max():.4f}  "
              f"argmax differences at gap >= 0.1: {int(flips.sum())} of {int(clear.sum())}")


if __name__ == "__main__":
    if sys.argv[1] == "ref":
        ref(*sys.argv[2:6])
    else:
        cmp(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
