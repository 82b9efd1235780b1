"""The keywords of attention functions that attnpack refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..nn.sharded_attention import refuse_context_parallel

_EAGER = 'call model.set_attn_implementation("eager")'
_PAGED = "leave it to model.generate_batch, which passes a PagedAttentionCache with it"
_OF_PAGES = ("block_table", "cache", "k_cache", "read_index", "v_cache", "write_index")

# Models pass on every keyword of their caller, also the names of losses and the flags of trainers. A list of harmless
# keywords would never be complete, and sdpa ignores them. So this list has the keywords that change attention, each
# with its fix. tests/hf/test_arguments.py compares it with every name that the installed transformers passes or reads.
REFUSED: dict[str, str] = {
    "head_mask": "remove heads from the projections instead",
    "sinks": _EAGER,
    "softmax_scale": "set the scaling of the model's layers",
    "use_top_left_mask": "give the model an attention_mask",
    **dict.fromkeys(_OF_PAGES, _PAGED),
}

# Continuous batching: the keys of a request stand in pages, which have no mask tensor.
SDPA_INSTEAD = 'call model.set_attn_implementation("sdpa") before model.generate_batch'
REFUSED_BY_PAGES: dict[str, str] = dict.fromkeys(
    ("indices", "block_indices", "position_bias", "attention_mask"), SDPA_INSTEAD
)


# Latent layers also refuse the arguments that the operator takes and they do not.
_LAYERS = 'leave the layers as they are, with model.set_attn_implementation("attnpack")'
REFUSED_BY_LATENT = REFUSED | dict.fromkeys(
    ("indices", "block_indices", "position_bias", "s_aux", "softcap", *_OF_PAGES), _LAYERS
)


def refuse_arguments(others: Mapping[str, Any], refused: Mapping[str, str] = REFUSED) -> None:
    """Raises ValueError for the first argument that changes attention and is not honoured."""
    for name, fix in refused.items():
        value = others.get(name)
        if value is not None and value is not False:
            raise ValueError(
                f"attnpack: {name}: got {type(value).__name__}, which attnpack cannot honour; want None: {fix}"
            )


def refuse_parts() -> None:
    """Raises ValueError under `context_parallel`: the layers of transformers know nothing of parts of sequences."""
    refuse_context_parallel(
        "a model of transformers attends", "run it outside on whole sequences, or read it with CausalLM.from_hf"
    )
