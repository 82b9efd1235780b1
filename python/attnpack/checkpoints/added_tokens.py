"""The special tokens of a Hugging Face directory, and the tokens that other files add to its tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..file_errors import excerpt, naming
from .strict_json import read_json

_USUAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_RULES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_DECODER = "added_tokens_decoder"


def add_tokens(path: Path, backend: Any) -> dict[str, str]:
    """Adds the tokens that the directory's other files name to `backend`, and returns its special tokens by name.

    As in transformers, added_tokens.json and special_tokens_map.json count where tokenizer_config.json has no
    added_tokens_decoder, and new special tokens come after the tokens whose ids the files give.
    """
    config = settings = _read(path / "tokenizer_config.json")
    old = config.get(_DECODER) is None
    if old:
        by_name = _read(path / "special_tokens_map.json")
        settings = by_name | config | {name: by_name[name] for name in _USUAL if name in by_name}
    special = dict(_special_tokens(path, settings))
    names = {str(token) for token in special.values()}
    more = [_token(path, "extra_special_tokens", token) for token in _extra_tokens(settings)]
    source = path / ("added_tokens.json" if old else "tokenizer_config.json")
    with naming(source, "cannot be read", "get the checkpoint again"):
        if old:
            usual = {str(special[name]) for name in _USUAL if name in special}
            listed = {str(_token(path, "extra_special_tokens", token)) for token in _extra_tokens(config)}
            declared = _old_tokens(_read(source), backend, usual | listed)
        else:
            declared = {int(number): _added_token(value) for number, value in config[_DECODER].items()}
        _add_declared(source, backend, declared, names)
    _add_special(backend, [*special.values(), *more])
    return {name: str(token) for name, token in special.items()}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token(path: Path, name: str, value: Any) -> Any:
    text = value["content"] if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{path}: its {name} is {excerpt(repr(text))}, wants a text; get the checkpoint again")
    return _added_token((value if isinstance(value, dict) else {}) | {"content": text, "special": True})


def _added_token(value: dict[str, Any]) -> Any:
    """The package prints a line for a key that it does not know, so it gets none."""
    from tokenizers import AddedToken

    return AddedToken(value["content"], **{rule: value[rule] for rule in _RULES if rule in value})


def _special_tokens(path: Path, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The usual ones first, then those of the model, such as an image_token."""
    for name in _USUAL:
        if settings.get(name) is not None:
            yield name, _token(path, name, settings[name])
    extra = settings.get("extra_special_tokens")
    more = {name: token for name, token in settings.items() if name.endswith("_token")}
    for name, token in {**more, **(extra if isinstance(extra, dict) else {})}.items():
        if name not in _USUAL and (isinstance(token, str) or isinstance(token, dict) and "content" in token):
            yield name, _token(path, name, token)


def _extra_tokens(settings: dict[str, Any]) -> list[Any]:
    lists = (settings.get(f"{kind}_special_tokens") for kind in ("extra", "additional"))
    return next((tokens for tokens in lists if tokens and isinstance(tokens, list)), [])


def _old_tokens(ids: dict[str, Any], backend: Any, special: set[str]) -> dict[int, Any]:
    present = backend.get_added_tokens_decoder()
    texts = {str(token) for token in present.values()}
    return present | {
        int(number): _added_token({"content": text, "special": text in special, "normalized": text not in special})
        for text, number in ids.items()
        if text not in texts
    }


def _add_declared(source: Path, backend: Any, declared: dict[int, Any], special: set[str]) -> None:
    """Adds tokens by their ids, or changes how they are found. The package numbers new ones one after the other,
    whatever the file says."""
    present = {str(token): repr(token) for token in backend.get_added_tokens_decoder().values()}
    for token in declared.values():
        token.special = token.special or str(token) in special
    changed = {n: token for n, token in sorted(declared.items()) if present.get(str(token)) != repr(token)}
    backend.add_tokens(list(changed.values()))
    for number, token in changed.items():
        given = backend.token_to_id(str(token))
        if given != number and str(token) not in present:
            raise ValueError(
                f"{source}: gives the token {excerpt(repr(str(token)))} the id {number}, but after those of "
                f"tokenizer.json it gets {given}; save it again with transformers (tokenizer.save_pretrained)"
            )


def _add_special(backend: Any, tokens: Iterable[Any]) -> None:
    present = {str(token) for token in backend.get_added_tokens_decoder().values()}
    new = {str(token): token for token in tokens if str(token) not in present}
    backend.add_tokens(list(new.values()))
