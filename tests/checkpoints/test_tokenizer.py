"""Tokenizers against those of transformers, from the GGUF file and from a saved directory."""

import base64
import json
import re
import sys
import tomllib
import unicodedata
from pathlib import Path

import gguf_vocabularies
import pytest
from attnpack.checkpoints.build import load_tokenizer, smollm2_path
from attnpack.checkpoints.chat_template import OLDEST_JINJA, render_chat
from fuzz import lies
from transformers import AutoTokenizer, Qwen2Tokenizer

TEXTS = [
    "",
    "Hello, world! It's 7 o'clock; we've 1,234.5 reasons.",
    "Grüße, 你好, привет, \u0645\u0631\u062d\u0628\u0627 e\u0301",
    "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "def f(x):\n\treturn {'a': x ** 2}  # \u03c0\n\n\nprint(f(3))\r\n",
    "   leading and trailing   \n \n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "tabs\t\tand\u00a0odd\u2003spaces",
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(smollm2_path())


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(text, tokenizer, smollm2_tokenizer_hf):
    assert tokenizer.encode(text) == smollm2_tokenizer_hf(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_digits_stand_alone_as_in_training(tokenizer, smollm2_tokenizer_hf, topics_text):
    """transformers ignores the file's tokenizer.ggml.pre, `smollm`, which first splits off each digit, then takes
    GPT-2's rule."""
    hf = smollm2_tokenizer_hf
    text = topics_text + " \u00bd\u00b2  \u0663"
    numbers = "".join({c for c in text if unicodedata.category(c).startswith("N")})
    pieces = re.split(f"([{numbers}])", text)
    assert tokenizer.encode(text) == [i for piece in pieces if piece for i in hf(piece).input_ids]
    assert tokenizer.encode("a  1") != hf("a  1").input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_text(tokenizer):
    assert tokenizer.decode(tokenizer.encode("<|im_start|>user\nHi<|im_end|>")) == "user\nHi"
    assert tokenizer.stop_tokens == (2, 0, 4)  # <|im_end|>, and by their texts <|endoftext|> and <reponame>
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize("jinja", [True, False])
def test_chat_equals_transformers(jinja, tokenizer, smollm2_tokenizer_hf, monkeypatch):
    if not jinja:
        monkeypatch.setitem(sys.modules, "jinja2", None)
    prompt = "Why is {{ 1 }} <b>so</b>\nlonely?\n"
    messages = [{"role": "user", "content": prompt}]
    expected = smollm2_tokenizer_hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert tokenizer.chat(prompt) == expected["input_ids"]


@pytest.mark.parametrize(("version", "fits"), [("3.1.5", False), ("2.11.3", False), ("3.1.6", True), ("3.10.0", True)])
def test_a_jinja_whose_sandbox_leaks_is_not_used(version, fits, monkeypatch):
    """transformers demands the same version."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    if fits:
        assert render_chat("model", "{{ 1 + 1 }}") == "2"
        return
    with pytest.raises(ImportError, match=f"need jinja2 3.1.6 or later, found {version}; run `pip install 'jinja2>="):
        render_chat("model", "{{ 1 + 1 }}")


def test_a_template_that_needs_jinja_says_how_to_get_it(smollm2_tokenizer_hf, tmp_path, monkeypatch):
    smollm2_tokenizer_hf.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ValueError, match="template is not ChatML, and .* found none; run `pip install 'jinja2>=3.1.6'`"
    ):
        load_tokenizer(tmp_path).chat_text("Hi")


def test_the_extra_demands_the_jinja_that_the_code_does():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"jinja2>={OLDEST_JINJA}" in extras["optional-dependencies"]["tokenizers"]


def test_stream_gives_whole_characters(tokenizer):
    text = "na\u00efve \U0001f469\u200d\U0001f467 \u4f60\u597d!"
    pieces = []
    step = tokenizer.stream(pieces.append)
    for token in tokenizer.encode(text):
        step(token)
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)


def test_directory(tmp_path, smollm2_tokenizer_hf):
    hf = smollm2_tokenizer_hf
    hf.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == hf(text).input_ids
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.chat_text("Hi") == hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.stop_tokens == (2,)


@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_padding_and_truncation_are_for_batches(direction, tmp_path, smollm2_tokenizer_hf):
    """transformers leaves padding and truncation out of a plain call, whatever tokenizer.json says."""
    smollm2_tokenizer_hf.save_pretrained(tmp_path)
    padding = {"strategy": {"Fixed": 20}, "direction": direction, "pad_to_multiple_of": 8}
    truncation = {"max_length": 3, "strategy": "LongestFirst", "direction": direction, "stride": 0}
    padding |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|im_end|>"}
    edit_json(tmp_path / "tokenizer.json", padding=padding, truncation=truncation)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids == smollm2_tokenizer_hf(text).input_ids


def edit_json(path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_vocabulary(path, tokens, merges, **values):
    types = [3 if token.startswith("<|") else 1 for token in tokens]
    usual = {"model": "gpt2", "pre": "qwen2", "token_type": types, "bos_token_id": 0, "add_bos_token": False}
    return gguf_vocabularies.write_vocabulary(path, tokens, **{"arch": "qwen2"} | usual | {"merges": merges} | values)


@pytest.fixture(scope="module")
def vocabulary():
    """SmolLM2's tokens and merges."""
    from attnpack.checkpoints.gguf_file import GgufFile

    data = GgufFile(smollm2_path()).metadata
    return data["tokenizer.ggml.tokens"], data["tokenizer.ggml.merges"]


def test_qwen2_rule_equals_transformers(vocabulary, tmp_path):
    tokens, merges = vocabulary
    ours = load_tokenizer(write_vocabulary(tmp_path / "q.gguf", tokens, merges))
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        additional_special_tokens=[token for token in tokens if token.startswith("<|")],
    )
    for text in [*TEXTS, "a  1\n\n  22 It'S"]:
        assert ours.encode(text) == theirs(text).input_ids


@pytest.mark.parametrize(
    ("arch", "pre"), [("qwen2", "qwen2"), ("qwen3", "qwen2"), ("qwen3moe", "qwen2"), ("gpt2", "gpt-2"), ("llama", None)]
)
def test_a_file_without_a_rule_has_that_of_its_architecture(arch, pre, vocabulary, tmp_path):
    """The rule of qwen2 is compared with transformers above, that of gpt-2 with the digits below."""
    path = write_vocabulary(tmp_path / "a.gguf", *vocabulary, arch=arch, pre=None)
    if pre is None:
        words = "a.gguf: has no tokenizer.ggml.pre, and its architecture 'llama' does not say how text is split: "
        with pytest.raises(ValueError, match=words):
            load_tokenizer(path)
        return
    unnamed, named = map(load_tokenizer, (path, write_vocabulary(tmp_path / "b.gguf", *vocabulary, pre=pre)))
    for text in [*TEXTS, "123", "wait!\n\nok", "e\u0301"]:
        assert unnamed.encode(text) == named.encode(text)


@pytest.mark.parametrize(
    ("ids", "stops"),
    [({}, ()), ({"eos": 2}, (2,)), ({"eos": 2, "eot": 2}, (2,)), ({"eot": 4, "eos": 2, "eom": 3}, (2, 4, 3))],
)
def test_the_ends_of_a_turn_and_of_a_message_stop_too(ids, stops, tmp_path):
    ids = {f"{key}_token_id": token for key, token in ids.items()}
    file = write_vocabulary(tmp_path / "a.gguf", ["<|bos|>", "1", "2", "12", "3"], ["1 2"], **ids)
    assert load_tokenizer(file).stop_tokens == stops


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_a_stop_token_that_the_vocabulary_lacks(key, tmp_path):
    file = write_vocabulary(tmp_path / "a.gguf", ["<|bos|>", "1", "2", "12"], ["1 2"], **{f"{key}_token_id": 4})
    with pytest.raises(ValueError, match=f"a.gguf: the {key}_token_id is 4, wants an int below 4"):
        load_tokenizer(file)


def test_bos_is_added_where_the_file_asks_for_it(vocabulary, tmp_path):
    tokens, merges = vocabulary
    plain = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", tokens, merges)).encode("Hi there")
    begun = load_tokenizer(write_vocabulary(tmp_path / "b.gguf", tokens, merges, add_bos_token=True))
    assert begun.encode("Hi there") == [0, *plain]


def test_a_chat_has_the_beginning_that_its_template_writes_and_no_second_one(vocabulary, tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", *vocabulary, add_bos_token=True))
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert tokenizer.chat("Hi there") == tokenizer.encode("Hi there")


@pytest.mark.parametrize(("pre", "ids"), [("smollm", [1, 2]), ("gpt-2", [3])])
def test_digits_stand_alone_though_the_vocabulary_joins_them(pre, ids, tmp_path):
    file = write_vocabulary(tmp_path / "a.gguf", ["<|bos|>", "1", "2", "12"], ["1 2"], pre=pre)
    assert load_tokenizer(file).encode("12") == ids


def test_what_holds_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        load_tokenizer(tmp_path / "none.gguf")


def test_chat_without_template(vocabulary, tmp_path):
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", *vocabulary))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat("Hi")


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        load_tokenizer(smollm2_path())


# ---- refused tokenizers --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{", "tokenizer.json: cannot be read (Cannot instantiate Tokenizer from buffer: EOF"),
        ("tokenizer.json", b"\xff", "tokenizer.json: cannot be read (Cannot instantiate"),
        ("tokenizer.json", b"[" + b"[]," * 3_000_000 + b"1]", "tokenizer.json: cannot be read (it has more than"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: holds a list"),
        ("tokenizer_config.json", b'{"bos_token": {}}', "its tokenizer cannot be read (KeyError: 'content')"),
        ("tokenizer_config.json", b'{"bos_token": [1]}', "its bos_token is [1], wants a text"),
        ("tokenizer_config.json", b'{"chat_template": {"a": 1}}', "its chat template is {'a': 1}, wants a text"),
        ("tokenizer_config.json", b'{"eos_token_id": [2, "x"]}', "eos_token_id is 'x', wants an int"),
        ("generation_config.json", b'{"a": 1, "a": 2}', "generation_config.json: cannot be read as JSON (a is"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read ('utf-8' codec"),
        ("chat_template.jinja", b"a" * 1_000_001, "chat_template.jinja: cannot be read (it has more than 1000000"),
    ],
    ids=lambda value: value[:20],
)
def test_an_error_names_the_file(name, content, words, tmp_path):
    lies.write(lies.whole_hf(False) | {name: content}, tmp_path / "model")
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path / "model")
    assert str(caught.value).startswith(f"{tmp_path / 'model'}") and words in str(caught.value)


def test_a_vocabulary_that_is_not_whole(vocabulary, tmp_path):
    tokens, _ = vocabulary
    path = write_vocabulary(tmp_path / "a.gguf", tokens[:10], None)
    with pytest.raises(ValueError, match=r"a.gguf: has no tokenizer.ggml.merges, wants a list of texts"):
        load_tokenizer(path)
    path = write_vocabulary(tmp_path / "b.gguf", tokens[:10], ["a b"])
    with pytest.raises(ValueError, match=r"b.gguf: merges 'a b', which gives no token"):
        load_tokenizer(path)


def byte_level(model: dict | None = None, **parts) -> dict[str, bytes]:
    """The tiny checkpoint with another model or other parts in its tokenizer.json."""
    files = lies.whole_hf(False)
    value = json.loads(files["tokenizer.json"]) | parts
    if model:
        value |= {"model": model, "pre_tokenizer": None}
    return files | {"tokenizer.json": json.dumps(value).encode()}


CHARSMAP = base64.b64encode(b"\x08\0\0\0" + 8 * b"\xff").decode()
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "^(a+)+$(?=b)"}, "behavior": "Isolated", "invert": False}
WORDPIECE = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": {"b": 0}}
UNIGRAM = {"type": "Unigram", "unk_id": None, "vocab": [["b", -1.0]], "byte_fallback": False}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (byte_level(normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}), "PanicException"),
        (byte_level(pre_tokenizer=BACKTRACKING), "PanicException"),
        (byte_level(WORDPIECE | {"max_input_chars_per_word": 100}), "Missing [UNK] token"),
        (byte_level(UNIGRAM), "unk_id"),
    ],
    ids=["normalizer", "pre_tokenizer", "wordpiece", "unigram"],
)
def test_rules_that_fail_on_a_text_name_the_file(files, words, tmp_path):
    """The package finds the error only in a text; its panics are no subclass of Exception."""
    tokenizer = load_tokenizer(lies.write(files, tmp_path / "model"))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    for encode in (tokenizer.encode, tokenizer.chat):
        with pytest.raises(ValueError) as caught:
            encode("a" * 40)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / 'model' / 'tokenizer.json'}: cannot encode the text ("), message
        assert words in message and "\n" not in message, message


def replacing(pattern, content, times):
    rule = {"type": "Replace", "pattern": pattern, "content": content}
    return [rule] * times


def test_replacements_that_make_a_text_too_long_are_refused(tmp_path):
    """Six of these would make a character 10**12 characters, and the package ends the process."""
    for n, (rules, refused) in enumerate(
        [
            (replacing({"String": "a"}, "a" * 100, 6), "1000000000000 times"),
            (replacing({"Regex": ""}, "a" * 9, 3), "1000 times"),
            (replacing({"String": "aa"}, "a" * 100, 1), None),
            (replacing({"String": "a"}, "", 9), None),
        ]
    ):
        for kind in ("normalizer", "decoder"):
            files = byte_level(**{kind: {"type": "Sequence", f"{kind}s": rules}})
            path = lies.write(files, tmp_path / f"{kind}{n}")
            if refused is None:
                load_tokenizer(path)
                continue
            with pytest.raises(ValueError) as caught:
                load_tokenizer(path)
            assert str(path / "tokenizer.json") in str(caught.value)
            assert f"its {kind} makes a text up to {refused} as long" in str(caught.value)


def template(pieces, ids):
    """A post-processor of `pieces` times the text's tokens and once `ids` special ones."""
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * pieces + [{"SpecialToken": {"id": "s", "type_id": 0}}]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {"s": {"id": "s", "ids": [0] * ids, "tokens": ["b"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


@pytest.mark.parametrize(
    ("kind", "rules", "refused"),
    [
        ("normalizer", [{"type": "Prepend", "prepend": "a" * 6_000}] * 2, "adds 12000 characters"),
        ("normalizer", [{"type": "Prepend", "prepend": "\u2581"}] * 2, None),
        ("post_processor", [template(101, 1)], "makes a text up to 101 times as long"),
        ("post_processor", [template(11, 1)] * 2, "makes a text up to 121 times as long"),
        ("post_processor", [template(1, 6_000)] * 2, "adds 12000 characters or tokens"),
        ("post_processor", [template(2, 1)], None),
    ],
)
def test_rules_that_add_too_much_are_refused(kind, rules, refused, tmp_path):
    """90 MB of prefixes took 2.9 GB, and a template of 10,000 texts took 1.6 GB for 1,000 words."""
    parts = {"normalizer": "normalizers", "post_processor": "processors"}[kind]
    path = lies.write(byte_level(**{kind: {"type": "Sequence", parts: rules}}), tmp_path / "model")
    if refused is None:
        load_tokenizer(path).encode("b")
        return
    with pytest.raises(ValueError) as caught:
        load_tokenizer(path)
    assert str(path / "tokenizer.json") in str(caught.value)
    assert f"its {kind} {refused}" in str(caught.value)


class Failing:
    """A decoder in Python, because no file is known whose decoder fails."""

    def decode_chain(self, tokens):
        raise RuntimeError("no such token")


def test_a_decoder_that_fails_names_the_file(tmp_path):
    from tokenizers.decoders import Decoder

    tokenizer = load_tokenizer(lies.write(lies.whole_hf(False), tmp_path / "model"))
    tokenizer.backend.decoder = Decoder.custom(Failing())
    for decode in (lambda: tokenizer.decode([0]), lambda: tokenizer.stream(print)(0)):
        with pytest.raises(ValueError, match="tokenizer.json: cannot decode the ids? .*no such token"):
            decode()


def test_what_a_caller_writes_to_fails_as_it_likes(tokenizer):
    def write(text):
        raise OSError("the pipe is closed")

    with pytest.raises(OSError, match="^the pipe is closed$"):
        tokenizer.stream(write)(tokenizer.encode("Hello")[0])


def test_arguments_of_the_wrong_kind(tokenizer):
    with pytest.raises(TypeError, match=r"^attnpack: text is 3 \(int\), wants a str"):
        tokenizer.encode(3)
    with pytest.raises(ValueError, match=r"^attnpack: text has '\\ud800' at 2, which is half a character"):
        tokenizer.encode("ab\ud800")
    for decode in (lambda i: tokenizer.decode([0, i]), tokenizer.stream(print)):
        for token in (-1, 2**32):
            with pytest.raises(ValueError, match=f"^attnpack: a token id is {token}, wants 0 to 4294967295"):
                decode(token)
