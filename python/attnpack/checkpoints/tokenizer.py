"""Text to token ids and back, for Hugging Face directories and GGUF files, on the package `tokenizers`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..errors import as_path, wrong_kind
from ..file_errors import excerpt, naming
from .added_tokens import add_tokens
from .chat_template import LONGEST_TEMPLATE, render_chat
from .gguf_tokenizer import read_gguf_tokenizer
from .strict_json import LONGEST, check_values, read_bounded, read_json

# The system message of SmolLM2's own chat template (tokenizer.chat_template in its GGUF file).
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_MOST_GROWTH = 100  # times that a file's rules may make a text longer
_MOST_ADDED = 10_000  # characters or tokens that they may add to any text


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


def load_tokenizer(path: str | bytes | os.PathLike) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (tokenizer.json) or of a GGUF file.

    Of GGUF files it reads byte-level BPE (`tokenizer.ggml.model` "gpt2") with the rules by which Llama 3, Qwen,
    gpt-oss, DeepSeek, Mistral, Granite and others split text, SentencePiece's BPE ("llama": Llama 2, Mistral, Phi-3,
    Gemma 1 to 3) and "gemma4". Raises ImportError without the package `tokenizers`, ValueError for a vocabulary of
    another kind or a missing file.
    """
    path = as_path("path", path)
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{path}: reading its tokenizer needs tokenizers; run `pip install tokenizers`") from error
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory; give a Hugging Face directory or a GGUF file")
    with naming(path, "its tokenizer cannot be read", "get the checkpoint again"):
        tokenizer = _from_directory(path) if path.is_dir() else Tokenizer(**read_gguf_tokenizer(path), source=str(path))
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
