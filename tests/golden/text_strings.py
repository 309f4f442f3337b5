"""Awkward strings for tokenizer tests; the same list every time."""
import random

WORDS = ("the quick brown fox jumps over lazy dogs Hello World don't I'LL we've it's They'RE 'tis "
         "GPT2 x86_64 snake_case camelCase HTTPServer naïve café déjà vu Straße ΑΒΓ привет мир "
         "שלום مرحبا नमस्ते สวัสดี こんにちは 世界 中文字符 한국어 조선말 ไทย ქართული հայերեն "
         "ﬁligree ſtrange İstanbul ǅ ﷺ ½ Ⅷ ² ๓ ٣ 𝟘 𝔘𝔫𝔦 🙂 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☕️").split()
PIECES = ["\n", "\r\n", "\r", "\t", "  ", "   ", "\n\n", " \n", "\n ", "\u00a0", "\u2003", "\u200b",
          "\u200d", "\u180e", "\u0085", "\u2028", "\ufeff", "\u3000", "\x00", "\x1c", "\x7f", "'", "''",
          "'s", "'S", "'ll", "'Re", "'ſ", "-", "--", "...", "…", "!!!", "?!", "(", ")", "[]", "{}", "<",
          ">", "<|", "|>", "</", "/", "\\", "\"", "`", "```", "#", "##", "$", "%", "^", "&&", "*", "_",
          "__", "+", "=", "==", "~", "|", ":", ";", ",", ".", "@", "0", "1", "12", "123", "1234",
          "12345678", "3.14", "1,000", "1e-5", "0x1F", "٣٤٥", "१२३", "½¾", "①②", "Ⅻ", "\u0301",
          "e\u0301", "e\u0323\u0301", "e\u0301\u0323", "\u1e69", "s\u0307\u0323", "q\u0307\u0323",
          "\u212b", "\u2126", "\u1100\u1161\u11a8", "가\u11a8", "ᄀ", "\u0958", "\ufb1d", "\u2adc",
          "\u0f73", "\U00011935\U00011930", "\U00011131\U00011127", "\U0001d15e", "\u0340", "\u0344",
          "▁", "▁▁", "Ġ", "Ċ", "<0x41>", "<0xFF>", "\ufffd", "\U0010ffff", "\ue000", "\U0002ebf0",
          "\U00031350", "\U00010d40", "\U00016d70", "\U00011de0", "\u1c89\u1c8a", "\ua7cb", "\u2427",
          "\U0001f6dc", "\U0001fae8", "\u061d", "\u0897", "中", "。", "、", "「」", "ー", "々", "ﾊﾟ", "ｱ",
          "－", "！", "１２３", "ａｂｃ", "ß", "ẞ", "Σς", "ı", "ŉ", "ǆ"]
MARKUP = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>",
          "<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>", "<tool_call>",
          "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>", "<unk>", "<s>", "</s>", "<h1>",
          "</table>", "[INST]", "<unused17>", "<|fim_prefix|>", "<|im_start", "im_end|>", "<|im_<|im_end|>"]
CODE = ["def f(x):\n    return x**2 + 1\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
        "SELECT * FROM t WHERE a='b' AND c>=10;", "{\"a\": [1, 2.5, null], \"b\": {\"c\": \"d\\n\"}}",
        "https://example.com/a/b?c=d&e=%20f#g", "<div class=\"x\">text</div>\n", "a -> b => c <= d != e",
        "$x^2 + y^2 = z^2$ \\frac{1}{2}", "C:\\Users\\me\\file.txt", "user@example.org", "#include <stdio.h>",
        "/* comment */ // another\n", "    indented\n        more\n\t\ttabs\n"]


def strings(n, seed=1):
    r = random.Random(seed)
    out = ["", " ", "a", "\n", "Hello world", "Hello world! Café déjà vu — 123 😊", "<s>G",
           "<|im_start|>user", " leading", "trailing ", "  two", "a  b   c    d"] + PIECES + MARKUP + CODE
    out += WORDS + [" " + w for w in WORDS]
    out += ["Z" * 60, "aA" * 40, "." * 77, " " * 65, "\n" * 50, "中" * 70, "\u0301" * 60, "a1" * 50,
            "e" + "\u0301\u0323" * 30, "ab" * 64, "0" * 65, "\t" * 40, "é" * 55, "▁" * 52, "🙂" * 51]
    while len(out) < n:
        kind = r.random()
        if kind < 0.35:
            s = "".join(r.choice((r.choice(WORDS), r.choice(PIECES), " ", r.choice(WORDS)))
                        for _ in range(r.randint(1, 14)))
        elif kind < 0.5:
            s = "".join(r.choice((r.choice(WORDS) + " ", r.choice(MARKUP), r.choice(PIECES), "\n"))
                        for _ in range(r.randint(1, 9)))
        elif kind < 0.6:
            s = " ".join(r.choice(WORDS) for _ in range(r.randint(3, 25)))
        elif kind < 0.7:
            s = "".join(r.choice(CODE) for _ in range(r.randint(1, 3)))
        elif kind < 0.8:
            block = r.choice(((0x20, 0x7f), (0xa0, 0x250), (0x300, 0x530), (0x590, 0x10ff),
                              (0x1100, 0x2000), (0x2000, 0x3100), (0x3100, 0xd7ff), (0xe000, 0xffff),
                              (0x10000, 0x20000), (0x20000, 0x32000), (0, 0x110000)))
            s = "".join(chr(c) for c in (r.randrange(*block) for _ in range(r.randint(1, 30)))
                        if not 0xd800 <= c <= 0xdfff)
        elif kind < 0.88:
            unit = r.choice(PIECES + WORDS)
            s = unit * r.randint(2, 40)
        else:
            s = "".join(r.choice(" \n\r\t'a1.é中\u0301") for _ in range(r.randint(2, 40)))
        out.append(s)
    return out[:n]
