"""attnpack's C++ modules and caches as they are: ``torch::nn::Module`` classes, bound without a Python shell.

Same names and arguments as the Python modules. For parity tests, and for running without Python in the loop; in a
Python model use the ``nn.Module`` classes of ``attnpack``, whose ``.cpp()`` gives one of these on the same storage.
"""

from ._load import _C

Linear = _C.cpp.Linear
Embedding = _C.cpp.Embedding
RMSNorm = _C.cpp.RMSNorm
FeedForward = _C.cpp.FeedForward
RotaryEmbedding = _C.cpp.RotaryEmbedding

SelfAttention = _C.cpp.SelfAttention
MultiHeadAttention = _C.cpp.MultiHeadAttention
GroupedQueryAttention = _C.cpp.GroupedQueryAttention
MultiQueryAttention = _C.cpp.MultiQueryAttention
ProjectedAttention = _C.cpp.ProjectedAttention

EncoderBlock = _C.cpp.EncoderBlock
DecoderBlock = _C.cpp.DecoderBlock
Encoder = _C.cpp.Encoder
Decoder = _C.cpp.Decoder
EncoderDecoder = _C.cpp.EncoderDecoder
CausalLM = _C.cpp.CausalLM

DynamicCache = _C.cpp.DynamicCache
StaticCache = _C.cpp.StaticCache
ModelCache = _C.cpp.ModelCache
