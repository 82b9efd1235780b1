"""attnpack's C++ modules and caches: ``torch::nn::Module`` classes, bound without a Python shell.

They have the names and arguments of the Python modules. They serve parity tests, and generation without Python in the
loop. In a Python model use the ``nn.Module`` classes of ``attnpack``: their ``.cpp()`` gives a C++ module on the same
storage, and ``from_cpp()`` of the class gives the Python module of a C++ one.
"""

from . import _C

Linear = _C.cpp.Linear
Embedding = _C.cpp.Embedding
RMSNorm = _C.cpp.RMSNorm
LayerNorm = _C.cpp.LayerNorm
FeedForward = _C.cpp.FeedForward
MixtureOfExperts = _C.cpp.MixtureOfExperts
LayerTail = _C.cpp.LayerTail
LayerInputTable = _C.cpp.LayerInputTable
RotaryEmbedding = _C.cpp.RotaryEmbedding

SelfAttention = _C.cpp.SelfAttention
MultiHeadAttention = _C.cpp.MultiHeadAttention
GroupedQueryAttention = _C.cpp.GroupedQueryAttention
MultiQueryAttention = _C.cpp.MultiQueryAttention
MultiHeadLatentAttention = _C.cpp.MultiHeadLatentAttention
DifferentialAttention = _C.cpp.DifferentialAttention
ProjectedAttention = _C.cpp.ProjectedAttention
SparseAttention = _C.cpp.SparseAttention
SparseLatentAttention = _C.cpp.SparseLatentAttention
CompressedAttention = _C.cpp.CompressedAttention

ShortConvolution = _C.cpp.ShortConvolution
ForgetGate = _C.cpp.ForgetGate
GatedConvolution = _C.cpp.GatedConvolution
GatedDeltaNet = _C.cpp.GatedDeltaNet
KimiDeltaAttention = _C.cpp.KimiDeltaAttention
Mamba2 = _C.cpp.Mamba2
LinearAttention = _C.cpp.LinearAttention

EncoderBlock = _C.cpp.EncoderBlock
DecoderBlock = _C.cpp.DecoderBlock
Encoder = _C.cpp.Encoder
Decoder = _C.cpp.Decoder
EncoderDecoder = _C.cpp.EncoderDecoder
CausalLM = _C.cpp.CausalLM

KVCache = _C.cpp.KVCache
CrossCache = _C.cpp.CrossCache
DynamicCache = _C.cpp.DynamicCache
LatentCache = _C.cpp.LatentCache
QuantizedCache = _C.cpp.QuantizedCache
PagedCache = _C.cpp.PagedCache
RecurrentCache = _C.cpp.RecurrentCache
SlidingWindowCache = _C.cpp.SlidingWindowCache
SparseCache = _C.cpp.SparseCache
StaticCache = _C.cpp.StaticCache
ModelCache = _C.cpp.ModelCache
