"""How the rules of tokenizer.ggml.pre split text: against llama.cpp's pieces, and tokenizers of transformers."""

import pytest
from attnpack.checkpoints import load_tokenizer, smollm2_path
from attnpack.checkpoints.gguf_file import GgufFile
from attnpack.checkpoints.gguf_splits import ARCHITECTURE_SPLITS, SPLITS
from gguf_vocabularies import write_vocabulary
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CohereTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

TEXT = (
    "It's DON'T we'dan 1234567 12ab HTTPServer,camelCase x=[1];\n\n  'y'/\n/z $5<=>~|` "
    "\u6f22\u5b57\u304b\u306a\ud55c\uae00 \u0434\u0430\u2014\u2026\u3002\uff01   \r\n \tend \u00bd\n \n  !"
)
# Its pieces, as unicode_regex_split of llama.cpp (commit 0c1e5709) gives them for the name's expressions. Three names
# have camelCase in two, as the models' own expressions do, which llama.cpp quotes: tiny_aya, cohere2moe and kimi-k2.
PIECES = {
    "gpt-2 phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 olmo mpt": (
        "It·'s· DON·'·T· we·'d·an· 1234567· 12·ab· HTTPServer·,·camelCase· x·=[·1·];·\n\n · '·y·'/·\n·/·z· $"
        "·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n ·\t"
        "·end· \xbd·\n \n · !"
    ),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2 command-r": (
        "It·'s· DON·'·T· we·'d·an· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,·camelCase· x·=[·1·];·\n\n · '·y·'/"
        "·\n·/·z· $·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01"
        "·   \r\n ·\t·end· ·\xbd·\n \n · !"
    ),
    "falcon": (
        "It·'·s· DON·'·T· we·'·dan· ·123·456·7· 12·ab· HTTPServer·,·camelCase· x·=[·1·];·\n\n  ·'·y·'/·\n·/·z"
        "· ·$·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n "
        "·\t·end· \xbd·\n \n  ·!"
    ),
    "default": (
        "It·'·s· DON·'·T· we·'·dan· ·123·456·7· ·12·ab· HTTPServer·,·camelCase· x·=[·1·];·\n\n  ·'·y·'/·\n·/"
        "·z· ·$·5·<=>~|·`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01"
        "·   \r\n ·\t·end· ·\xbd·\n \n  ·!"
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5 minicpm5": (
        "It·'s· DON·'T· we·'d·an· ·123·456·7· ·12·ab· HTTPServer·,camelCase· x·=[·1·];\n\n· · '·y·'/\n·/z· $"
        "·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n· "
        "·\tend· ·\xbd·\n \n· · !"
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2 stablelm2 qwen35 bailingmoe bailingmoe2 "
    "llada-moe": (
        "It·'s· DON·'T· we·'d·an· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,camelCase· x·=[·1·];\n\n· · '·y·'/\n"
        "·/z· $·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n"
        "· ·\tend· ·\xbd·\n \n· · !"
    ),
    "laguna": (
        "It·'s· DON·'T· we·'d·an· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,camelCase· x·=[·1·];·\n\n· · '·y·'/·\n"
        "·/z· $·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r"
        "·\n· ·\tend· ·\xbd·\n· ·\n· · !"
    ),
    "ufakzeka": (
        "It·'s· DON·'T· we·'dan· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,camelCase· x·=[·1·];\n\n· · '·y·'/\n·/z"
        "· $·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n· "
        "·\tend· ·\xbd·\n \n· · !"
    ),
    "seed-coder": (
        "It·'s· DON·'T· we·'d·an· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,camelCase· x·=[·1·];·\n\n· · '·y·'/·\n"
        "·/z· $·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n"
        "· ·\tend· ·\xbd·\n \n· · !"
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (
        "It's· DON'T· we'd·an· ·123·456·7· ·12·ab· HTTPServer·,camel·Case· x·=[·1·];\n\n· · '·y·'/\n/·z· $·5"
        "·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n· ·\tend"
        "· ·\xbd·\n \n· · !"
    ),
    "tiny_aya cohere2moe": (
        "It's· DON'T· we'd·an· ·1·234·567· ·12·ab· HTTPServer·,camel·Case· x·=[·1·];\n\n· · '·y·'/\n/·z· $·5"
        "·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n· ·\tend"
        "· ·\xbd·\n \n· · !"
    ),
    "tekken": (
        "It·'s· DON·'T· we·'dan· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,camel·Case· x·=[·1·];\n\n· · '·y·'/\n/"
        "·z· $·5·<=>~|`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n"
        "· ·\tend· ·\xbd·\n \n· · !"
    ),
    "kimi-k2": (
        "It's· DON'T· we'd·an· ·123·456·7· ·12·ab· HTTPServer·,camel·Case· x·=[·1·];\n\n· · '·y·'/\n·/z· $·5"
        "·<=>~|`· ·\u6f22\u5b57·\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n· "
        "·\tend· ·\xbd·\n \n· · !"
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        "It·'s· DON·'T· we·'dan· ·123·456·7· ·12·ab· HTTPServer·,camelCase· x·=[·1·];\n\n· · '·y·'/\n·/z· $·5"
        "·<=>~|`· ·\u6f22\u5b57\u304b\u306a·\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002\uff01·   \r\n· "
        "·\tend· ·\xbd·\n \n· · !"
    ),
    "deepseek-llm": (
        "It·'·s· DON·'·T· we·'·dan· ·1234567· ·12·ab· HTTPServer·,·camelCase· x·=[·1·];·\n·\n· · '·y·'/·\n·/"
        "·z· $·5·<=>~|`· ·\u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026·\u3002·\uff01·   "
        "·\r·\n· ·\tend· ·\xbd·\n· ·\n· · !"
    ),
    "deepseek-coder": (
        "It·'·s· DON·'·T· we·'·dan· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,·camelCase· x·=·[·1·];·\n·\n· · '·y"
        "·'/·\n·/·z· $·5·<=>~|`· ·\u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430·\u2014\u2026\u3002"
        "·\uff01·   ·\r·\n· ·\tend· ·\xbd·\n· ·\n· · !"
    ),
    "bloom poro-chat gpt3-finnish": (
        "It's· DON'T· we'dan· 1234567· 12ab· HTTPServer·,·camelCase· x=[1];·\n\n · 'y'/·\n·/z· $5<=>~·|·`"
        "· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430\u2014·\u2026\u3002·\uff01·   \r\n \t·end· \xbd"
        "·\n \n  !"
    ),
    "superbpe": (
        "It's DON'T we'dan ·1·234·567· ·12·ab HTTPServer,camelCase x=[·1·];\n\n  'y'/\n/z $·5"
        "·<=>~|` \u6f22\u5b57\u304b\u306a\ud55c\uae00 \u0434\u0430\u2014\u2026\u3002\uff01   \r\n \tend ·\xbd"
        "·\n \n  !"
    ),
    "viking": (
        "It's· DON'T· we'dan· ·1·2·3·4·5·6·7· ·1·2·ab· HTTPServer·,·camelCase· x=[·1·];·\n\n · 'y'/·\n·/z· $"
        "·5·<=>~·|·`· \u6f22\u5b57\u304b\u306a\ud55c\uae00· \u0434\u0430\u2014·\u2026\u3002·\uff01·   \r\n \t"
        "·end· ·\xbd·\n \n  !"
    ),
}
# Letters that carry signs of their own: one word where the rule takes \p{M} for letters.
HINDI = "\u0939\u093f\u0928\u094d\u0926\u0940"
WHOLE = {
    "qwen35 gpt-4o llama4 tekken kimi-k2 minimax-m2 deepseek-v3 hunyuan-dense": 1,
    "qwen2 llama-bpe glm4 dbrx seed-coder": 4,
    "gpt-2 starcoder falcon command-r": 6,
}
BYTES = sorted(ByteLevel.alphabet())


def pieces(name: str, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)]


def write(path, tokens, **values):
    return write_vocabulary(path, tokens, **{"model": "gpt2", "merges": ["a b"]} | values)


@pytest.mark.parametrize("names", PIECES)
def test_pieces_are_those_of_llama_cpp(names):
    for name in names.split():
        assert pieces(name, TEXT) == PIECES[names].split("\u00b7"), name


def test_every_rule_is_compared():
    assert sorted(" ".join(PIECES).split()) == sorted(SPLITS)
    assert set(ARCHITECTURE_SPLITS.values()) <= set(SPLITS)


@pytest.mark.parametrize("names", WHOLE)
def test_signs_on_letters(names):
    for name in names.split():
        found = pieces(name, HINDI)
        assert len(found) == WHOLE[names] and "".join(found) == HINDI, name


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("1234567", "1\u00b7234\u00b7567"),
        ("1234x", "123\u00b74\u00b7x"),  # where no number ends, as in the expression, in spite of llama.cpp
    ],
)
def test_numbers_from_behind(text, split):
    assert pieces("tiny_aya", text) == split.split("\u00b7")


@pytest.mark.parametrize(
    ("pre", "family"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("olmo", GPTNeoXTokenizer),
        ("command-r", CohereTokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
    ],
)
def test_ids_equal_transformers(pre, family, tmp_path):
    """On the vocabulary of SmolLM2. llama.cpp does not compose text, as all but GPT-2's do."""
    data = GgufFile(smollm2_path()).metadata
    tokens, merges = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.merges"]
    ours = load_tokenizer(write(tmp_path / "a.gguf", tokens, merges=merges, pre=pre))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = family(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs, add_bos_token=False)
    for text in (TEXT, "e\u0301a \u212b " + HINDI, "", " ", "\n\n", "a  b\u00a0\u3000c"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, text


def test_a_token_without_merges(tmp_path):
    """llama.cpp's ignore_merges: \"cb\" is a piece and a token, but no merges make it."""
    tokens = [*BYTES, "ab", "cb"]
    ids = {}
    for pre in SPLITS:
        path = write(tmp_path / f"{pre}.gguf", tokens, pre=pre)
        ids[pre] = load_tokenizer(path).encode("cb") == [tokens.index("cb")]
    whole = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 glm5 minicpm5 tekken"
    assert {pre for pre, found in ids.items() if found} == set(whole.split())


@pytest.mark.parametrize(
    ("pre", "values", "around"),
    [
        ("gpt-2", {}, ""),
        ("llama-bpe", {}, "<"),
        ("tekken", {}, "<"),
        ("lfm2", {"add_bos_token": False}, ""),
        ("gpt-2", {"add_bos_token": True}, "<"),
        ("qwen2", {"add_eos_token": True}, ">"),
        ("llama-bpe", {"add_eos_token": True}, "<>"),
        ("llama-bpe", {"bos_token_id": None}, ""),
    ],
)
def test_ends_of_a_text(pre, values, around, tmp_path):
    """The models of llama-bpe and tekken begin a text with BOS, though older files do not say so."""
    tokens = [*BYTES, "ab", "<s>", "</s>"]
    ends = {"bos_token_id": 257, "eos_token_id": 258, "token_type": [1] * 257 + [3, 3]}
    tokenizer = load_tokenizer(write(tmp_path / "a.gguf", tokens, pre=pre, **ends | values))
    first, last = [257] * ("<" in around), [258] * (">" in around)
    for text in ("ab", ""):
        assert tokenizer.encode(text) == [*first, *([256] if text else []), *last]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("arch", "pre"),
    [("falcon", "falcon"), ("starcoder2", "starcoder"), ("phi2", "gpt-2"), ("gptneox", "olmo"), ("qwen3", "qwen2")],
)
def test_a_file_from_before_the_rules_had_names(arch, pre, tmp_path):
    unnamed = load_tokenizer(write(tmp_path / "a.gguf", [*BYTES, "ab"], arch=arch))
    named = load_tokenizer(write(tmp_path / "b.gguf", [*BYTES, "ab"], pre=pre))
    assert unnamed.backend.to_str() == named.backend.to_str()
