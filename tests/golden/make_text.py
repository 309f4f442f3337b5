#!/usr/bin/env python3
"""Makes tests/data/text: what Hugging Face's libraries do with awkward strings.

    python3 tests/golden/make_text.py vocab SRC.gguf NAME   a vocabulary-only copy of a model file
    python3 tests/golden/make_text.py                       golden.json.xz and pipelines.json.xz

Needs tokenizers, transformers and gguf. References: Qwen 3 and Llama 3 by `tokenizers` from their
published tokenizer.json; Gemma 3 by what transformers builds from the GGUF; SmolLM2 by `tokenizers`
with the model's published pre-tokenizer (digits one by one, then ByteLevel) over the GGUF's
vocabulary, since transformers leaves the digits out.
"""
import json
import lzma
import os
import random
import sys
import tempfile

from text_strings import CODE, WORDS, strings
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers,
                        pre_tokenizers, processors, trainers)

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "text")


def unpack(name, folder):
    path = os.path.join(folder, os.path.basename(name))
    with lzma.open(os.path.join(DATA, name + ".xz")) as f, open(path, "wb") as out:
        out.write(f.read())
    return path


def write(name, obj):
    text = json.dumps(obj, ensure_ascii=False, separators=(",", ":"))
    with lzma.open(os.path.join(DATA, name + ".xz"), "wb", preset=9 | lzma.PRESET_EXTREME) as f:
        f.write(text.encode("utf-8", "surrogatepass"))


def make_vocab(src, name):
    import gguf
    reader = gguf.GGUFReader(src)
    path = os.path.join(tempfile.mkdtemp(), name)
    w = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            w.add_key_value(key, field.contents(), field.types[0], sub)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    with open(path, "rb") as f, lzma.open(os.path.join(DATA, name + ".xz"), "wb",
                                         preset=9 | lzma.PRESET_EXTREME) as out:
        out.write(f.read())


def smollm2(path):
    import gguf
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    types = fields["tokenizer.ggml.token_type"].contents()
    t = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False, special=True)
                          for s, k in zip(tokens, types) if k == 3])
    return t


def gemma3(path):
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    arch, tokenizer, _ = get_gguf_tokenizer(path)
    return convert_gguf_tokenizer(arch, tokenizer)[0]


def decode(t, ids, skip):
    """None where the library itself panics (a Strip longer than the text)."""
    try:
        return t.decode(ids, skip_special_tokens=skip)
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        return None


def expect(t, texts, seed):
    """Ids of each text; decoded texts where they differ; random id lists and their texts."""
    ids = [t.encode(s, add_special_tokens=False).ids for s in texts]
    plain = [decode(t, i, False) for i in ids]
    skip = [decode(t, i, True) for i in ids]
    r, size = random.Random(seed), t.get_vocab_size()
    lists = [[r.randrange(min(size, r.choice((300, 600, size)))) for _ in range(r.randint(1, 12))]
             for _ in range(200)]
    return {"ids": ids,
            "plain": {str(k): a for k, (a, s) in enumerate(zip(plain, texts)) if a != s},
            "skip": {str(k): a for k, (a, s) in enumerate(zip(skip, plain)) if a != s},
            "lists": lists,
            "list_texts": [decode(t, x, True) for x in lists],
            "special": t.encode("Hello world").ids}


def make_golden():
    tmp = tempfile.mkdtemp()
    texts = strings(2000)
    sets = {}
    for name in ("qwen3", "llama3"):
        t = Tokenizer.from_file(unpack(name + "/tokenizer.json", tmp))
        sets[name] = expect(t, texts, 1)
    sets["smollm2"] = expect(smollm2(unpack("smollm2.gguf", tmp)), texts, 2)
    sets["gemma3"] = expect(gemma3(unpack("gemma3.gguf", tmp)), texts, 3)
    write("golden.json", {"strings": texts, "sets": sets})


# ---- small tokenizers that use every construct ----

BYTE = [f"<0x{i:02X}>" for i in range(256)]


def corpus():
    return strings(700, 5) + WORDS * 8 + CODE * 20


def bpe_bytes(**kw):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return with_options(t, kw)


def bpe_chars(fallback=True, unk=True, **kw):
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = (["<unk>"] if unk else []) + (BYTE if fallback else [])
    ascii_only = [s for s in corpus() if all(ord(c) < 0x400 for c in s)]
    t.train_from_iterator(ascii_only, trainers.BpeTrainer(
        vocab_size=len(special) + 330, special_tokens=special, show_progress=False))
    kw.setdefault("byte_fallback", fallback)
    kw.setdefault("unk_token", "<unk>" if unk else None)
    t = with_options(t, kw)
    return t


def with_options(t, options):
    """The same vocabulary under other model options, without added tokens."""
    j = json.loads(t.to_str())
    j["model"].update(options)
    j["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(j))


ADDED = [AddedToken("<sp>", special=True, normalized=False),
         AddedToken("<|im_start|>", special=True, normalized=False),
         AddedToken("<L>", lstrip=True, normalized=False),
         AddedToken("<R>", rstrip=True, normalized=False),
         AddedToken("<LR>", lstrip=True, rstrip=True, special=True, normalized=False),
         AddedToken("word", single_word=True, normalized=False),
         AddedToken("Norm é", normalized=True),
         AddedToken("NOR", normalized=True, single_word=True),
         AddedToken("abc", normalized=False), AddedToken("abcd", normalized=False),
         AddedToken("bcdefg", normalized=False), AddedToken("  ", normalized=False)]

EXTRA = ["<sp>", "a<sp>b", " <L> x", "x  <L>  y", "x <R>  y", "x <LR> y", "<L><R>", " <R> <L> ",
         "word", "a word b", "words", "sword", "word.", "word word", "wordword", "日word本", "_word",
         "Norm é", "Norm e\u0301", "xNorm éy", "norm é", "NOR", "NORNOR", " NOR ", "nor", "abcdefg",
         "abcd", "abcabcd", "a  b", "<|im_start|>user\nhi", "<LR><LR>", "\n <LR>\t\nx", "<sp", "sp>",
         "word\u200d", "½word", "x word½", "ＡＢＣ ﬁ ①", "İSTANBUL ΣΑΣ", "  trim  ", "a-b--c", "1a22b333",
         "tab\tsep", "a|b||c", "▁x", "▁▁", " ▁ ", "it's It'S 12 345 678,901"]


def cases():
    P, N, D = pre_tokenizers, normalizers, decoders
    split = lambda p, b, inv=False: P.Split(p, behavior=b, invert=inv)
    spm = D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)])
    yield "byte level", bpe_bytes(), None, P.ByteLevel(add_prefix_space=False), D.ByteLevel()
    yield "prefix space", bpe_bytes(), None, P.ByteLevel(add_prefix_space=True), D.ByteLevel()
    yield "no regex", bpe_bytes(), N.NFKC(), P.ByteLevel(add_prefix_space=True, use_regex=False), \
        D.ByteLevel()
    yield "ignore merges", bpe_bytes(ignore_merges=True), N.NFC(), \
        P.Sequence([P.Digits(individual_digits=True), P.ByteLevel(add_prefix_space=False)]), D.ByteLevel()
    yield "falcon's order", bpe_bytes(), None, P.Sequence(
        [P.Punctuation("contiguous"), P.ByteLevel(add_prefix_space=False),
         P.Digits(individual_digits=False), split(Regex("[0-9][0-9][0-9]"), "isolated")]), D.ByteLevel()
    yield "byte normalizer", bpe_bytes(), N.Sequence([N.NFC(), N.ByteLevel()]), \
        split(Regex("Ġ?[^Ġ]+|Ġ"), "isolated"), D.ByteLevel()
    for k, b in enumerate(("removed", "isolated", "merged_with_previous", "merged_with_next",
                           "contiguous")):
        inv = k % 2 == 1
        yield "split string " + b, bpe_bytes(), (N.NFD(), N.NFKD(), N.Lowercase(), None, N.NFC())[k], \
            P.Sequence([split(" ", b, inv), P.ByteLevel(add_prefix_space=False)]), D.ByteLevel()
        yield "split regex " + b, bpe_bytes(), None, P.Sequence(
            [split(Regex(r"\s+|\p{P}|(?=\d)"), b, not inv), P.ByteLevel(add_prefix_space=False)]), \
            D.ByteLevel()
        yield "punctuation " + b, bpe_bytes(), None, P.Sequence(
            [P.Punctuation(b), P.ByteLevel(add_prefix_space=False, use_regex=False)]), D.ByteLevel()
    yield "whitespace", bpe_chars(), N.Strip(), P.Whitespace(), None
    yield "whitespace split", bpe_chars(), N.Sequence([N.Strip(left=False), N.Lowercase()]), \
        P.WhitespaceSplit(), D.Fuse()
    yield "bert", bpe_chars(), N.NFKC(), P.BertPreTokenizer(), D.Sequence([D.ByteFallback(), D.Fuse()])
    yield "delimiter", bpe_chars(), None, P.CharDelimiterSplit("|"), D.Sequence([D.ByteFallback()])
    yield "digits", bpe_chars(), None, P.Digits(individual_digits=False), D.ByteFallback()
    for scheme in ("always", "never", "first"):
        for s in (True, False):
            yield f"metaspace {scheme} {s}", bpe_chars(fuse_unk=s), None, \
                P.Metaspace(prepend_scheme=scheme, split=s), D.Metaspace(prepend_scheme=scheme)
    yield "llama 2", bpe_chars(fuse_unk=True), N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")]), None, spm
    yield "gemma", bpe_chars(fuse_unk=True), N.Replace(" ", "▁"), split(" ", "merged_with_previous"), \
        D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse()])
    yield "strip end", bpe_chars(), N.Replace(Regex(r"\s{2,}|\d"), "▁"), None, \
        D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 2, 1)])
    yield "strip tokens", bpe_chars(), N.Replace(" ", "▁"), None, \
        D.Sequence([D.Replace("▁", " "), D.Strip(" ", 1, 1), D.ByteFallback(), D.Fuse()])
    yield "replace bytes", bpe_chars(), N.Replace(" ", "▁"), None, \
        D.Sequence([D.ByteFallback(), D.Replace("▁", " "), D.Fuse(), D.Replace("e", "ee")])
    yield "unknown", bpe_chars(fallback=False), N.Replace(" ", "▁"), None, D.Fuse()
    yield "unknown fused", bpe_chars(fallback=False, fuse_unk=True), N.Replace(" ", "▁"), None, D.Fuse()
    yield "no unknown", bpe_chars(fallback=False, unk=False), N.Replace(" ", "▁"), None, D.Fuse()


def old_spelling(j):
    """Merges as "a b" and Metaspace with add_prefix_space, as older files have them."""
    j["model"]["merges"] = [a + " " + b for a, b in j["model"]["merges"]]
    for part in (j["pre_tokenizer"], j["decoder"]):
        if part and part["type"] == "Metaspace" and part["prepend_scheme"] != "first":
            part["add_prefix_space"] = part.pop("prepend_scheme") == "always"


def make_pipelines():
    texts = strings(420, 7)[40:] + EXTRA
    out = []
    for k, (name, t, norm, pre, dec) in enumerate(cases()):
        if norm is not None:
            t.normalizer = norm
        t.pre_tokenizer = pre
        if dec is not None:
            t.decoder = dec
        t.add_tokens([a for a in ADDED if not a.special])
        t.add_special_tokens([a for a in ADDED if a.special])
        if k % 3 == 0:
            sp = t.token_to_id("<sp>")
            t.post_processor = processors.TemplateProcessing(
                single="<sp> $A <LR>", special_tokens=[("<sp>", sp), ("<LR>", t.token_to_id("<LR>"))])
        j = json.loads(t.to_str())
        if k % 2 and not any(" " in a or " " in b for a, b in j["model"]["merges"]):
            old_spelling(j)
        mine = [texts[i] for i in range(len(texts)) if i % 4 == k % 4 or i >= 380]
        e = expect(t, mine, k)
        e["lists"], e["list_texts"] = e["lists"][:40], e["list_texts"][:40]
        text = json.dumps(j, ensure_ascii=bool(k % 2), separators=(",", ":"))
        out.append({"name": name, "tokenizer": text, "strings": mine, "expect": e})
    write("pipelines.json", out)


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "vocab":
        make_vocab(sys.argv[2], sys.argv[3])
        return
    make_golden()
    make_pipelines()


main()
