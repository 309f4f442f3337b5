"""A server for the client tests: the built program (MLXCEL) on a model that follows scripts.

The model is the one of tests/support/script_model.h: after a prompt that ends with a script's key
byte come the script's pieces, one a token, then the end; after any other byte comes that byte. What
follows a token depends on nothing before it."""
import contextlib
import os
import re
import struct
import subprocess
import tempfile
import time

EOS, IM_START, IM_END, FIRST, DIM = 256, 257, 258, 272, 1024
TEMPLATE = (
    "{% if tools %}<tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
)
MARKUP = "<b>bold</b> & <img src=x onerror=\"document.title='owned'\"> <script>owned = 1</script>"
SCRIPTS = {
    "A": ["Hello ", "wor", "ld!"],
    "T": ["I look.\n<tool", "_call>{\"name\":\"get_weather\",\"argu", "ments\":{\"city\":\"Par", "is\"}}</tool_call>"],
    "M": [MARKUP[:30], MARKUP[30:]],
}


def spell(data):
    """GPT-2's printable spelling of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 256
    for b in range(256):
        if b in plain:
            table[b] = chr(b)
        else:
            table[b], extra = chr(extra), extra + 1
    return "".join(table[b] for b in data)


def vocabulary():
    """Spellings, types, and which token follows each."""
    tokens = [spell(bytes([b])) for b in range(256)]
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"<|unused{i}|>" for i in range(259, FIRST - 1)] + ["zz"]
    types = [1] * 256 + [3] * (FIRST - 257) + [1]
    follow = list(range(DIM))
    for key, pieces in SCRIPTS.items():
        at = ord(key)
        for piece in pieces:
            follow[at] = at = len(tokens)
            tokens.append(spell(piece.encode()))
            types.append(1)
        follow[at] = EOS
    return tokens, types, follow


def write_model(path, max_ctx=2048, out=None):
    """out: another output matrix, a float row of DIM for each token; column i scores what follows i."""
    tokens, types, follow = vocabulary()
    n = len(tokens)

    def string(s):
        b = s.encode()
        return struct.pack("<Q", len(b)) + b

    def array(kind, items):
        return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)

    kv = {
        "general.architecture": struct.pack("<I", 8) + string("llama"),
        "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
        "llama.rope.freq_base": struct.pack("<If", 6, 10000.0),
        "tokenizer.ggml.model": struct.pack("<I", 8) + string("gpt2"),
        "tokenizer.ggml.pre": struct.pack("<I", 8) + string("gpt-2"),
        "tokenizer.ggml.tokens": array(8, [string(t) for t in tokens]),
        "tokenizer.ggml.token_type": array(5, [struct.pack("<i", t) for t in types]),
        "tokenizer.ggml.merges": array(8, [string("z z")]),
        "tokenizer.ggml.add_bos_token": struct.pack("<IB", 7, 0),
        "tokenizer.chat_template": struct.pack("<I", 8) + string(TEMPLATE),
    }
    for key, value in {
        "llama.block_count": 1, "llama.embedding_length": DIM, "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 1, "llama.feed_forward_length": 32,
        "llama.context_length": max_ctx, "tokenizer.ggml.eos_token_id": EOS,
    }.items():
        kv[key] = struct.pack("<II", 4, value)
    zeros = lambda rows, cols: ((rows, cols), bytes(rows * cols * 4))
    ones = ((DIM,), struct.pack("<f", 1.0) * DIM)
    embd, scripted = bytearray(n * DIM * 4), bytearray(n * DIM * 4)
    for i in range(n):
        struct.pack_into("<f", embd, (i * DIM + i) * 4, 1.0)
        struct.pack_into("<f", scripted, (follow[i] * DIM + i) * 4, 1.0)
    tensors = {
        "token_embd.weight": ((n, DIM), bytes(embd)), "output.weight": ((n, DIM), bytes(out or scripted)),
        "output_norm.weight": ones, "blk.0.attn_norm.weight": ones, "blk.0.ffn_norm.weight": ones,
        "blk.0.attn_q.weight": zeros(DIM, DIM), "blk.0.attn_k.weight": zeros(DIM // 8, DIM),
        "blk.0.attn_v.weight": zeros(DIM // 8, DIM), "blk.0.attn_output.weight": zeros(DIM, DIM),
        "blk.0.ffn_gate.weight": zeros(32, DIM), "blk.0.ffn_up.weight": zeros(32, DIM),
        "blk.0.ffn_down.weight": zeros(DIM, 32),
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv))
    head += b"".join(string(k) + v for k, v in kv.items())
    offset = 0
    for name, (shape, data) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", d) for d in reversed(shape))
        head += struct.pack("<IQ", 0, offset)
        offset += len(data)  # multiples of 32 all
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % 32) + b"".join(d for _, d in tensors.values()))


@contextlib.contextmanager
def server(*flags, model=None, max_ctx=2048, threads="1"):
    """Yields the address of a server; fails when it does not end well."""
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = os.path.join(folder, "script.gguf")
            write_model(model, max_ctx)
        log = open(os.path.join(folder, "log"), "w+b")
        env = dict(os.environ, MLXCEL_DEVICE="cpu", MLXCEL_THREADS=threads, HOME=folder)
        p = subprocess.Popen([os.environ["MLXCEL"], "serve", "-m", model, "--port", "0", *flags],
                             stderr=log, stdin=subprocess.DEVNULL, env=env)
        try:
            address = None
            for _ in range(1500):
                with open(log.name) as f:
                    text = f.read()
                address = re.search(r"ready at (https?://\S+)", text)
                if address or p.poll() is not None:
                    break
                time.sleep(0.02)
            assert address, text
            yield address[1]
            assert p.poll() is None, "the server ended: " + open(log.name).read()[-2000:]
        finally:
            p.terminate()
            assert p.wait(20) == 0
