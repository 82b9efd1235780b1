"""attnpack: attention variants for PyTorch. C++ (LibTorch) modules and Python ``nn.Module``s run on one operator."""

from types import ModuleType
from typing import TYPE_CHECKING

from . import _load, installation

if TYPE_CHECKING:
    from . import checkpoints as checkpoints
    from . import onnx as onnx

try:
    _load.load()
except ImportError as error:
    installation.end_command(error)
    raise
__version__ = _load.build_record()["version"]

from . import backend, convert, cpp
from .cache import (
    CrossCache,
    DynamicCache,
    LatentCache,
    ModelCache,
    PagedCache,
    QuantizedCache,
    RecurrentCache,
    SlidingWindowCache,
    SparseCache,
    StaticCache,
)
from .nn.attention import (
    CompressedAttention,
    DifferentialAttention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    ProjectedAttention,
    SelfAttention,
    SparseAttention,
    SparseLatentAttention,
)
from .nn.block import DecoderBlock, EncoderBlock
from .nn.causal_lm import CausalLM
from .nn.feed_forward import FeedForward, MixtureOfExperts
from .nn.layer_tail import LayerInputTable, LayerTail
from .nn.norm import RMSNorm
from .nn.recurrent import GatedConvolution, GatedDeltaNet, KimiDeltaAttention, LinearAttention, Mamba2
from .nn.rope import RotaryEmbedding
from .nn.stack import Decoder, Encoder, EncoderDecoder
from .nn.stored import StoredEmbedding, StoredLinear
from .ops import (
    apply_rope,
    attention,
    attention_scores,
    attention_varlen,
    causal_conv1d,
    linear_attention,
    merge_states,
)

__all__ = [
    "CausalLM",
    "CompressedAttention",
    "CrossCache",
    "Decoder",
    "DecoderBlock",
    "DifferentialAttention",
    "DynamicCache",
    "Encoder",
    "EncoderBlock",
    "EncoderDecoder",
    "FeedForward",
    "GatedConvolution",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "KimiDeltaAttention",
    "LatentCache",
    "LayerInputTable",
    "LayerTail",
    "LinearAttention",
    "Mamba2",
    "MixtureOfExperts",
    "ModelCache",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "PagedCache",
    "ProjectedAttention",
    "RMSNorm",
    "RecurrentCache",
    "RotaryEmbedding",
    "SelfAttention",
    "QuantizedCache",
    "SlidingWindowCache",
    "SparseAttention",
    "SparseCache",
    "SparseLatentAttention",
    "StaticCache",
    "StoredEmbedding",
    "StoredLinear",
    "__version__",
    "apply_rope",
    "attention",
    "attention_scores",
    "attention_varlen",
    "backend",
    "causal_conv1d",
    "checkpoints",
    "convert",
    "cpp",
    "linear_attention",
    "merge_states",
]


if not TYPE_CHECKING:  # a type checker would take every name for a module

    def __getattr__(name: str) -> ModuleType:
        """Imports attnpack.checkpoints and attnpack.onnx when they are first used: a layer does not need them."""
        if name in ("checkpoints", "onnx"):
            import importlib

            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
