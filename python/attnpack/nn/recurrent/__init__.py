"""The recurrent layers, a kind per file, on the bases in ``base``."""

from .gated_delta_net import GatedDeltaNet
from .kimi_delta_attention import KimiDeltaAttention
from .linear_attention import LinearAttention
from .mamba2 import Mamba2
from .short_convolution import GatedConvolution

__all__ = ["GatedConvolution", "GatedDeltaNet", "KimiDeltaAttention", "LinearAttention", "Mamba2"]
