#!/usr/bin/env python3
"""Makes tests/golden/FAMILY/CASE.json: small models of each family and what `transformers` says of
them in float32. Read by tests/golden/test_families.c, which builds the same models.

    make_families.py [FOLDER]      default: the folder of this file

Sources, not ours: tensor names and values, logits: transformers (CPU, float32, eager attention);
GGUF names and metadata keys: the `gguf` package; rope_freqs: transformers' own rotation tables.
Weights: weights_hash.py, value = unit * scale + offset, then rounded to the form's type; affine
forms: codes, scales and biases of the module's name, amplitude = scale.

A file: config (as config.json holds it), tensors (%d = layer), gguf (metadata), and per form:
  prompt, n    id i of the n is element i of hash `prompt`, mod 256
  logprobs     of ids 1 .. n-1 (teacher-forced)
  top          {row: [ids, log-probabilities]}: the 20 most likely after that row
  greedy       the next 16 ids; a prompt whose 16 are bytes and lead by MIN_GAP or more
  greedy_logprobs  of those; greedy_top: the 20 most likely at the first and the last of them
"""
import importlib.metadata
import json
import pathlib
import sys

import gguf
import numpy as np
import torch
import transformers

import weights_hash as wh

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
ARCH = {"gemma3_text": "gemma3"}
VOCAB = 272
N_GREEDY, MIN_GAP = 16, 0.02

A4G64 = {"bits": 4, "group_size": 64}
A4G32 = {"bits": 4, "group_size": 32}
A8G64 = {"bits": 8, "group_size": 64}
A8G32 = {"bits": 8, "group_size": 32}
# user-cases' mixed checkpoint: one layer of 8 and one of 6 bits among 4
MIXED = {"model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 64},
         "model.layers.0.self_attn.v_proj": {"bits": 6, "group_size": 32},
         "model.embed_tokens": {"bits": 8, "group_size": 32}}

CASES = {
    # explicit head_dim that is not hidden / heads; untied; old spelling
    "llama/plain": dict(
        config=dict(model_type="llama", hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=48, intermediate_size=192, vocab_size=VOCAB,
                    rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=512,
                    tie_word_embeddings=False, hidden_act="silu", eos_token_id=[256, 258]),
        gguf=True,
        forms={"f32": 48, "f16": 48, "bf16": 48, "a4": (48, A4G64, MIXED, "bf16"),
               "a4g32": (48, A4G32, {}, "f16"), "a8": (48, A8G32, {}, "f32")}),
    # llama3 scaling in the new spelling; tied; more than 256 positions, most of them scaled
    "llama/llama3": dict(
        config=dict(model_type="llama", hidden_size=96, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=3, intermediate_size=160, vocab_size=VOCAB, rms_norm_eps=1e-5,
                    max_position_embeddings=1024, tie_word_embeddings=True, hidden_act="silu",
                    rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0,
                                         low_freq_factor=1.0, high_freq_factor=4.0,
                                         original_max_position_embeddings=64), eos_token_id=[256, 258]),
        gguf=True,
        forms={"f32": 300, "f16": 60, "a8": (60, A8G32, {}, "f16")}),
    # linear scaling by the oldest key; multi-query; biases; more rows of the table than tokens
    "llama/linear": dict(
        config=dict(model_type="llama", hidden_size=96, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=1, intermediate_size=224, vocab_size=VOCAB + 16,
                    rms_norm_eps=1e-6, rope_theta=20000.0, rope_scaling=dict(type="linear", factor=4.0),
                    max_position_embeddings=512, tie_word_embeddings=False, attention_bias=True,
                    hidden_act="silu", eos_token_id=[256, 258]),
        gguf=True,
        forms={"f32": 60, "bf16": 60}),
    # a window that the config switches off
    "qwen2/plain": dict(
        config=dict(model_type="qwen2", hidden_size=192, num_hidden_layers=2, num_attention_heads=6,
                    num_key_value_heads=2, intermediate_size=128, vocab_size=VOCAB, rms_norm_eps=1e-6,
                    rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
                    use_sliding_window=False, sliding_window=8, max_window_layers=1,
                    max_position_embeddings=512, tie_word_embeddings=False, hidden_act="silu",
                    eos_token_id=[256, 258]),
        gguf=True,
        forms={"f32": 280, "f16": 48, "bf16": 48, "a4": (48, A4G64, MIXED, "bf16"),
               "a8": (48, A8G64, {}, "f16")}),
    # full layers, then window layers
    "qwen2/window": dict(
        config=dict(model_type="qwen2", hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=1, intermediate_size=96, vocab_size=VOCAB, rms_norm_eps=1e-6,
                    rope_theta=10000.0, use_sliding_window=True, sliding_window=16,
                    max_window_layers=2, max_position_embeddings=512, tie_word_embeddings=True,
                    hidden_act="silu", eos_token_id=[256, 258]),
        gguf=False,
        forms={"f32": 60, "f16": 60, "a8": (60, A8G32, {}, "bf16")}),
    "qwen3/plain": dict(
        config=dict(model_type="qwen3", hidden_size=128, num_hidden_layers=2, num_attention_heads=8,
                    num_key_value_heads=2, head_dim=40, intermediate_size=192, vocab_size=VOCAB,
                    rms_norm_eps=1e-6, rope_theta=1000000.0, use_sliding_window=False,
                    sliding_window=None, max_window_layers=2, attention_bias=False,
                    max_position_embeddings=512, tie_word_embeddings=True, hidden_act="silu",
                    eos_token_id=[256, 258]),
        gguf=True,
        forms={"f32": 280, "f16": 48, "bf16": 48, "a4": (48, A4G64, MIXED, "bf16"),
               "a8": (48, A8G32, {}, "f16")}),
    "qwen3/window": dict(
        config=dict(model_type="qwen3", hidden_size=64, num_hidden_layers=3, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=64, intermediate_size=96, vocab_size=VOCAB,
                    rms_norm_eps=1e-6, rope_parameters=dict(rope_type="linear", factor=2.0,
                                                            rope_theta=10000.0),
                    layer_types=["full_attention", "sliding_attention", "full_attention"],
                    use_sliding_window=True, sliding_window=16, max_window_layers=1,
                    max_position_embeddings=512, tie_word_embeddings=False, hidden_act="silu",
                    eos_token_id=[256, 258]),
        gguf=False,
        forms={"f32": 60, "bf16": 60}),
    # a pattern of its own, a query scale that is not the head's, linear scaling of full layers
    "gemma3/pattern": dict(
        config=dict(model_type="gemma3_text", hidden_size=128, num_hidden_layers=4,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=48, intermediate_size=192,
                    vocab_size=VOCAB, rms_norm_eps=1e-6, rope_theta=1000000.0,
                    rope_local_base_freq=10000.0, rope_scaling=dict(rope_type="linear", factor=8.0),
                    query_pre_attn_scalar=20, sliding_window=16, sliding_window_pattern=2,
                    max_position_embeddings=512, hidden_activation="gelu_pytorch_tanh",
                    tie_word_embeddings=True, eos_token_id=[256, 258]),
        gguf=False,
        forms={"f32": 60, "bf16": 60, "a4": (60, A4G64, MIXED, "bf16"),
               "a8": (60, A8G32, {}, "f16")}),
    # what GGUF can carry: every sixth layer full, the query scale of the head; soft caps are none
    "gemma3/default": dict(
        config=dict(model_type="gemma3_text", hidden_size=64, num_hidden_layers=7,
                    num_attention_heads=4, num_key_value_heads=1, head_dim=32, intermediate_size=96,
                    vocab_size=VOCAB, rms_norm_eps=1e-6,
                    rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0,
                                                             rope_theta=1000000.0),
                                         sliding_attention=dict(rope_type="default",
                                                                rope_theta=10000.0)),
                    layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
                    query_pre_attn_scalar=32, sliding_window=16, max_position_embeddings=512,
                    hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=None,
                    attn_logit_softcapping=None, eos_token_id=[256, 258]),
        gguf=True,
        forms={"f32": 280, "f16": 60, "bf16": 60, "a8": (60, A8G32, {}, "f32")}),
}


def pattern(name):
    """model.layers.3.x -> model.layers.%d.x"""
    return ".".join("%d" if part.isdigit() else part for part in name.split("."))


def is_matrix(name, shape):
    return len(shape) == 2


def describe(model, cfg, arch):
    """One row a tensor, layers folded into %d."""
    tied = model.config.tie_word_embeddings
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], cfg["num_hidden_layers"])
    out, seen = [], set()
    for name, p in model.state_dict().items():
        if pattern(name) in seen or (tied and name == "lm_head.weight"):
            continue
        seen.add(pattern(name))
        shape = list(p.shape)
        row = {"hf": pattern(name), "shape": shape}
        stem, suffix = name.rsplit(".", 1)
        row["gguf"] = pattern(names.get_name(stem) + "." + suffix)
        if is_matrix(name, shape):
            gain = 2.5 if stem in ("lm_head", "model.embed_tokens") else 1.7
            if arch == "gemma3" and gain == 2.5:
                gain = 0.8  # times sqrt(hidden_size): else a token predicts itself
            row["scale"] = float(np.float32(gain / np.sqrt(shape[1])))
        elif suffix == "bias":
            row["scale"] = 0.5
        else:
            row["scale"] = float(np.float32(0.3))
            row["offset"] = 1.0
            if arch == "gemma3":
                row["offset"] = 1.5 if stem == "model.norm" else 0.0
            row["gguf_add"] = 1.0 if arch == "gemma3" else 0.0
        heads = {"q_proj": cfg["num_attention_heads"], "k_proj": cfg["num_key_value_heads"]}
        if arch == "llama" and stem.split(".")[-1] in heads:
            row["gguf_heads"] = heads[stem.split(".")[-1]]
        out.append(row)
    return out


def metadata(cfg, arch, hf):
    """GGUF's key: value for this config; ints are u32, floats f32"""
    k, rope = gguf.Keys, hf.rope_parameters
    kv = {k.General.ARCHITECTURE: arch,
          k.LLM.BLOCK_COUNT: cfg["num_hidden_layers"],
          k.LLM.CONTEXT_LENGTH: cfg["max_position_embeddings"],
          k.LLM.EMBEDDING_LENGTH: cfg["hidden_size"],
          k.LLM.FEED_FORWARD_LENGTH: cfg["intermediate_size"],
          k.LLM.VOCAB_SIZE: cfg["vocab_size"],
          k.Attention.HEAD_COUNT: cfg["num_attention_heads"],
          k.Attention.HEAD_COUNT_KV: cfg["num_key_value_heads"],
          k.Attention.LAYERNORM_RMS_EPS: cfg["rms_norm_eps"]}
    if "head_dim" in cfg:
        kv[k.Attention.KEY_LENGTH] = kv[k.Attention.VALUE_LENGTH] = cfg["head_dim"]
    if arch == "llama":
        kv[k.Rope.DIMENSION_COUNT] = hf.head_dim
    if arch == "gemma3":
        kv[k.Attention.SLIDING_WINDOW] = cfg["sliding_window"]
        rope = rope["full_attention"]
    kv[k.Rope.FREQ_BASE] = float(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        kv[k.Rope.SCALING_TYPE] = "linear"
        kv[k.Rope.SCALING_FACTOR] = float(rope["factor"])
    return {key.format(arch=arch): v for key, v in kv.items()}


def rope_freqs(hf):
    """divisors of the plain frequencies: what GGUF stores for llama3 scaling"""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    d = hf.head_dim
    plain = 1.0 / hf.rope_parameters["rope_theta"] ** (torch.arange(0, d, 2).double() / d)
    return [float(np.float32(x)) for x in plain / scaled.double()]


def values(name, row, form, quantised):
    shape = row["shape"]
    dtype = form if isinstance(form, str) else form[3]
    if quantised and is_matrix(name, shape):
        stem = name.rsplit(".", 1)[0]
        q = form[2].get(stem, form[1])
        codes, s, b = wh.affine(stem, *shape, q["bits"], q["group_size"], row["scale"], dtype)
        return wh.affine_values(codes, s, b, q["group_size"])
    x = wh.tensor(name, shape, row["scale"]) + np.float32(row.get("offset", 0.0))
    return wh.round_to(x, dtype)


def fill(model, rows, form):
    quantised = not isinstance(form, str)
    by_name = {r["hf"]: r for r in rows}
    state = {}
    for name in model.state_dict():
        if pattern(name) in by_name:
            v = values(name, by_name[pattern(name)], form, quantised)
            state[name] = torch.from_numpy(np.ascontiguousarray(v))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(m == "lm_head.weight" for m in missing), (missing, unexpected)
    model.tie_weights()


def logprobs(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()


def short(x):
    return round(float(x), 6)


def top(lp):
    best = np.argsort(-lp, kind="stable")[:20]
    return [[int(i) for i in best], [short(lp[i]) for i in best]]


def follow(model, ids, out):
    """greedy ids into out; False when a lead is too small to judge by, or one is a control token"""
    ids = list(ids)
    out["greedy"], out["greedy_logprobs"], out["greedy_top"] = [], [], {}
    for i in range(N_GREEDY):
        lp = logprobs(model, ids)[-1]
        a, b = np.argsort(-lp, kind="stable")[:2]
        if lp[a] - lp[b] < MIN_GAP or a >= 256:
            return False
        out["greedy"].append(int(a))
        out["greedy_logprobs"].append(short(lp[a]))
        if i in (0, N_GREEDY - 1):
            out["greedy_top"][str(i)] = top(lp)
        ids.append(int(a))
    return True


def golden(model, case, n):
    for k in range(100):
        out = {"prompt": "prompt %s %d" % (case, k), "n": n}
        ids = [int(i) for i in wh.mix(out["prompt"], n) % np.uint64(256)]
        if follow(model, ids, out):
            break
    else:
        raise SystemExit(case + ": no prompt with clear leads")
    lp = logprobs(model, ids)
    out["logprobs"] = [short(lp[i, ids[i + 1]]) for i in range(n - 1)]
    rows = {0, 1, 15, 16, 17, n // 2, n - 2} | ({255, 256} if n > 258 else set())
    out["top"] = {str(row): top(lp[row]) for row in sorted(rows)}
    return out


def make(case, spec, folder):
    cfg = spec["config"]
    family, arch = case.split("/")[0], ARCH.get(cfg["model_type"], cfg["model_type"])
    config_class, model_class = CLASSES[cfg["model_type"]]
    hf = config_class(**json.loads(json.dumps({k: v for k, v in cfg.items() if k != "model_type"})))
    hf._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(hf).float().eval()
    rows = describe(model, cfg, arch)
    out = {"about": "tests/golden/make_families.py: transformers %s, torch %s, gguf %s" % (
               transformers.__version__, torch.__version__.split("+")[0],
               importlib.metadata.version("gguf")),
           "config": cfg, "tensors": rows}
    if spec["gguf"]:
        out["gguf"] = metadata(cfg, arch, hf)
        if arch == "llama" and hf.rope_parameters["rope_type"] == "llama3":
            out["rope_freqs"] = rope_freqs(hf)
    out["forms"] = {}
    for name, form in spec["forms"].items():
        f = {"dtype": name}
        form = (form, name) if isinstance(form, int) else form
        if len(form) == 4:
            f = {"dtype": form[3], "quantization": dict(form[1], **form[2])}
            fill(model, rows, form)
        else:
            fill(model, rows, form[1])
        f.update(golden(model, case, form[0]))
        out["forms"][name] = f
        print(case, name, f["prompt"])
    path = pathlib.Path(folder, case + ".json")
    path.parent.mkdir(exist_ok=True)
    write(path, out)


def write(path, out):
    """readable: one line a tensor, a row of logits, a list"""
    compact = json.dumps
    body = ["{"]
    keys = list(out)
    for i, key in enumerate(keys):
        end = "," if i + 1 < len(keys) else ""
        v = out[key]
        if key == "tensors":
            body.append(' "tensors": [\n  %s\n ]%s' % (",\n  ".join(compact(r) for r in v), end))
        elif key == "forms":
            forms = []
            for name, f in v.items():
                parts = []
                for k, x in f.items():
                    if k in ("top", "greedy_top"):
                        x = "{\n    %s}" % ",\n    ".join('"%s": %s' % (r, compact(t)) for r, t in x.items())
                    else:
                        x = compact(x)
                    parts.append('"%s": %s' % (k, x))
                forms.append('"%s": {%s}' % (name, ",\n   ".join(parts)))
            body.append(' "forms": {\n  %s\n }%s' % (",\n  ".join(forms), end))
        else:
            body.append(' "%s": %s%s' % (key, compact(v), end))
    path.write_text("\n".join(body + ["}", ""]))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent
    torch.set_num_threads(1)
    for case, spec in CASES.items():
        make(case, spec, folder)
