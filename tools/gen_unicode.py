#!/usr/bin/env python3
"""Writes src/text/unicode_tables.def: what Hugging Face's `tokenizers` thinks of every code point.

Run by hand, in an environment with `tokenizers` and `unicodedata2`:

    python3 tools/gen_unicode.py > src/text/unicode_tables.def

Classes are asked of the library itself (its regex engine knows Unicode 16, its digits Unicode 17,
its punctuation Unicode 8, its normalisation forms Unicode 12.1), so that the tables are right for
the thing they must equal. unicodedata2 gives decomposition mappings and combining classes, which
never change once a character exists. For PCRE2, whose tables are those of the distribution
(Unicode 14 in Debian 12), the table holds what each class gained since Unicode 14; Python 3.11
knows that version.
"""
import textwrap
import unicodedata

import tokenizers
import unicodedata2
from tokenizers import Regex, normalizers, pre_tokenizers

GC = ["Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
      "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co"]
CPS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
TEXT = "".join(map(chr, CPS))


def removed_by(pre):
    """Code points that the pre-tokenizer removes."""
    out = set()
    for i in range(0, len(TEXT), 4096):
        chunk = TEXT[i:i + 4096]
        kept = set()
        for piece, _ in pre.pre_tokenize_str(chunk):
            kept.update(piece)
        out.update(ord(c) for c in chunk if c not in kept)
    return out


def regex_class(pattern):
    return removed_by(pre_tokenizers.Split(Regex(pattern), "removed"))


def ranges(points):
    out = []
    for c in sorted(points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def print_table(name, note, numbers, kind="uint32_t"):
    print(f"// {note}")
    print(f"static const {kind} {name}[] = {{")
    print(textwrap.fill(", ".join(map(str, numbers)), 100))
    print("};\n")


def print_ranges(name, points, note):
    print_table(name, note + " First and last code point of each range.",
                [x for r in ranges(points) for x in r])


def unicode14(prefix):
    return {c for c in CPS if unicodedata.category(chr(c)).startswith(prefix)}


def print_categories():
    cat = {}
    for name in GC:
        for c in regex_class("\\p{%s}" % name):
            cat[c] = GC.index(name)
    starts = []
    for c in range(0x110000):
        g = cat.get(c, GC.index("Cs") if 0xD800 <= c <= 0xDFFF else 0)
        if not starts or starts[-1][1] != g:
            starts.append((c, g))
    print_table("unicode_runs", "First code point of each run of one general category << 5 | category.",
                [c << 5 | g for c, g in starts])
    return cat


def print_gains(cat):
    """What \\p{X} gained since Unicode 14, as text for a PCRE2 class."""
    assert unicodedata.unidata_version == "14.0.0", "run with Python 3.11"
    names = GC[1:25] + ["Zp", "Cc", "Cf", "Co"] + ["L", "M", "N", "P", "S", "Z"]
    print("// What a class of Unicode 16 has and Unicode 14 has not, as PCRE2 class text. Classes that")
    print("// lost a code point are not here.")
    print("static const class_gain unicode_gains[] = {")
    for name in sorted(set(names)):
        new = {c for c, g in cat.items() if GC[g].startswith(name)}
        old = unicode14(name)
        if old - new:
            continue
        print('{"%s", "%s"},' % (name, '"\n"'.join(class_text(new - old))))
    print("};\n")


def class_text(points):
    """Lines of C string text."""
    items = []
    for a, b in ranges(points):
        items.append("\\\\x{%x}" % a + ("-\\\\x{%x}" % b if b > a else ""))
    return [line.replace(" ", "") for line in textwrap.wrap(" ".join(items), 95)] or [""]


def print_normalisation():
    nfd, nfkd, nfc = normalizers.NFD(), normalizers.NFKD(), normalizers.NFC()
    rows, compose = [], []
    for c in CPS:
        if 0xAC00 <= c <= 0xD7A3:
            continue  # Hangul is arithmetic
        ch = chr(c)
        d, k = nfd.normalize_str(ch), nfkd.normalize_str(ch)
        if d != ch or k != ch:
            rows.append((c, list(map(ord, d)) if d != ch else [], list(map(ord, k))))
        if d != ch and nfc.normalize_str(ch) == ch:
            parts = unicodedata2.decomposition(ch).split()
            assert len(parts) == 2, hex(c)
            compose.append((int(parts[0], 16), int(parts[1], 16), c))
    head, pool = [], []
    for c, d, k in rows:
        k = [] if k == d else k
        head.append(c << 10 | len(d) << 5 | len(k))
        pool += d + k
    print_table("unicode_decomp", "Full decompositions: code point << 10 | length of the canonical one "
                "<< 5 | length of the compatible one (0: the same).", head)
    print_table("unicode_pool", "Their code points, one after the other: canonical, then compatible.", pool)
    print_table("unicode_compose", "Primary composites, sorted: first, second, composed.",
                [x for t in sorted(compose) for x in t])

    ccc = {}
    for c in CPS:
        v = unicodedata2.combining(chr(c))
        if not v:
            continue
        # does this library's (older) table know it? A lower class must move in front of it.
        other = chr(0x334) if v > 1 else chr(0x345)
        s = "a" + chr(c) + other if v > 1 else "a" + other + chr(c)
        if nfd.normalize_str(s) != s or len(nfd.normalize_str(chr(c))) > 1:
            ccc[c] = v
    runs = []
    for c in sorted(ccc):
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == ccc[c]:
            runs[-1][1] = c
        else:
            runs.append([c, c, ccc[c]])
    print_table("unicode_ccc", "Combining classes other than 0: first, last code point, class.",
                [x for r in runs for x in r])


def print_lower():
    low, rows = normalizers.Lowercase(), []
    for c in CPS:
        s = low.normalize_str(chr(c))
        if s != chr(c):
            rows += [c, ord(s[0]), ord(s[1]) if len(s) > 1 else 0]
    print_table("unicode_lower_map", "Lower case: code point, first and second (or 0) of its form.", rows)


def main():
    print("// Made by tools/gen_unicode.py from tokenizers %s and unicodedata2 %s; included by"
          % (tokenizers.__version__, unicodedata2.unidata_version))
    print("// unicode.c only.\n")
    cat = print_categories()
    digits = pre_tokenizers.Digits(individual_digits=True)
    numeric = {c for c in CPS if len(digits.pre_tokenize_str("a" + chr(c))) == 2}
    print_ranges("unicode_numeric", {c for c in numeric if not GC[cat.get(c, 0)].startswith("N")},
                 "Numeric for the digits rule, yet not in class N (newer tables there).")
    print_ranges("unicode_punct", removed_by(pre_tokenizers.Punctuation("removed")),
                 "Punctuation as the Punctuation pre-tokenizer sees it.")
    print_ranges("unicode_word", regex_class(r"[\w]"), r"[\w]; outside brackets the library has 6 more.")
    print_gains(cat)
    print_normalisation()
    print_lower()


main()
