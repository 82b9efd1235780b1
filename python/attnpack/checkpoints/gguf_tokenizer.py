"""The tokenizers of GGUF files, by llama.cpp's rules: byte-level BPE, and BPE on texts whose spaces are U+2581."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..file_errors import excerpt
from .gguf_file import GgufFile
from .gguf_splits import ARCHITECTURE_SPLITS, SPLITS, Split
from .gguf_stops import ENDS, gguf_stop_tokens, token_id

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_BLOCK = "\u2581"  # stands for a space
# Limits of a vocabulary with scores, so that a file that lies costs little. Gemma's takes a fifth and a third of them.
_MOST_LETTERS = 50_000_000  # the squares of the tokens' lengths, added up
_MOST_MERGES = 1_500_000


def read_gguf_tokenizer(path: Path) -> dict[str, Any]:
    """The arguments of a Tokenizer for a GGUF file. Raises ValueError for what the file lacks or what is not known."""
    file = GgufFile(path)
    data = file.metadata
    kind = data.get("tokenizer.ggml.model")
    if kind is None:
        file.check_model()
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"{path}: tokenizer.ggml.model is {excerpt(repr(kind))}; known are {_KNOWN_KINDS}: use a checkpoint with a "
            "tokenizer.json, or give token ids"
        )
    tokens = _listed(path, data, "tokens", str)
    types = _listed(path, data, "token_type", int, len(tokens)) if "tokenizer.ggml.token_type" in data else []
    _check_distinct(path, tokens)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: i for name, role in roles.items() if (i := token_id(path, data, role)) is not None}

    backend, begins = _KINDS[kind](path, data, tokens)
    stop_tokens = gguf_stop_tokens(path, data)
    _add_tokens(backend, data, tokens, types, {tokens[i] for i in stop_tokens} & ENDS)
    wants = {"bos": _flag(path, data, "add_bos_token", begins), "eos": _flag(path, data, "add_eos_token", False)}
    wants["bos"] |= kind == "gemma4"  # some files deny it
    ends = {name: ids[name] for name, wanted in wants.items() if wanted and name in ids}
    _add_ends(backend, {name: (tokens[i], i) for name, i in ends.items()})
    return {
        "backend": backend,
        "stop_tokens": stop_tokens,
        "chat_template": data.get("tokenizer.chat_template"),
        "special": {f"{name}_token": tokens[i] for name, i in ids.items()},
    }


def _listed(path: Path, data: dict[str, Any], name: str, kind: type, count: int | None = None) -> list[Any]:
    """The list in `tokenizer.ggml.NAME`, whose values are all of that kind."""
    key, what = f"tokenizer.ggml.{name}", {str: "texts", int: "ints", float: "numbers"}[kind]
    wanted = f"wants a list of {what}" if count is None else f"wants a list of {count} {what}, as many as tokens"
    if key not in data:
        raise ValueError(f"{path}: has no {key}, {wanted}; convert the model again with a newer llama.cpp")
    values, kinds = data[key], (int, float) if kind is float else (kind,)
    if not isinstance(values, list):
        raise ValueError(f"{path}: {key} is {excerpt(repr(values))}, {wanted}; get the file again")
    if (wrong := next((value for value in values if type(value) not in kinds), None)) is not None:
        raise ValueError(f"{path}: {key} has {excerpt(repr(wrong))}, {wanted}; get the file again")
    if count is not None and len(values) != count:
        raise ValueError(f"{path}: {key} has {len(values)} values, {wanted}; get the file again")
    return values


def _flag(path: Path, data: dict[str, Any], name: str, default: bool) -> bool:
    value = data.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ValueError(f"{path}: tokenizer.ggml.{name} is {excerpt(repr(value))}, wants True or False")
    return value


def _check_distinct(path: Path, tokens: list[str]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if token and seen.setdefault(token, i) != i:
            raise ValueError(
                f"{path}: tokens {seen[token]} and {i} of tokenizer.ggml.tokens are both {excerpt(repr(token))}; get "
                "the file again"
            )


# ---- the kinds: a backend, and whether texts begin with BOS where the file does not say --------


def _byte_level(path: Path, data: dict[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    split = _split(path, data)
    vocabulary = _vocabulary(tokens)
    merges = _merges(path, data, vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.ignore_merges))
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, split.add_bos


def _by_scores(path: Path, data: dict[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    """SentencePiece's BPE, which joins the two neighbours that make the token with the best score."""
    scores = _listed(path, data, "scores", float, len(tokens))
    if (lost := next((i for i, score in enumerate(scores) if score != score), None)) is not None:
        raise ValueError(f"{path}: the score of token {lost} is nan, wants a number; get the file again")
    vocabulary = _vocabulary(tokens)
    if (letters := sum(len(token) ** 2 for token in tokens)) > _MOST_LETTERS:
        raise ValueError(
            f"{path}: the squares of the lengths of its tokens add up to {letters}, wants at most {_MOST_LETTERS}; get "
            "the file again"
        )
    best = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = list(islice(_pairs(best, tokens, vocabulary), _MOST_MERGES + 1))
    if len(merges) > _MOST_MERGES:
        raise ValueError(
            f"{path}: its tokens can be made of two others in more than {_MOST_MERGES} ways; get the file again"
        )
    prefix = _flag(path, data, "add_space_prefix", True)
    return _with_blocks(path, data, tokens, vocabulary, merges, prefix), True


def _gemma4(path: Path, data: dict[str, Any], tokens: list[str]) -> tuple[Any, bool]:
    """Merges as in byte-level BPE, on the text itself."""
    vocabulary = _vocabulary(tokens)
    return _with_blocks(path, data, tokens, vocabulary, _merges(path, data, vocabulary), prefix=False), True


_KINDS = {"gpt2": _byte_level, "llama": _by_scores, "gemma4": _gemma4}
_KNOWN_KINDS = "gpt2 (byte-level BPE), llama (SentencePiece's BPE) and gemma4"


def _split(path: Path, data: dict[str, Any]) -> Split:
    pre, arch = data.get("tokenizer.ggml.pre"), data.get("general.architecture")
    known = ", ".join(sorted(SPLITS))
    if not pre:
        pre = ARCHITECTURE_SPLITS.get(arch) if isinstance(arch, str) else None
        if pre is None:
            raise ValueError(
                f"{path}: has no tokenizer.ggml.pre, and its architecture {excerpt(repr(arch))} does not say how text "
                f"is split: convert the model again with a newer llama.cpp; known are {known}"
            )
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ValueError(f"{path}: tokenizer.ggml.pre is {excerpt(repr(pre))}; known are {known}")
    return SPLITS[pre]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """The ids by text, without tokens that have none, of which a file may have several."""
    return {token: i for i, token in enumerate(tokens) if token}


def _merges(path: Path, data: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _listed(path, data, "merges", str):
        space = merge.find(" ", 1)
        pair = (merge[:space], merge[space + 1 :])
        if space < 0 or "".join(pair) not in vocabulary:  # the package would panic
            raise ValueError(f"{path}: merges {excerpt(repr(merge))}, which gives no token; get the file again")
        pairs.append(pair)
    return pairs


def _pairs(ids: Iterable[int], tokens: list[str], vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """For each of the tokens `ids`, the pairs of tokens that make it."""
    for token in map(tokens.__getitem__, ids):
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                yield tokens[left], tokens[right]


def _with_blocks(
    path: Path,
    data: dict[str, Any],
    tokens: list[str],
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    prefix: bool,
) -> Any:
    """BPE on texts whose spaces are blocks, with one before each text if `prefix`. Unknown letters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = token_id(path, data, "unknown")
    lost = next((byte for n in range(256) if (byte := f"<0x{n:02X}>") not in vocabulary), None)
    if lost and unknown is None:
        raise ValueError(
            f"{path}: has neither the token {lost} nor tokenizer.ggml.unknown_token_id, so some letters would be lost; "
            "get the file again"
        )
    unk = None if unknown is None else tokens[unknown]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    blocks = normalizers.Replace(" ", _BLOCK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLOCK), blocks]) if prefix else blocks
    spaces = [decoders.Replace(_BLOCK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)] if prefix else spaces)
    return backend


# ---- what is not text ----------------------------------------------------------------


def _add_tokens(backend: Any, data: dict[str, Any], tokens: list[str], types: list[int], ends: set[str]) -> None:
    """Tokens that are looked for in a text before all else. `ends` are special, whatever their type is."""
    from tokenizers import AddedToken

    name = data.get("general.name")
    # Phi-3's tokens take the spaces behind them. The file does not say so, and llama.cpp looks at the name as well.
    phi3 = isinstance(name, str) and any(each in name.lower() for each in ("phi-3", "phi3"))
    whole = ("<unk>", "<s>", "<|endoftext|>")

    def added(token: str, special: bool) -> AddedToken:
        return AddedToken(token, special=special, normalized=False, rstrip=phi3 and token not in whole)

    kinds = dict(zip(tokens, types, strict=True)) if types else {}
    special = [token for token in tokens if token in ends or kinds.get(token) in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([added(token, True) for token in special])
    users = [token for token, kind in kinds.items() if kind == _USER_DEFINED and token not in ends]
    backend.add_tokens([added(token, False) for token in users])


def _add_ends(backend: Any, ends: dict[str, tuple[str, int]]) -> None:
    """The tokens around every text: `bos` before it, `eos` behind it."""
    from tokenizers import processors

    if ends:
        first, last = ([ends[name][0]] if name in ends else [] for name in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=list(dict.fromkeys(ends.values()))
        )
