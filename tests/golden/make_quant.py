"""Makes tests/data/quant/*.bin: blocks of every weight format and the floats that they mean.

Sources, not ours: the `gguf` package's dequantize for GGUF's types; `mlx` (mx.dequantize on the
CPU) for affine. Three calls, since the packages may live in different environments:
    python make_quant.py gguf ../data/quant/gguf.bin
    python make_quant.py mlx ../data/quant/affine.bin
    python make_quant.py rule ../data/quant/affine_rule.bin
Records, little-endian:
  gguf.bin    name[8], u32 n elements, u32 n bytes, the row's bytes, n float32
  affine.bin  u32 bits, group, scale type (0 f32, 1 f16, 2 bf16), n elements; codes, scales, biases
              (of that type), n float32
  affine_rule.bin  u32 bits, group, n; then what mx.quantize makes of the n float32 values of tensor
              "rule" of weights_hash.py, plus 0.05 * (element / group % 5 - 2): codes, scales and
              biases, float32
"""
import struct
import sys

import numpy as np

rng = np.random.default_rng(20240607)


def f16(n):
    """float16 scales as in real files, and small, subnormal and negative ones"""
    x = rng.uniform(0.001, 0.1, n) * rng.choice([1, -1], n) * rng.choice([1, 1, 1, 1e-4, 30], n)
    return x.astype(np.float16).view(np.uint8).reshape(n, 2)


def gguf_rows(path):
    import gguf
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
              "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    with open(path, "wb") as f:
        for name, at in halves.items():
            t = gguf.GGMLQuantizationType[name]
            elems, size = gguf.GGML_QUANT_SIZES[t]
            for n_blocks in (1, 3, 5):
                b = rng.integers(0, 256, (n_blocks, size), dtype=np.uint8)
                for i in at:
                    b[:, i:i + 2] = f16(n_blocks)
                row = b.reshape(1, -1)
                want = gguf.quants.dequantize(row, t).astype("<f4")
                f.write(struct.pack("<8sII", name.lower().encode(), n_blocks * elems, row.size))
                f.write(row.tobytes() + want.tobytes())


def affine_rows(path):
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    types = [mx.float32, mx.float16, mx.bfloat16]
    with open(path, "wb") as f:
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                for k, t in enumerate(types):
                    n = group * (1, 3, 5)[(bits + k) % 3]
                    codes = rng.integers(0, 2**32, (1, n * bits // 32), dtype=np.uint32)
                    s = rng.uniform(0.001, 0.1, (1, n // group)) * rng.choice([1, -1], (1, n // group))
                    b = rng.uniform(-1, 1, (1, n // group))
                    s, b = mx.array(s.astype(np.float32)).astype(t), mx.array(b.astype(np.float32)).astype(t)
                    # the same scales in float32: MLX computes in the type of the scales
                    want = mx.dequantize(mx.array(codes), s.astype(mx.float32), b.astype(mx.float32), group, bits)
                    f.write(struct.pack("<IIII", bits, group, k, n) + codes.tobytes())
                    for x in (s, b):
                        f.write(np.array(x if k == 0 else x.view(mx.uint16)).tobytes())
                    f.write(np.array(want).astype("<f4").tobytes())


def affine_rule(path):
    import mlx.core as mx
    import weights_hash
    mx.set_default_device(mx.cpu)
    with open(path, "wb") as f:
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                n = 5 * group
                shift = np.float32(0.05) * (np.arange(n) // group % 5 - 2).astype(np.float32)
                x = weights_hash.unit("rule", n) * np.float32(0.1) + shift
                f.write(struct.pack("<III", bits, group, n))
                for y in mx.quantize(mx.array(x.reshape(1, n)), group, bits):
                    f.write(np.array(y).tobytes())


if __name__ == "__main__":
    {"gguf": gguf_rows, "mlx": affine_rows, "rule": affine_rule}[sys.argv[1]](sys.argv[2])
