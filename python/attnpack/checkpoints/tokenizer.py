"""Text to token ids and back, for Hugging Face directories and GGUF files, on the package `tokenizers`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import wrong_kind
from ..file_errors import excerpt, naming
from .added_tokens import add_tokens
from .chat_template import LONGEST_TEMPLATE, render_chat
from .gguf_file import GgufFile
from .strict_json import LONGEST, check_values, read_bounded, read_json

# The system message of SmolLM2's own chat template (tokenizer.chat_template in its GGUF file).
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Qwen2's split: contractions, words with one leading non-letter, single digits, punctuation, line ends, spaces.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MOST_GROWTH = 100  # times that a file's rules may make a text longer
_MOST_ADDED = 10_000  # characters or tokens that they may add to any text
_KNOWN_PRE = "gpt-2, smollm and qwen2"  # tokenizer.ggml.pre, by llama.cpp's names
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# The rule of an architecture's own models, for files that name none. Models of all makers are called llama.
_ARCHITECTURE_PRE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2"}


class Tokenizer:
    """`encode`, `decode` and `chat` of one model; made by `load_tokenizer`.

    `stop_tokens` are the ids that end an answer; `backend` is the `tokenizers.Tokenizer` that does the work.
    """

    def __init__(
        self,
        backend: Any,
        *,
        stop_tokens: tuple[int, ...] = (),
        chat_template: str | None = None,
        special: dict[str, str] | None = None,
        source: str = "",
        vocabulary: str = "",
    ) -> None:
        self.backend, self.stop_tokens, self.chat_template = backend, stop_tokens, chat_template
        self.special, self._source, self._vocabulary = special or {}, source, vocabulary or source

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the tokens that the model wants around every text (such as a BOS), as in transformers.

        Raises ValueError, naming the file, where its rules or its vocabulary fail on `text`.
        """
        return self._encode(text, add_special_tokens=True)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids` (a list or a 1-D tensor); incomplete UTF-8 at an end becomes U+FFFD."""
        numbers = [_token_id(i) for i in ids]
        with self._naming("cannot decode the ids"):
            return self.backend.decode(numbers, skip_special_tokens=skip_special_tokens)

    def stream(self, write: Callable[[str], object]) -> Callable[[int], None]:
        """A function that takes token ids one by one, and calls `write` with each piece of text once it is complete."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)

        def add_token(token: int) -> None:
            number = _token_id(token)
            with self._naming("cannot decode the id"):
                text = decoder.step(self.backend, number)
            if text:
                write(text)

        return add_token

    def chat(self, prompt: str) -> list[int]:
        """Ids of one user message in the model's chat format, up to where the answer begins.

        If jinja2 3.1.6 or later is installed, the model's own template is rendered in a process with little time and
        memory (chat_template.py). Otherwise the format is ChatML, with SmolLM2's default system message if the template
        contains it. Raises ValueError if the model has no template or needs jinja2, or if its template fails or takes
        too much.
        """
        return self._encode(self.chat_text(prompt), add_special_tokens=False)

    def chat_text(self, prompt: str) -> str:
        """The text that `chat` encodes."""
        template = self.chat_template
        if template is None:
            raise ValueError(f"{self._source}: the model has no chat template; use encode(prompt) instead")
        _check_text(prompt, "prompt")
        values: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt}],
            "add_generation_prompt": True,
            # Templates ask whether these are none; a variable that is not there would not be none.
            "tools": None,
            "documents": None,
        }
        try:
            return render_chat(self._source, template, **self.special | values)
        except ImportError as error:
            return _chatml(prompt, template, self._source, error)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        _check_text(text)
        with self._naming("cannot encode the text"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _naming(self, failed: str) -> AbstractContextManager[None]:
        """The package tries a file's rules only on a text or on ids."""
        return naming(self._vocabulary, failed, "get the checkpoint again")


def _check_text(text: object, name: str = "text") -> None:
    if not isinstance(text, str):
        raise wrong_kind(name, text, "a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"attnpack: {name} has {text[error.start]!r} at {error.start}, which is half a character, wants whole "
            "ones: join the halves, or leave it out"
        ) from None


def _token_id(token: Any) -> int:
    number = int(token)
    if not 0 <= number < 2**32:
        raise ValueError(f"attnpack: a token id is {number}, wants 0 to {2**32 - 1}: use the ids of this tokenizer")
    return number


def _chatml(prompt: str, template: str, source: str, why: ImportError) -> str:
    if "<|im_start|>" not in template:
        raise ValueError(f"{source}: the chat template is not ChatML, and {why}") from why
    system = f"<|im_start|>system\n{_SMOLLM2_SYSTEM}<|im_end|>\n" if _SMOLLM2_SYSTEM in template else ""
    return f"{system}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (tokenizer.json) or of a GGUF file with a byte-level BPE vocabulary.

    Raises ImportError without the package `tokenizers`, ValueError for a vocabulary of another kind or a missing file.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{path}: reading its tokenizer needs tokenizers; run `pip install tokenizers`") from error
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory; give a Hugging Face directory or a GGUF file")
    with naming(path, "its tokenizer cannot be read", "get the checkpoint again"):
        tokenizer = _from_directory(path) if path.is_dir() else _from_gguf(path)
    _check_settings(path, tokenizer)
    return tokenizer


def _check_settings(path: Path, tokenizer: Tokenizer) -> None:
    for name, text in {"chat template": tokenizer.chat_template or "", **tokenizer.special}.items():
        if not isinstance(text, str):
            raise ValueError(f"{path}: its {name} is {excerpt(repr(text))}, wants a text; get the checkpoint again")
    for token in tokenizer.stop_tokens:
        if type(token) is not int or token < 0:
            raise ValueError(f"{path}: eos_token_id is {excerpt(repr(token))}, wants an int; get the checkpoint again")


def _from_directory(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"{path}: has no tokenizer.json; save it with transformers (tokenizer.save_pretrained)")
    with naming(path / "tokenizer.json", "cannot be read", "get the checkpoint again"):
        data = read_bounded(path / "tokenizer.json", LONGEST)
        check_values(data)
        backend = Backend.from_buffer(data)
        for name, parts in (("normalizer", "normalizers"), ("decoder", "decoders"), ("post_processor", "processors")):
            _check_growth(name, parts, getattr(backend, name))
    # Both are for batches: transformers, too, leaves them out of a plain call.
    backend.no_padding()
    backend.no_truncation()
    special = add_tokens(path, backend)
    settings: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (path / name).is_file():
            settings |= {key: value for key, value in read_json(path / name).items() if value is not None}
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    if (path / "chat_template.jinja").is_file():
        with naming(path / "chat_template.jinja", "cannot be read", "get the checkpoint again"):
            template = read_bounded(path / "chat_template.jinja", LONGEST_TEMPLATE).decode("utf-8")
    stop = settings.get("eos_token_id")
    if stop is None and "eos_token" in special:
        stop = backend.token_to_id(special["eos_token"])
    stop_tokens = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    return Tokenizer(
        backend,
        stop_tokens=stop_tokens,
        chat_template=template,
        special=special,
        source=str(path),
        vocabulary=str(path / "tokenizer.json"),
    )


def _check_growth(name: str, parts: str, rules: Any) -> None:
    """Refuses rules that make a text much longer, one after the other: they would take all memory."""
    growth, added = 1.0, 0
    left = [json.loads(rules.__getstate__())] if rules is not None else []
    while left:
        rule = left.pop()
        left += rule.get(parts, [])
        if rule["type"] == "Replace":
            found = len(rule["pattern"].get("String", ""))
            # A pattern may match nothing, before and after each character.
            growth *= max(1, len(rule["content"]) / found if found else 1 + len(rule["content"]))
        elif rule["type"] == "Prepend":
            added += len(rule["prepend"])
        elif rule["type"] == "TemplateProcessing":  # each piece is the text's tokens, or the ids of a special token
            special = [piece["SpecialToken"]["id"] for piece in rule["single"] if "SpecialToken" in piece]
            growth *= max(1, len(rule["single"]) - len(special))
            added += sum(len(rule["special_tokens"][token]["ids"]) for token in special)
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its {name} makes a text up to {growth:.0f} times as long, wants at most {_MOST_GROWTH} times"
        )
    if added > _MOST_ADDED:
        raise ValueError(f"its {name} adds {added} characters or tokens to a text, wants at most {_MOST_ADDED}")


def _from_gguf(path: Path) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend

    file = GgufFile(path)
    data = file.metadata
    kind = data.get("tokenizer.ggml.model")
    if kind is None:
        file.check_model()
    if kind != "gpt2":
        raise ValueError(f"{path}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) can be built")
    tokens, merges = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.merges"]
    types = data.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    arch = data.get("general.architecture")
    pre = data.get("tokenizer.ggml.pre") or (_ARCHITECTURE_PRE.get(arch) if isinstance(arch, str) else None)
    if pre is None:
        raise ValueError(
            f"{path}: has no tokenizer.ggml.pre, and its architecture {excerpt(repr(arch))} does not say how text is "
            f"split; known are {_KNOWN_PRE}: convert the model again with a newer llama.cpp"
        )
    pre_tokenizer = _pre_tokenizer(path, pre)

    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    for pair in pairs:  # the package would panic
        if len(pair) != 2 or "".join(pair) not in vocabulary:
            raise ValueError(f"{path}: merges {excerpt(repr(pair))}, which gives no token; get the file again")
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )

    ids = {
        f"{role}_token": data[f"tokenizer.ggml.{key}_token_id"]
        for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if f"tokenizer.ggml.{key}_token_id" in data
    }
    for role, i in ids.items():
        _check_id(path, role, i, len(tokens))
    special = {role: tokens[i] for role, i in ids.items()}
    if data.get("tokenizer.ggml.add_bos_token") and "bos_token" in ids:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids["bos_token"])]
        )
    stop_tokens = gguf_stop_tokens(path, data)
    template = data.get("tokenizer.chat_template")
    return Tokenizer(backend, stop_tokens=stop_tokens, chat_template=template, special=special, source=str(path))


def gguf_stop_tokens(path: Path, data: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text, a turn (eot) or a message (eom), each once. All of them end an answer."""
    keys = {key: f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")}
    ids = {f"{key}_token": data[name] for key, name in keys.items() if name in data}
    for role, i in ids.items():
        _check_id(path, role, i, len(data["tokenizer.ggml.tokens"]))
    return tuple(dict.fromkeys(ids.values()))


def _check_id(path: Path, role: str, i: Any, count: int) -> None:
    if type(i) is not int or not 0 <= i < count:
        raise ValueError(f"{path}: the {role}_id is {excerpt(repr(i))}, wants an int below {count}")


def _pre_tokenizer(path: Path, pre: str) -> Any:
    """The rule that splits text before the merges, by tokenizer.ggml.pre (llama.cpp's names)."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if pre == "smollm":  # SmolLM2 was trained on single digits
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre == "qwen2":
        return Sequence([Split(Regex(_QWEN2_SPLIT), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ValueError(f"{path}: tokenizer.ggml.pre is {pre!r}; known are {_KNOWN_PRE}")
