"""Python types some lists that C++ has, for editors and for readers of a signature: they have the same names and
defaults."""

import ast
import builtins
import inspect
import re
import typing

import attnpack
import pytest
import torch
from attnpack import ops, signatures
from attnpack.distributed.attention import SplitRules
from attnpack.nn.attention.grouped_attention import AttentionSettings
from attnpack.nn.native import _BY_TWIN
from attnpack.nn.rope import RopeSettings
from processes import ROOT

OPS = torch.ops.attnpack


def keywords_of(op):
    """{name: default} of the keywords of an op, by the names that the functions of Python have for them."""
    given = {one.name: one.default_value for one in op.default._schema.arguments if one.has_default_value()}
    left, right = given.pop("window_left"), given.pop("window_right")
    return given | {"window": (left, right)}


def test_the_rules_of_python_are_those_of_cpp():
    defaults = attnpack._C.default_rules()
    hints = typing.get_type_hints(signatures.Rules)
    assert list(hints) == list(defaults)
    for name, hint in hints.items():
        kinds = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        assert type(defaults[name]) in [typing.get_origin(kind) or kind for kind in kinds], name
    assert {name: keywords_of(OPS.attention)[name] for name in hints if name != "query_scale"} == {
        name: default for name, default in defaults.items() if name != "query_scale"
    }


# The op of a graph takes these, and the function does not: a mask by its place, and values that it works out.
NOT_OF_FUNCTIONS = {"mask", "q_offsets", "dropout_seed"}
LISTS = {
    "attention": (signatures.AttentionRules, OPS.attention, NOT_OF_FUNCTIONS),
    "attention_scores": (signatures.ScoresRules, OPS.attention_scores, NOT_OF_FUNCTIONS),
    "attention_varlen": (
        signatures.PackedRules,
        OPS.attention_varlen,
        {*NOT_OF_FUNCTIONS, "cu_seqlens_k", "q_offset", "key_index"},
    ),
    "attend": (ops.AttendRules, OPS.attend_with_weights, set()),
    "attend_shared": (ops.SharedRules, OPS.attend_shared, {"cross", "top_blocks", "local_blocks", "scorer"}),
    "latent_attend": (ops.LatentRules, OPS.latent_attend_with_weights, set()),
    "distributed.attention": (SplitRules, OPS.context_attention, set()),
}


@pytest.mark.parametrize("name", LISTS)
def test_the_keywords_of_functions_are_those_of_their_ops(name):
    keywords, op, others = LISTS[name]
    taken = {re.sub(r"^(cache|rope)_.*", r"\1", one) for one in keywords_of(op)}
    assert set(keywords.__annotations__) - others == taken - others | {"query_scale"}


def parts_of(prefix):
    """{name: default} of the op's arguments that one value of Python holds."""
    given = keywords_of(OPS.attend)
    return {name.removeprefix(prefix): default for name, default in given.items() if name.startswith(prefix)}


def test_values_of_several_arguments_have_the_fields_of_cpp():
    cache = parts_of("cache_")
    assert list(ops.CacheTensors._fields) == list(cache)
    wanted = {name: default for name, default in cache.items() if name not in ("key", "value", "lengths")}
    assert ops.CacheTensors._field_defaults == wanted
    rope = parts_of("rope_")
    assert list(RopeSettings._fields) == list(rope)
    wanted = {name: () if default is None else default for name, default in rope.items() if name != "inv_freq"}
    assert RopeSettings._field_defaults == wanted
    assert list(ops.flat_rope(range(len(rope)))) == [f"rope_{name}" for name in rope]


# ---- constructors ------------------------------------------------------------------------

SIZES = {
    "embed_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "hidden_dim": 16, "dim": 6, "vocab_size": 11,
    "num_layers": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "o_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "top_k": 2, "num_experts": 4, "num_k_heads": 2, "num_v_heads": 4,
    "head_k_dim": 4, "head_v_dim": 4, "state_dim": 4, "input_dim": 8, "index_heads": 2, "index_head_dim": 4,
}  # fmt: skip
PARTS = {
    "attention": lambda m: m.GroupedQueryAttention(24, 4, 2, causal=True),
    "rope": lambda m: m.RotaryEmbedding(2),
    "feed_forward": lambda m: m.FeedForward(24, 16),
    "encoder": lambda m: m.Encoder([m.EncoderBlock(m.SelfAttention(24), m.FeedForward(24, 16))]),
    "decoder": lambda m: m.Decoder([m.DecoderBlock(PARTS["attention"](m), m.FeedForward(24, 16))]),
}
CACHES = {
    "StaticCache": {"batch": 2, "num_kv_heads": 2, "max_len": 5, "head_dim": 4},
    "PagedCache": {"batch": 2, "num_kv_heads": 2, "head_dim": 4, "num_pages": 6},
    "SlidingWindowCache": {"window": 3},
    "QuantizedCache": {"bits": 8},
    "RecurrentCache": {},
}


def required(kind, parameters):
    """The arguments of a constructor that have no default, in C++."""
    m, given = attnpack.cpp, {}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty:
            if name == "layers":
                block = PARTS["encoder" if kind.__name__ == "Encoder" else "decoder"](m)
                given[name] = list(block.named_children()["layers"].children())
            else:
                given[name] = PARTS[name](m) if name in PARTS else SIZES[name]
    return given


def parameters_of(kind):
    parameters = dict(inspect.signature(kind).parameters)
    if parameters.pop("settings", None):  # of the class with all of them
        full = inspect.signature(attnpack.GroupedQueryAttention).parameters
        parameters |= {name: full[name] for name in AttentionSettings.__annotations__}
    return parameters


def described(twin):
    """All that a C++ object shows: options, properties, and those of its children."""
    shown = dict(twin.options()) if hasattr(twin, "options") else {}
    names = [name for name in dir(type(twin)) if name[0] != "_" and isinstance(getattr(type(twin), name), property)]
    shown |= {name: getattr(twin, name) for name in names}
    children = twin.named_children().items() if hasattr(twin, "named_children") else []
    return {name: value for name, value in shown.items() if not isinstance(value, torch.Tensor)} | {
        name: described(child) for name, child in children
    }


MODULES = {kind.__name__: (kind, twin) for twin, kind in _BY_TWIN.items()}
CACHE_KINDS = {name: (getattr(attnpack, name), getattr(attnpack.cpp, name)) for name in CACHES}


@pytest.mark.parametrize("name", [*MODULES, *CACHE_KINDS])
def test_constructors_have_the_defaults_of_cpp(name):
    """Python's defaults, given to C++, make the object that C++ makes without them."""
    kind, twin = (MODULES | CACHE_KINDS)[name]
    parameters = parameters_of(kind)
    needed = CACHES.get(name) or required(kind, parameters)
    defaults = {one.name: one.default for one in parameters.values() if one.default is not one.empty}
    taken = re.match(rf"{name}\(([^)]*)\)", twin.__init__.__doc__ or "")
    names = set(re.findall(r"\w+", taken[1])) if taken else {*needed, *defaults} - {"device", "dtype"}
    given = {name: default for name, default in defaults.items() if name in names}
    assert names <= {*parameters, "num_kv_heads", "head_map"}, f"Python lacks {names - {*parameters}}"
    assert described(twin(**needed, **given)) == described(twin(**needed))


STUB = {
    node.name: node
    for node in ast.parse((ROOT / "python/attnpack/cpp.pyi").read_text()).body
    if isinstance(node, ast.ClassDef)
}


def properties_of(node):
    """{name: type} of the properties of a class of the stub, with those of its base classes."""
    found = {}
    for base in node.bases:
        found |= properties_of(STUB[base.id])
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and any(ast.unparse(one) == "property" for one in part.decorator_list):
            found[part.name] = ast.unparse(part.returns)
    return found


@pytest.mark.parametrize("name", [*MODULES, *CACHE_KINDS])
def test_properties_have_the_types_of_the_stub(name):
    kind, twin = (MODULES | CACHE_KINDS)[name]
    made = twin(**(CACHES.get(name) or required(kind, parameters_of(kind))))
    known = {"builtins": builtins, "Tensor": torch.Tensor, **vars(attnpack.cpp)}
    for part, text in properties_of(STUB[name]).items():
        if part in ("k", "v", "dropped", "conv_state", "state") and name != "StaticCache":
            continue  # they are there after a call
        kinds = [typing.get_origin(one) or one for one in eval(f"({text.replace('|', ',')},)", known)]
        value = getattr(made, part)
        assert type(value) in [type(None) if one is None else one for one in kinds], f"{name}.{part}"


def test_the_modules_and_caches_are_all_there():
    classes = {name for name, value in vars(attnpack.cpp).items() if isinstance(value, type)}
    plain = {"Linear", "Embedding", "LayerNorm", "ShortConvolution"}  # torch's own in Python
    without_arguments = {"KVCache", "CrossCache", "DynamicCache", "LatentCache", "SparseCache", "ModelCache"}
    assert classes == {*MODULES, *CACHES} | plain | without_arguments
    assert len(MODULES) > 20


def test_another_default_is_seen():
    """The comparison above tells a default that C++ has not."""
    same = {"window": None, "softcap": 0.0}
    assert described(attnpack.cpp.GroupedQueryAttention(24, 4, 2, **same)) == described(
        attnpack.cpp.GroupedQueryAttention(24, 4, 2)
    )
    for other in ({"softcap": 1.0}, {"gate": "head"}, {"bias": True}, {"qk_norm": True}):
        assert described(attnpack.cpp.GroupedQueryAttention(24, 4, 2, **other)) != described(
            attnpack.cpp.GroupedQueryAttention(24, 4, 2)
        )
