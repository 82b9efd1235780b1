"""All that attnpack.hf reads of transformers' insides: what no documentation promises, and a release may change.

`check()` asks for each part and answers with one sentence. `scripts/matrix.sh` runs the tests of attnpack.hf under
several releases.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from ..extras import TESTED

# path: why it is read. () makes an object. A closure's path ends with the variable that it holds.
PARTS = {
    "transformers:AttentionInterface._global_mapping": "the names of attention functions",
    "transformers:AttentionMaskInterface._global_mapping": "the names of mask functions",
    "transformers:PreTrainedConfig()._attn_implementation_internal": "the attention function of a model",
    "transformers.utils.output_capturing:_active_collector": "whether a model records its attentions",
    "transformers.utils.import_utils:is_tracing": "whether a graph is traced",
    "transformers.integrations.sdpa_attention:sdpa_attention_forward": 'what stands behind "sdpa"',
    "transformers.masking_utils:causal_mask_function": "causal masks",
    "transformers.masking_utils:bidirectional_mask_function": "full masks",
    "transformers.masking_utils:create_causal_mask": "the name of the cache",
    "transformers.masking_utils:eager_mask": "masks as numbers to add",
    "transformers.masking_utils:sdpa_mask": "masks as tensors",
    "transformers.masking_utils:and_masks.mask_functions": "masks of several rules",
    "transformers.masking_utils:sliding_window_overlay.sliding_window": "windows",
    "transformers.masking_utils:sliding_window_bidirectional_overlay.sliding_window": "windows to both sides",
    "transformers.masking_utils:packed_sequence_mask_function.packed_sequence_mask": "packed sequences",
    "transformers.generation.continuous_batching.continuous_api:"
    "ContinuousBatchingManager.switch_to_cb_friendly_attn": "continuous batching",
    "transformers.generation.continuous_batching.cache:PagedAttentionCache.update": "continuous batching",
}

# masking_utils.remap_positions_for_packed_sequence, which 5.17 lacks, is read for packed sequences where it is there.
# Attributes that a PagedAttentionCache sets in its constructor (layer_to_allocator, config), those of its allocators
# (index, layer_type, supports_block_table, sliding_window, update, get_cache_for_block_table), and the keywords
# read_index, write_index, cu_seq_lens_q and cu_seq_lens_k: no object has them before a batch runs, so the tests of
# continuous batching ask for them.
#
# Recurrent layers: recurrent.py reads the decorator of hub_kernels that chooses an implementation, and the variables of
# its closure (func_name, implementation, applicable_params, is_new_implementation); layers/recurrent.py a cache's
# methods (is_recording_past, get_conv_state, get_recurrent_state, update_conv_state, update_recurrent_state).
# Releases before 5.24 have other ones, so they are no parts to ask for; test_recurrent_functions asks for them.


def _call(function: Callable) -> Callable:
    """A mask function that `function`, a factory of them, makes."""
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    return function(causal, causal) if function.__name__ == "and_masks" else function(4)


def closure_variables(function: Callable) -> Mapping[str, Any]:
    """The variables that a closure holds, by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _has(path: str) -> bool:
    module, _, names = path.partition(":")
    try:
        part = importlib.import_module(module)
        for name in names.split("."):
            if isinstance(part, FunctionType):
                return name in closure_variables(_call(part))
            part = getattr(part, name.removesuffix("()"))
            part = part() if name.endswith("()") else part
    except (ImportError, TypeError, ValueError, AttributeError):
        return False
    return True


def check() -> None:
    """Raises ImportError, which names the version, for a part that the installed transformers lacks."""
    import transformers

    for path, purpose in PARTS.items():
        if not _has(path):
            raise ImportError(
                f"attnpack.hf reads {path.replace(':', '.')} of transformers for {purpose}, and transformers "
                f"{transformers.__version__} has none; install one of the tested releases: "
                f"pip install transformers=={TESTED['transformers'][-1]}"
            )
