"""attnpack's C++ modules and caches: ``torch::nn::Module`` classes, bound without a Python shell.

They have the names and arguments of the Python modules. They serve parity tests, and generation without Python in the
loop. In a Python model use the ``nn.Module`` classes of ``attnpack``: their ``.cpp()`` gives a C++ module on the same
storage.
"""

from . import _C
from .explain import SWITCH, explained, or_none

Linear = _C.cpp.Linear
Embedding = _C.cpp.Embedding
RMSNorm = _C.cpp.RMSNorm
FeedForward = _C.cpp.FeedForward
RotaryEmbedding = _C.cpp.RotaryEmbedding

SelfAttention = _C.cpp.SelfAttention
MultiHeadAttention = _C.cpp.MultiHeadAttention
GroupedQueryAttention = _C.cpp.GroupedQueryAttention
MultiQueryAttention = _C.cpp.MultiQueryAttention
MultiHeadLatentAttention = _C.cpp.MultiHeadLatentAttention
ProjectedAttention = _C.cpp.ProjectedAttention

EncoderBlock = _C.cpp.EncoderBlock
DecoderBlock = _C.cpp.DecoderBlock
Encoder = _C.cpp.Encoder
Decoder = _C.cpp.Decoder
EncoderDecoder = _C.cpp.EncoderDecoder
CausalLM = _C.cpp.CausalLM

KVCache = _C.cpp.KVCache
DynamicCache = _C.cpp.DynamicCache
LatentCache = _C.cpp.LatentCache
StaticCache = _C.cpp.StaticCache
ModelCache = _C.cpp.ModelCache


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)


def _explain_in_sentences() -> None:
    """Wraps the methods, so that a call that pybind refuses names the argument that does not fit."""

    def one_of(kind: type, words: str):
        return or_none(lambda value: isinstance(value, kind)), words

    rope = one_of(RotaryEmbedding, "a RotaryEmbedding of attnpack.cpp, or None: .cpp() of a Python one gives it")
    layer = one_of(KVCache, "an attnpack.cpp.DynamicCache() or StaticCache, or None")
    model = one_of(ModelCache, "an attnpack.cpp.ModelCache(num_layers), or None")
    parts = {Encoder: EncoderBlock, Decoder: DecoderBlock}
    for kind in vars(_C.cpp).values():
        if isinstance(kind, type):
            part = parts.get(kind, object)
            special = {
                "rope": rope,
                "cache": model if kind in (Decoder, EncoderDecoder, CausalLM) else layer,
                "encoder": (lambda value: isinstance(value, Encoder), "an Encoder of attnpack.cpp"),
                "decoder": (lambda value: isinstance(value, Decoder), "a Decoder of attnpack.cpp"),
                "layers": (lambda value, part=part: _are(value, part), f"a list of {part.__name__}s of attnpack.cpp"),
            }
            for name in vars(kind).keys() & {"__init__", "forward", "project", "crop"}:
                made = name == "__init__"
                switches = {"sinks": SWITCH} if made else {}  # a constructor takes True or False, the op takes a tensor
                called = kind.__name__ if made else name
                setattr(kind, name, explained(getattr(kind, name), called, **special, **switches))
    # The cache of generate may also be a word, which generate itself checks.
    CausalLM.generate = explained(CausalLM.generate, cache=(lambda value: True, model[1]))


_explain_in_sentences()
