"""attnpack inside Hugging Face transformers.

`register()` makes ``attn_implementation="attnpack"`` known; with `replace_sdpa=True` every model that runs on
transformers' default attention runs on attnpack; `replace_attention(model)` swaps whole layers.
"""

from __future__ import annotations

from ..errors import wrong_kind
from ..extras import install_command

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from . import internals
except ImportError as error:
    raise ImportError(f"attnpack.hf needs transformers 5 ({error}): run `{install_command('hf')}`") from error

internals.check()  # before the imports below, whose errors would name a part and no fix

from . import layers as hf_layers  # noqa: E402
from . import paged, recurrent, sdpa  # noqa: E402
from .attention_function import attention_forward  # noqa: E402
from .masks import mask  # noqa: E402

NAME = "attnpack"


def register(replace_sdpa: bool = False) -> None:
    """Makes `attn_implementation="attnpack"` and `model.set_attn_implementation("attnpack")` known to transformers.

    It registers an attention function and a mask function. transformers gives no mask to an attention function that has
    no mask function; padding and causality would then be lost without an error. `model.generate_batch` (continuous
    batching) takes the name too.

    The functions of recurrent layers on the CPU become attnpack's, by the door through which transformers takes those
    of flash-linear-attention, causal-conv1d and mamba-ssm: `chunk_gated_delta_rule`,
    `fused_recurrent_gated_delta_rule`, `chunk_kda`, `fused_recurrent_kda`, `mamba_chunk_scan_combined`,
    `causal_conv1d_fn` and `causal_conv1d_update`. Models that exist already run on them too; calls that attnpack's do
    not take go where they went before.

    Args:
        replace_sdpa: also put attnpack in the place of "sdpa", transformers' default attention. Then no word of a
            program changes: models that exist already run on attnpack too. Their masks stay those of sdpa. Calls that
            the operator does not take go to transformers' own function.
    """
    if not isinstance(replace_sdpa, bool):
        raise wrong_kind("replace_sdpa", replace_sdpa, "True or False")
    internals.check()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    paged.allow(NAME)
    recurrent.replace_functions()
    if replace_sdpa:
        sdpa.replace_sdpa()


def unregister() -> None:
    """Undoes `register`: "sdpa" and the functions of recurrent layers are transformers' own again, and transformers
    does not know the name "attnpack"."""
    sdpa.restore_sdpa()
    recurrent.restore_functions()
    paged.forbid()
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)


def replace_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Swaps the model's attention layers for attnpack's modules, in place: the same parameters under the same names.

    Args:
        model: of a family whose layers a module of attnpack computes (`hf_layers.KNOWN` names the layers' classes).
            Layers of other kinds stay as they are.

    Returns:
        The same model, now also with `attn_implementation="attnpack"`, so that attnpack makes its masks; `register()`
        is called for that. It works with the caches of transformers, and returns its attentions if
        `output_attentions=True` asks for them. A model whose layers are replaced already is returned as it is.

    Raises:
        TypeError: model is no transformers model.
        ValueError: none of its layers is known, or tensor parallelism has split latent layers.
    """
    if not isinstance(model, PreTrainedModel):
        raise wrong_kind("model", model, "a model of transformers")
    if hf_layers.replace_layers(model) == 0:
        raise ValueError(
            f"attnpack: model: got a {type(model).__name__} without a layer that replace_attention knows "
            f"({', '.join(hf_layers.KNOWN)}); call attnpack.hf.register() and "
            'model.set_attn_implementation("attnpack") instead'
        )
    register()
    model.set_attn_implementation(NAME)
    return model
