#!/usr/bin/env python3
"""A GGUF file with the shapes of a real model and weights that mean nothing, so that two programs
can be timed on the same bytes where no checkpoint can be had.

    make_gguf.py GEOMETRY FORMAT FILE       e.g. llama-3.1-8b bf16 model.gguf

Layout: the GGUF specification, version 3. There is no vocabulary ("no_vocab"): programs are given
token ids. Matrices repeat one pattern of random codes whose scales give values of about 0.02; every
tensor begins elsewhere in it. Memory stays at some tens of MiB. Needs nothing but Python.
"""
import random
import struct
import sys

ALIGN = 32
PATTERN = 15 << 20  # bytes, before it is cut to whole blocks; a large odd share of them
U32, F32, STRING = 4, 6, 8  # types of metadata values

# name: architecture, layers, width, ffn, heads, kv heads, head size, vocabulary, context, theta,
# eps, tied embeddings, norms of q and k
GEOMETRIES = {
    "tiny": ("llama", 2, 256, 512, 4, 2, 64, 512, 2048, 1e4, 1e-5, True, False),
    "tiny-qwen3": ("qwen3", 2, 256, 512, 4, 2, 128, 512, 2048, 1e6, 1e-6, False, True),
    "smollm2-135m": ("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, True, False),
    "llama-3.1-8b": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False, False),
    "qwen3-8b": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, 1e-6, False, True),
}

# name: tensor type, values and bytes of a block, and the 16-bit words at its start whose exponents
# are set (bits kept of the noise, bits put in); the rest of a block is noise
FORMATS = {
    "bf16": (30, 1, 2, [(0x807F, 0x3C80)]),  # 2^-6 up to 2^-5, both signs
    "f16": (1, 1, 2, [(0x83FF, 0x2400)]),
    "q4_0": (2, 32, 18, [(0x03FF, 0x1C00)]),  # scale from 2^-8 up
    "q4_1": (3, 32, 20, [(0x03FF, 0x1C00), (0x03FF, 0xA800)]),  # minimum down from -2^-5
    "q8_0": (8, 32, 34, [(0x03FF, 0x0C00)]),
}


def pattern_of(fmt):
    _, _, n_block, words = FORMATS[fmt]
    n = PATTERN // n_block
    keep, put = b"\xff" * n_block, b"\0" * n_block
    for i, (k, p) in enumerate(words):
        keep = keep[: 2 * i] + struct.pack("<H", k) + keep[2 * i + 2 :]
        put = put[: 2 * i] + struct.pack("<H", p) + put[2 * i + 2 :]
    noise = random.Random(1).getrandbits(8 * n * n_block)
    noise &= int.from_bytes(keep * n, "little")
    noise |= int.from_bytes(put * n, "little")
    return noise.to_bytes(n * n_block, "little")


def tensors_of(g, fmt):
    """(name, rows, columns, format); vectors are f32."""
    _, n_layer, d, ff, n_head, n_kv, hd, vocab, _, _, _, tied, qk_norm = g
    out = [("token_embd", vocab, d, fmt)]
    for i in range(n_layer):
        b = f"blk.{i}."
        out += [(b + "attn_norm", 1, d, "f32"), (b + "ffn_norm", 1, d, "f32")]
        if qk_norm:
            out += [(b + "attn_q_norm", 1, hd, "f32"), (b + "attn_k_norm", 1, hd, "f32")]
        out += [
            (b + "attn_q", n_head * hd, d, fmt),
            (b + "attn_k", n_kv * hd, d, fmt),
            (b + "attn_v", n_kv * hd, d, fmt),
            (b + "attn_output", d, n_head * hd, fmt),
            (b + "ffn_gate", ff, d, fmt),
            (b + "ffn_up", ff, d, fmt),
            (b + "ffn_down", d, ff, fmt),
        ]
    out.append(("output_norm", 1, d, "f32"))
    return out if tied else out + [("output", vocab, d, fmt)]


def n_bytes(rows, cols, fmt):
    if fmt == "f32":
        return 4 * rows * cols
    _, values, n_block, _ = FORMATS[fmt]
    assert cols % values == 0, "rows are whole blocks"
    return rows * cols // values * n_block


def aligned(n):
    return (n + ALIGN - 1) // ALIGN * ALIGN


def string(s):
    return struct.pack("<Q", len(s)) + s.encode()


def value(key, kind, v):
    head = string(key) + struct.pack("<I", kind)
    if kind == STRING:
        return head + string(v)
    return head + struct.pack("<I" if kind == U32 else "<f", v)


def metadata(name, g):
    arch, n_layer, d, ff, n_head, n_kv, hd, vocab, ctx, theta, eps, _, _ = g
    rows = [
        ("general.architecture", STRING, arch),
        ("general.name", STRING, name + ", random weights"),
        ("general.quantization_version", U32, 2),
        (arch + ".block_count", U32, n_layer),
        (arch + ".context_length", U32, ctx),
        (arch + ".embedding_length", U32, d),
        (arch + ".feed_forward_length", U32, ff),
        (arch + ".attention.head_count", U32, n_head),
        (arch + ".attention.head_count_kv", U32, n_kv),
        (arch + ".attention.key_length", U32, hd),
        (arch + ".attention.value_length", U32, hd),
        (arch + ".attention.layer_norm_rms_epsilon", F32, eps),
        (arch + ".rope.dimension_count", U32, hd),
        (arch + ".rope.freq_base", F32, theta),
        (arch + ".vocab_size", U32, vocab),
        ("tokenizer.ggml.model", STRING, "no_vocab"),
    ]
    return len(rows), b"".join(value(*r) for r in rows)


def write_pattern(f, pattern, n, start):
    """n bytes of the pattern, which goes round, from byte start on."""
    view = memoryview(pattern)
    while n > 0:
        part = view[start : start + n]
        f.write(part)
        n -= len(part)
        start = 0


def write_file(name, fmt, path):
    g = GEOMETRIES[name]
    tensors = tensors_of(g, fmt)
    n_kv, kv = metadata(name, g)
    infos, at = b"", 0
    for t, rows, cols, f in tensors:
        dims = (cols,) if rows == 1 else (cols, rows)
        infos += string(t + ".weight") + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        infos += struct.pack("<IQ", 0 if f == "f32" else FORMATS[f][0], at)
        at += aligned(n_bytes(rows, cols, f))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_kv) + kv + infos
    pattern, block, rng = pattern_of(fmt), FORMATS[fmt][2], random.Random(2)
    with open(path, "wb", buffering=0) as out:
        out.write(head + bytes(aligned(len(head)) - len(head)))
        for _, rows, cols, f in tensors:
            n = n_bytes(rows, cols, f)
            if f == "f32":
                out.write(struct.pack("<f", 1) * (n // 4))
            else:
                write_pattern(out, pattern, n, rng.randrange(len(pattern) // block) * block)
            out.write(bytes(aligned(n) - n))


def main(args):
    if len(args) != 3 or args[0] not in GEOMETRIES or args[1] not in FORMATS:
        sys.exit(f"usage: make_gguf.py {{{','.join(GEOMETRIES)}}} {{{','.join(FORMATS)}}} FILE")
    write_file(*args)


main(sys.argv[1:])
