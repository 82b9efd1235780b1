"""Tokens that a directory's other files add to its tokenizer.json, against transformers."""

import json

import pytest
from attnpack.checkpoints import load_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer


def added(content, **rules):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | rules


# The files beside a byte-level tokenizer.json of 256 tokens, or of 257 with <s>.
BESIDE = {
    "decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "257": added("<b>", rstrip=True, special=True),
                "256": added("<tool>", special=False),
            },
        }
    },
    "decoder and names": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"256": added("<tool>", special=False)},
            "eos_token": "<tool>",
            "pad_token": "[PAD]",
            "image_token": "<img>",
            "additional_special_tokens": ["<x>", "<tool>"],
        },
        "added_tokens.json": {"<not read>": 256},
    },
    "other rules": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"256": added("<s>", lstrip=True, special=False)},
            "bos_token": "<s>",
        }
    },
    "added_tokens.json": {"added_tokens.json": {"<tool>": 256, "<b>": 257}, "tokenizer_config.json": {}},
    "special_tokens_map.json": {
        "tokenizer_config.json": {"bos_token": "<b>", "extra_special_tokens": {"foo_token": "<foo>"}},
        "special_tokens_map.json": {"bos_token": added("<s>", lstrip=True), "eos_token": "<tool>"},
        "added_tokens.json": {"<tool>": 257, "<s>": 256},
    },
    "nothing": {},
}


def byte_level_directory(path, files, *tokens):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(tokens))
    files = {"config.json": {}, "tokenizer_config.json": {}} | files
    files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | files["tokenizer_config.json"]
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    (path / "tokenizer.json").write_text(backend.to_str())
    return path


@pytest.mark.parametrize("name", BESIDE)
def test_tokens_that_other_files_add_are_those_of_transformers(name, tmp_path):
    beside = byte_level_directory(tmp_path, BESIDE[name], *(["<s>"] if "rules" in name or "map" in name else []))
    ours, theirs = load_tokenizer(beside), AutoTokenizer.from_pretrained(beside)
    for text in ("a<tool>b", "x <b>  <s> [PAD]<img><x>", "<foo>bar</s> <not read>"):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special == theirs.special_tokens_map
    assert ours.stop_tokens == (() if theirs.eos_token is None else (theirs.eos_token_id,))


def test_a_token_with_an_id_by_hand(tmp_path):
    beside = byte_level_directory(tmp_path, {"added_tokens.json": {"<tool>": 256}})
    letter = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    assert load_tokenizer(beside).encode("a<tool>b") == [letter["a"], 256, letter["b"]]


def test_a_special_token_may_have_any_name(tmp_path):
    names = {"template": "<a>", "source": "<b>", "messages": "<c>", "self": "<d>"}
    beside = byte_level_directory(tmp_path, {"tokenizer_config.json": {"extra_special_tokens": names}})
    tokenizer = load_tokenizer(beside)
    tokenizer.chat_template = "{{ template }}{{ source }}{{ messages[0].content }}"
    assert tokenizer.chat_text("hi") == "<a><b>hi"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"300": added("<tool>")}}},
            "tokenizer_config.json: gives the token '<tool>' the id 300, but after those of tokenizer.json it gets 256",
        ),
        ({"added_tokens.json": {"a": 256}}, "added_tokens.json: gives the token 'a' the id 256, but after those of "),
        ({"added_tokens.json": {"": 256}}, "added_tokens.json: gives the token '' the id 256, but after those of "),
        ({"added_tokens.json": {"a": "x"}}, "added_tokens.json: cannot be read (invalid literal for int()"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"256": {"a": 1}}}},
            "tokenizer_config.json: cannot be read (KeyError: 'content')",
        ),
        (
            {"tokenizer_config.json": {"additional_special_tokens": [1]}},
            ": its extra_special_tokens is 1, wants a text",
        ),
        ({"special_tokens_map.json": {"eos_token": 5}}, ": its eos_token is 5, wants a text"),
    ],
    ids=str,
)
def test_added_tokens_that_do_not_fit(files, words, tmp_path):
    with pytest.raises(ValueError) as caught:
        load_tokenizer(byte_level_directory(tmp_path, files))
    assert str(caught.value).startswith(str(tmp_path)) and words in str(caught.value)
