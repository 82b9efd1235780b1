"""How text is split before byte-level BPE, by the names that GGUF files have in tokenizer.ggml.pre.

The names and what belongs to them are facts of llama.cpp (src/llama-vocab.cpp, commit 0c1e5709). llama.cpp writes some
expressions in a poorer syntax, and notes those of the models' own tokenizer.json beside them. Here stand the models'
own, which their training saw: for letters with accents apart, they differ from llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _words(digits: str, signs: str = _SIGNS, spaces: str = _SPACES, letters: str = r"\p{L}") -> str:
    """Endings, words with one sign before them, numbers, signs with the line ends behind them, spaces."""
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}|{signs}|{spaces}"


def _cased_words(digits: str, ending: str = "", signs: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*", without: str = "") -> str:
    """The same, but a word ends where a capital follows a small letter."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}|{digits}|{signs}|{_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = _cased_words(r"\p{N}{1,3}", f"{_ENDINGS}?")
_KIMI = r"\p{Han}+|" + _cased_words(r"\p{N}{1,3}", f"{_ENDINGS}?", _SIGNS, without=r"&&[^\p{Han}]")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HANGUL_AND_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# The letters that had a case in Unicode 11.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"


@dataclass(frozen=True)
class Split:
    """Each expression cuts the pieces of the one before: what it matches, and what lies between, are pieces."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token becomes that token, though no merges lead there."""
    add_bos: bool = False
    """A text begins with BOS, unless the file says otherwise."""
    nfc: bool = False
    """Text is composed first: the tokenizer of this family in transformers does so, llama.cpp does not."""

    def pre_tokenizer(self) -> Any:
        from tokenizers import Regex, pre_tokenizers

        cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in self.expressions]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(names: str, *expressions: str, **settings: bool) -> dict[str, Split]:
    return dict.fromkeys(names.split(), Split(expressions, **settings))


SPLITS: dict[str, Split] = {
    **_named("gpt-2 phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4", _GPT2),
    **_named("olmo mpt", _GPT2, nfc=True),
    **_named("smollm starcoder refact codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_named("command-r", r"\p{N}", _GPT2, nfc=True),
    **_named("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    **_named("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
    **_named(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3, ignore_merges=True, add_bos=True
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, ignore_merges=True),
    **_named("minicpm5", r"\p{N}{1,3}", _words(r"\p{N}+"), ignore_merges=True),
    **_named("qwen2", _QWEN2, nfc=True),
    **_named("deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2 stablelm2", _QWEN2),
    **_named("laguna", r"[^\n]+|\n+", _QWEN2),
    **_named("ufakzeka", _QWEN2.removeprefix(f"{_ENDINGS}|")),
    **_named("qwen35", _words(r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", letters=r"\p{L}\p{M}"), nfc=True),
    **_named("seed-coder", _words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+")),
    **_named("bailingmoe bailingmoe2 llada-moe", _words(r"\p{N}", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+")),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_named("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    **_named("tekken", _cased_words(r"\p{N}"), ignore_merges=True, add_bos=True),
    **_named("kimi-k2", _KIMI),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _CJK, _DEEPSEEK3),
    **_named(
        "deepseek-llm", r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_DEEPSEEK_SIGNS}]+", r"\s+$", _HANGUL_AND_HAN, r"\p{N}+"
    ),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HANGUL_AND_HAN, r"\p{N}"),
    **_named("bloom poro-chat gpt3-finnish", " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"),
    **_named("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_named("viking", " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"),
}

# The rule of an architecture's own models, for files from before llama.cpp named it. Models of all makers are called
# llama.
ARCHITECTURE_SPLITS = {
    "gpt2": "gpt-2",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "falcon": "falcon",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
    "phi2": "gpt-2",
    "gptneox": "olmo",
}
