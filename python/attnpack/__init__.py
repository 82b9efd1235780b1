"""attnpack: attention variants in C++ for PyTorch: one operator, LibTorch modules, ``nn.Module``s on the same code."""

from . import _load

try:
    _load.load()
except ImportError as error:
    _load.end_command(error)
    raise
__version__ = _load.build_record()["version"]

from . import convert, cpp
from .attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    SelfAttention,
)
from .blocks import DecoderBlock, EncoderBlock
from .cache import DynamicCache, ModelCache, StaticCache
from .causal_lm import CausalLM
from .feed_forward import FeedForward
from .latent_attention import MultiHeadLatentAttention
from .latent_cache import LatentCache
from .norm import RMSNorm
from .ops import apply_rope, attention, attention_scores, merge_states
from .projected_attention import ProjectedAttention
from .rope import RotaryEmbedding
from .stacks import Decoder, Encoder, EncoderDecoder

__all__ = [
    "CausalLM",
    "Decoder",
    "DecoderBlock",
    "DynamicCache",
    "Encoder",
    "EncoderBlock",
    "EncoderDecoder",
    "FeedForward",
    "GroupedQueryAttention",
    "LatentCache",
    "ModelCache",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiQueryAttention",
    "ProjectedAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SelfAttention",
    "StaticCache",
    "__version__",
    "apply_rope",
    "attention",
    "attention_scores",
    "convert",
    "cpp",
    "merge_states",
]
