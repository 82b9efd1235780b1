"""Compares the tokenizers of GGUF files with llama.cpp's: ids of random texts, the text of ids, and stop tokens.

    python scripts/compare_tokenizers.py [--texts 1000] [--seed 0] FILE.gguf ...

It needs llama-cpp-python, whose source distribution has vocabularies without weights (vendor/llama.cpp/models). Texts
are made of words, numbers, code, spaces, line ends, emoji, letters of many scripts and the file's own special tokens.
attnpack differs from llama.cpp by design where a family's own tokenizer does: it composes text (NFC) for Qwen, Command
R and GPT-NeoX, takes letters with signs as one word for gpt-4o, tekken and kimi-k2, and strips all kinds of spaces
behind Phi-3's tokens. The exit code is 1 if another id differs, or a text does not come back.
"""

import argparse
import ctypes
import random
import sys
import unicodedata
from pathlib import Path

from attnpack.checkpoints import load_tokenizer

WORDS = (
    "Hello world don't I'LL we've it's na\u00efve Gr\u00f6\u00dfe \u4f60\u597d \u4e16\u754c \u3072\u3089\u304c\u306a "
    "\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4 \u043f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 "
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0e44\u0e17\u0e22 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac def return "
    'camelCase HTTPServer snake_case __init__ x=1; // /* */ <a href="q"> {} [] () ... !!! ?! $5.00 1,234,567.89 12 '
    "1234 \u0663\u0664 \u00bd \u00b2 \u2167 \U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea "
    "\u1e9e \u01c6 \u01c5 \ufb01 \uff21 \u3002 \uff0c \u2014 \u2026 \u20ac \u221a \u2192 \u200b \u00ad # @me https://x.y/z?a=b"
).split()
SPACES = [*" " * 8, *[" " * n for n in (2, 3, 4, 8)], *["\n", "\n\n", "\n\n\n", "\r\n", "\t", "\t\t", " \n"], *[""] * 6]
OTHER_SPACES = ["\u00a0", "\u2003", "\u3000"]
SIGNED = ["e\u0301a", "\u0939\u093f\u0928\u094d\u0926\u0940"]  # not composed; letters with signs


class LlamaCpp:
    def __init__(self, path: str) -> None:
        import llama_cpp.llama_cpp as lib

        self.lib = lib
        self.log = lib.llama_log_callback(lambda *args: None)  # kept, because llama.cpp goes on calling it
        lib.llama_log_set(self.log, ctypes.c_void_p(0))
        options = lib.llama_model_default_params()
        options.vocab_only = True
        self.model = lib.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            sys.exit(f"{path}: llama.cpp cannot load it")
        self.vocabulary = lib.llama_model_get_vocab(self.model)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = (self.lib.llama_token * (len(data) + 16))()
        count = self.lib.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    def stops(self) -> set[int]:
        count = self.lib.llama_vocab_n_tokens(self.vocabulary)
        return {i for i in range(count) if self.lib.llama_vocab_is_eog(self.vocabulary, i)}


def drawn_text(draw: random.Random, special: list[str], signed: bool) -> str:
    spaces, words = SPACES + signed * OTHER_SPACES, WORDS + signed * SIGNED
    parts = []
    for _ in range(draw.choice([1, 2, 4, 8, 16, 32])):
        kind = draw.random()
        if kind < 0.06 and special:
            parts.append(draw.choice(special))
        elif kind < 0.12:
            ranges = [(32, 127), (0xA0, 0x250), (0x391, 0x3CE), (0x410, 0x44F), (0x4E00, 0x9FA5), (0x1F300, 0x1F64F)]
            parts.append("".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randrange(1, 6))))
        elif kind < 0.2:
            parts.append(str(draw.randrange(10 ** draw.randrange(1, 12))))
        else:
            parts.append(draw.choice(words))
        parts.append(draw.choice(spaces))
    return "".join(parts)


def compare(path: str, texts: int, seed: int) -> bool:
    """Whether all that must be the same is; prints a line of figures, and the first text that differs."""
    ours, theirs, draw = load_tokenizer(path), LlamaCpp(path), random.Random(seed)
    special = [token.content for token in ours.backend.get_added_tokens_decoder().values()][:400]
    differ, signed, lost, first = 0, 0, 0, None
    for n in range(texts):
        text = drawn_text(draw, special, n % 2 == 1)
        ids, others = ours.encode(text), theirs.encode(text)
        if ids != others and n % 2:
            signed += 1
        elif ids != others:
            differ, first = differ + 1, first or text
        back = ours.decode(ids)
        plain = not any(token in text for token in special) and unicodedata.is_normalized("NFC", text)
        lost += plain and back != text
    same = set(ours.stop_tokens) == theirs.stops()
    print(
        f"{Path(path).name}: {differ} of {texts - texts // 2} texts differ, {signed} of {texts // 2} with signed "
        f"letters and other spaces, {lost} do not come back, stop tokens {'the same' if same else 'differ'}"
        + (f"; the first: {first!r:.200}" if first else ""),
        flush=True,
    )
    return not differ and not lost and same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.gguf")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = [compare(path, args.texts, args.seed) for path in args.files]
    sys.exit(not all(found))
