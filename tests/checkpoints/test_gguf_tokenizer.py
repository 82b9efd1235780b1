"""Tokenizers of GGUF files: SentencePiece's BPE against its rule in slow code, special tokens, stops, refusals."""

import random

import pytest
from attnpack.checkpoints import load_tokenizer
from attnpack.checkpoints.gguf_stops import ENDS
from gguf_vocabularies import BYTES, write_vocabulary
from tokenizers.pre_tokenizers import ByteLevel

ALPHABET = sorted(ByteLevel.alphabet())
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
FIRST = ["<unk>", "<s>", "</s>", "<user>"]
TYPES = [UNKNOWN, CONTROL, CONTROL, USER, *[BYTE] * 256]


# ---- the rules, written down slowly --------------------------------------------------


def join_best(parts: list[str], rank) -> list[str]:
    """Joins the leftmost of the pairs with the least rank, again and again; `rank` gives None for what cannot join."""
    while True:
        ranks = {i: rank(*parts[i : i + 2]) for i in range(len(parts) - 1)}
        ranks = {i: found for i, found in ranks.items() if found is not None}
        if not ranks:
            return parts
        i = min(ranks, key=lambda i: (ranks[i], i))
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


def ids_of(text: str, tokens: list[str], rank, prefix: bool) -> list[int]:
    """Special tokens are found first; each text between them begins with a space."""
    if not text:
        return []
    for special in FIRST:
        if special in text:
            left, right = text.split(special, 1)
            return [*ids_of(left, tokens, rank, prefix), tokens.index(special), *ids_of(right, tokens, rank, prefix)]
    found = []
    for part in join_best(list((" " * prefix + text).replace(" ", "\u2581")), rank):
        letters = [part] if part in tokens else [f"<0x{byte:02X}>" for byte in part.encode()]
        found += [tokens.index(each) for each in letters]
    return found


def drawn_tokens(draw: random.Random) -> list[str]:
    """Letters, and tokens of two others, of which some can be made in several ways, and some in none."""
    tokens = list("ab\u2581\n.")
    for _ in range(40):
        token = draw.choice(tokens) + draw.choice(tokens)
        token = token if draw.random() < 0.9 else "".join(draw.choices("ab\u2581", k=draw.randrange(2, 6)))
        if token not in tokens:
            tokens.append(token)
    return tokens


def drawn_texts(draw: random.Random) -> list[str]:
    letters = ["a", "b", "a", "b", " ", " ", "\n", ".", "\u00e9", "\u4f60", "\U0001f642", *FIRST]
    return ["", " ", *["".join(draw.choices(letters, k=draw.randrange(1, 30))) for _ in range(60)]]


@pytest.mark.parametrize("prefix", [None, True, False])
@pytest.mark.parametrize("seed", range(4))
def test_sentencepiece(seed, prefix, tmp_path):
    draw = random.Random(seed)
    drawn = drawn_tokens(draw)
    tokens = [*FIRST, *BYTES, *drawn]
    scores = [0.0] * 260 + [float(score) for score in draw.sample(range(-1000, 0), len(drawn))]
    values = {"model": "llama", "scores": scores, "token_type": TYPES + [NORMAL] * len(drawn)}
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", tokens, add_space_prefix=prefix, **values))

    def rank(left, right):
        return -scores[tokens.index(left + right)] if left + right in tokens else None

    begins = prefix is not False
    for text in drawn_texts(draw):
        ids = tokenizer.encode(text)
        assert ids == [1, *ids_of(text, tokens, rank, begins)], text
        if not any(special in text for special in FIRST):
            assert tokenizer.decode(ids) == text


def test_gemma4_merges_on_the_text_itself(tmp_path):
    draw = random.Random(0)
    drawn = drawn_tokens(draw)
    tokens = [*FIRST, *BYTES, *drawn]
    pairs = [(token[:i], token[i:]) for token in drawn for i in range(1, len(token))]
    pairs = [pair for pair in pairs if set(pair) <= set(drawn)]
    draw.shuffle(pairs)  # some cannot be reached, and some tokens are made late
    values = {"model": "gemma4", "merges": [" ".join(pair) for pair in pairs], "bos_token_id": 1}
    values |= {"token_type": TYPES + [NORMAL] * len(drawn), "add_bos_token": False}  # which no model of Gemma means
    path = write_vocabulary(tmp_path / "a.gguf", tokens, **values)
    tokenizer = load_tokenizer(path)

    def rank(*pair):
        return pairs.index(pair) if pair in pairs else None

    for text in drawn_texts(draw):
        ids = tokenizer.encode(text)
        assert ids == [1, *ids_of(text, tokens, rank, False)], text
        if not any(special in text for special in FIRST):
            assert tokenizer.decode(ids) == text


def sentencepiece(path, more=(), **values):
    """A vocabulary with the scores of a trained one: the earlier, the better."""
    tokens = [*FIRST, *BYTES, "\u2581", "a", "b", "\u2581a", *more]
    values = {"model": "llama", "token_type": TYPES + [NORMAL] * (len(tokens) - 260)} | values
    return write_vocabulary(path, tokens, **{"scores": [float(-i) for i in range(len(tokens))]} | values)


def test_what_a_file_of_sentencepiece_need_not_say(tmp_path):
    """Its special tokens, that a text begins with BOS and with a space, and that an answer ends with EOS."""
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "a.gguf"))
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("a") == [1, 263] and tokenizer.encode("") == [1] and tokenizer.stop_tokens == (2,)
    plain = {"add_bos_token": False, "add_eos_token": True, "eos_token_id": 3, "add_space_prefix": False}
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "b.gguf", **plain))
    assert tokenizer.encode("a") == [261, 3] and tokenizer.stop_tokens == (3, 2)


def test_stream_of_bytes_and_spaces(tmp_path):
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "a.gguf"))
    text, pieces = "ab \u4f60\U0001f642  a", []
    step = tokenizer.stream(pieces.append)
    for token in tokenizer.encode(text):
        step(token)
    assert "".join(pieces) == text and len(pieces) > 5 and "\ufffd" not in "".join(pieces)


def test_letters_without_bytes_are_unknown(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a"]
    values = {"model": "llama", "scores": [0.0] * 5, "token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL]}
    assert load_tokenizer(write_vocabulary(tmp_path / "a.gguf", tokens, **values)).encode("a\u4f60a") == [1, 3, 4, 0, 4]


def test_tokens_without_text(tmp_path):
    """llama.cpp gives them names of its own; here no text is one of them."""
    types = TYPES + [NORMAL] * 6
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "a.gguf", ["", ""], token_type=types))
    assert tokenizer.encode("a") == [1, 263] and tokenizer.decode([261, 264, 265, 262]) == "ab"


@pytest.mark.parametrize(("name", "strips"), [("Phi3", True), ("Phi 3 mini", False), ("my-Phi-3-mini", True)])
def test_tokens_of_phi3_take_the_spaces_behind_them(name, strips, tmp_path):
    """By the model's name, as in llama.cpp: nothing else in a file says so."""
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "a.gguf", name=name, add_space_prefix=False))
    assert tokenizer.encode("<user> \n a") == ([1, 3, 261] if strips else [1, 3, 260, 4 + 10, 263])
    assert tokenizer.encode("<s> a") == [1, 1, 263]


# ---- special tokens ------------------------------------------------------------------


def byte_level(path, more, types=None, **values):
    tokens = [*ALPHABET, "ab", *more]
    kinds = None if types is None else [NORMAL] * 257 + types
    return write_vocabulary(path, tokens, model="gpt2", pre="gpt-2", merges=["a b"], token_type=kinds, **values)


@pytest.mark.parametrize(
    ("type", "found", "special"),
    [(CONTROL, True, True), (UNKNOWN, True, True), (USER, True, False), (NORMAL, False, False), (UNUSED, False, False)],
)
def test_types_of_tokens(type, found, special, tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path / "a.gguf", ["<a b>"], [type]))
    assert (tokenizer.encode("x<a b>ab")[1:] == [257, 256]) == found
    assert tokenizer.decode([ALPHABET.index("x"), 257, 256]) == ("xab" if special else "x<a b>ab")


def stops(folder, texts, **values):
    tokenizer = load_tokenizer(byte_level(folder / "a.gguf", texts, **values))
    return [tokenizer.backend.id_to_token(token) for token in tokenizer.stop_tokens]


def test_ends_by_their_texts(tmp_path):
    """llama.cpp's list, without a key of the file."""
    alone = sorted(ENDS - {"<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|tool_response>"})
    assert len(ENDS) == 22 and stops(tmp_path, ["<x>", *alone]) == alone
    assert stops(tmp_path, ["<|im_end|>", "<x>", "</s>"], eos_token_id=258) == ["<x>", "<|im_end|>", "</s>"]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        ("<|return|> <|call|> <|end|>", "<|return|> <|call|>"),  # gpt-oss goes on after a part of its answer
        ("<|flush|> <|calls|> <|end|>", "<|flush|> <|calls|>"),
        ("<|call|> <|end|>", "<|call|> <|end|>"),
        ("<|tool_response> </s>", "<|tool_response>"),  # Gemma 4
        ("<fim_pad> <|repo_name|> <|file_sep|> <|fim_middle|>", "<fim_pad> <|repo_name|> <|file_sep|>"),
    ],
)
def test_ends_that_depend_on_others(texts, ends, tmp_path):
    assert stops(tmp_path, texts.split()) == ends.split()


def test_a_key_names_the_end_of_a_file_in_code(tmp_path):
    assert stops(tmp_path, ["<x>", "<fim_pad>"], fim_pad_token_id=257) == ["<x>"]


def test_an_end_is_special_whatever_its_type(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path / "a.gguf", ["<|im_end|>", "<x>"], [NORMAL, NORMAL]))
    assert tokenizer.encode("ab<|im_end|>") == [256, 257] and tokenizer.decode([256, 257]) == "ab"


# ---- refused -------------------------------------------------------------------------

SCORES = [0.0] * 264
KNOWN = r"known are gpt2 \(byte-level BPE\), llama \(SentencePiece's BPE\) and gemma4"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "t5"}, f"tokenizer.ggml.model is 't5'; {KNOWN}: use a checkpoint with a tokenizer.json"),
        ({"model": "bert"}, f"tokenizer.ggml.model is 'bert'; {KNOWN}"),
        ({"model": [1]}, f"tokenizer.ggml.model is \\[1\\]; {KNOWN}"),
        ({"scores": None}, "has no tokenizer.ggml.scores, wants a list of 264 numbers, as many as tokens"),
        ({"scores": SCORES[1:]}, "tokenizer.ggml.scores has 263 values, wants a list of 264 numbers"),
        ({"scores": ["a"] * 264}, "tokenizer.ggml.scores has 'a', wants a list of 264 numbers"),
        ({"scores": [*SCORES[1:], float("nan")]}, "the score of token 263 is nan, wants a number"),
        ({"token_type": [1] * 3}, "tokenizer.ggml.token_type has 3 values, wants a list of 264 ints"),
        ({"token_type": 3}, "tokenizer.ggml.token_type is 3, wants a list of 264 ints"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, wants True or False"),
        ({"add_space_prefix": "no"}, "tokenizer.ggml.add_space_prefix is 'no', wants True or False"),
        ({"bos_token_id": 264}, "the bos_token_id is 264, wants an int below 264"),
        ({"eot_token_id": True}, "the eot_token_id is True, wants an int below 264"),
        ({"model": "gemma4"}, "has no tokenizer.ggml.merges, wants a list of texts"),
        ({"model": "gemma4", "merges": ["a b"]}, "merges 'a b', which gives no token"),
        ({"model": "gemma4", "merges": ["ab"]}, "merges 'ab', which gives no token"),
        ({"model": "gpt2", "pre": "jina-v2-de", "merges": ["\u2581 a"]}, "tokenizer.ggml.pre is 'jina-v2-de'; known"),
        ({"model": "gpt2", "pre": 3, "merges": ["\u2581 a"]}, "tokenizer.ggml.pre is 3; known are a.x-4.0, bail"),
    ],
)
def test_what_a_file_lacks_or_lies_about(values, words, tmp_path):
    with pytest.raises(ValueError, match=f"a.gguf: {words}"):
        load_tokenizer(sentencepiece(tmp_path / "a.gguf", **values))


@pytest.mark.parametrize(
    ("tokens", "scores", "words"),
    [
        (["<unk>", "a", "b", "a"], 4, "tokens 1 and 3 of tokenizer.ggml.tokens are both 'a'"),
        (["a", "b" * 8000], 2, "squares of the lengths of its tokens add up to 64000001, wants at most 50000000"),
    ],
)
def test_tokens_that_cost_too_much_or_are_twice(tokens, scores, words, tmp_path):
    path = write_vocabulary(tmp_path / "a.gguf", tokens, model="llama", scores=[0.0] * scores)
    with pytest.raises(ValueError, match=f"a.gguf: .*{words}"):
        load_tokenizer(path)


def test_a_vocabulary_that_loses_letters(tmp_path):
    path = write_vocabulary(tmp_path / "a.gguf", BYTES[1:], model="gemma4", merges=["<0x01> <0x02>"])
    with pytest.raises(ValueError, match="a.gguf: merges"):
        load_tokenizer(path)
    path = write_vocabulary(tmp_path / "b.gguf", ["a", "ab", "b", *BYTES[1:]], model="gemma4", merges=["a b"])
    with pytest.raises(ValueError, match="b.gguf: has neither the token <0x00> nor tokenizer.ggml.unknown_token_id"):
        load_tokenizer(path)


def test_tokens_that_are_made_in_too_many_ways(tmp_path, monkeypatch):
    monkeypatch.setattr("attnpack.checkpoints.gguf_tokenizer._MOST_MERGES", 9)
    more = ["c" * i for i in range(1, 5)]
    assert load_tokenizer(sentencepiece(tmp_path / "a.gguf", more)).encode("cccc") == [1, 260, 267]
    with pytest.raises(ValueError, match="a.gguf: its tokens can be made of two others in more than 9 ways"):
        load_tokenizer(sentencepiece(tmp_path / "a.gguf", [*more, "c" * 5]))
