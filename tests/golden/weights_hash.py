"""Weights from a hash of (tensor name, index): the same bits as tests/support/ckpt_writer.h.

The rule is written there. Needs numpy only.
"""
import numpy as np

F32 = np.float32


def name_hash(name):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def mix(name, n, first=0):
    """n 64-bit hashes of elements first, first + 1, ..."""
    with np.errstate(over="ignore"):
        z = np.arange(first, first + n, dtype=np.uint64)
        z = z + np.uint64(name_hash(name)) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def unit(name, n, first=0):
    """float32 in [-1, 1)"""
    return (mix(name, n, first) >> np.uint64(40)).astype(F32) * F32(2.0**-23) - F32(1)


def tensor(name, shape, scale=1.0):
    """float32 array of the given shape"""
    return (unit(name, int(np.prod(shape))) * F32(scale)).reshape(shape)


def to_bf16_bits(x):
    """uint16 bits of float32 rounded to bfloat16, to nearest even (no NaN)"""
    u = np.ascontiguousarray(x, dtype=F32).view(np.uint32)
    return ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def round_to(x, dtype):
    """float32 values after rounding to "f32", "f16" or "bf16" """
    if dtype == "f16":
        return x.astype(np.float16).astype(F32)
    if dtype == "bf16":
        return (to_bf16_bits(x).astype(np.uint32) << np.uint32(16)).view(F32)
    return x


def affine(stem, rows, cols, bits, group, amplitude, dtype="bf16"):
    """codes (rows, cols) uint8, scales and biases (rows, cols / group) as rounded float32"""
    codes = (mix(stem + ".weight", rows * cols) >> np.uint64(64 - bits)).astype(np.uint8)
    n = rows * cols // group
    a, t = F32(amplitude), unit(stem + ".scales", n)
    sign = np.where(t < 0, F32(-1), F32(1)).astype(F32)
    step = F32(2) * a / F32(2**bits - 1)
    scales = sign * (F32(0.5) + F32(0.5) * np.abs(t)) * step
    biases = -sign * a * (F32(1) + F32(0.25) * unit(stem + ".biases", n))
    shape = (rows, cols // group)
    return codes.reshape(rows, cols), round_to(scales, dtype).reshape(shape), round_to(biases, dtype).reshape(shape)


def pack(codes, bits):
    """uint32 words of the little-endian bit stream of each row"""
    rows, cols = codes.shape
    b = ((codes[..., None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)).reshape(rows, cols * bits)
    return np.packbits(b, axis=-1, bitorder="little").view("<u4")


def affine_values(codes, scales, biases, group):
    """float32 weights: scale * code + bias"""
    s, b = np.repeat(scales, group, axis=-1), np.repeat(biases, group, axis=-1)
    return s * codes.astype(F32) + b
