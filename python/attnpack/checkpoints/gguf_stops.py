"""The tokens of a GGUF file that end an answer, by llama.cpp's rules (src/llama-vocab.cpp, commit 0c1e5709)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..file_errors import excerpt

# The special tokens of tokenizer.ggml.model "llama" for which a file need not have a key.
DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}

ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <\uff5cend\u2581of\u2581sentence\uff5c> [e~[""".split()
)
"""Texts of tokens that end an answer, whatever else the file says of them."""

# Where a model that fills in code has nothing to add. Such a token ends an answer if no key names another one.
_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}


def token_id(path: Path, data: dict[str, Any], role: str) -> int | None:
    """The id in `tokenizer.ggml.ROLE_token_id`, or what the model has without that key; None if it has none."""
    count = len(data["tokenizer.ggml.tokens"])
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in data:
        kind = data.get("tokenizer.ggml.model")
        default = DEFAULT_IDS.get(kind, {}).get(role) if isinstance(kind, str) else None
        return default if default is not None and default < count else None
    i = data[key]
    if type(i) is not int or not 0 <= i < count:
        raise ValueError(f"{path}: the {role}_token_id is {excerpt(repr(i))}, wants an int below {count}")
    return i


def gguf_stop_tokens(path: Path, data: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text, a turn (eot) or a message (eom), then those that llama.cpp knows by their text, each
    once. All of them end an answer."""
    tokens = data["tokenizer.ggml.tokens"]
    named = [token_id(path, data, role) for role in ("eos", "eot", "eom", *_CODE)]
    unnamed = {text for role, id in zip(_CODE, named[3:], strict=True) if id is None for text in _CODE[role]}
    known = unnamed | ENDS
    found = [i for i, text in enumerate(tokens) if isinstance(text, str) and text in known]
    stops = dict.fromkeys(i for i in (*named, *found) if i is not None)
    # Some models have two ends of answers and go on after the third, or have </s> as a plain text.
    texts = {tokens[i]: i for i in stops}
    ends, goes_on = texts.keys(), set()
    if {"<|return|>", "<|call|>"} <= ends or ("<|flush|>" in ends and {"<|call|>", "<|calls|>"} & ends):
        goes_on.add(texts.get("<|end|>"))
    if "<|tool_response>" in ends:
        goes_on.add(texts.get("</s>"))
    return tuple(i for i in stops if i not in goes_on)
