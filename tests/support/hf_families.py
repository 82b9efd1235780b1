"""Tiny random models of transformers, a family by its model_type, for the tests of attnpack.hf.

These causal, masked, sequence-to-sequence and image models of transformers 5.23 were tried and left out: models with
attention code of their own (falcon, gpt_neo, deberta, led, xlnet, ...: transformers warns and stays eager, or they are
refused); models without attention (mamba, fnet, resnet, ...); models for which SIZES are not enough to make them small
(fuyu, gemma3, clip, ...), quick (falcon_h1) or valid (bamba, dbrx, jamba, zamba, swin, ...); and inkling2_text, whose
sinks per token the operator cannot honour (it raises and names them).
"""

from __future__ import annotations

import functools
import inspect
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

VOCABULARY = 96

# The names of sizes in configurations; each configuration takes those that it has.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("global_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_decoder_layers", "type_vocab_size"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    # The values of transformers' own tests, because the defaults do not suit such a narrow model.
    **dict.fromkeys(("initializer_range", "embedding_initializer_range"), 0.02),
    "initializer_factor": 0.002,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "num_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "num_kv_shared_layers": 0,
    "rotary_dim": 4,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

DECODERS = """
    afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v4 diffllama doge
    dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax inkling_text
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama llama4_text mellum mimo_v2_flash minimax minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron nemotron_h olmo
    olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma whisper
""".split()
# Latent attention, some of it over selected keys only.
LATENT = """
    axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash minicpm3 youtu
""".split()
ENCODERS = """
    albert bert camembert data2vec-text distilbert electra ernie esm eurobert gte jina_embeddings_v3 layoutlm mobilebert
    modernbert nomic_bert roberta roberta-prelayernorm ultrabert xlm-roberta xlm-roberta-xl
""".split()
ENCODER_DECODERS = """
    bart blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 nllb-moe pegasus pegasus_x plbart
    seamless_m4t seamless_m4t_v2 switch_transformers t5 umt5
""".split()
VISION = "beit dinov2 dinov2_with_registers ijepa vit vit_msn".split()
FAMILIES = [*DECODERS, *LATENT, *ENCODERS, *ENCODER_DECODERS, *VISION]

# Models with recurrent layers or convolutions between those of attention, and the layers that a small one has.
HYBRIDS = {
    "bailing_hybrid": ["linear_attention", "full_attention"],
    "kimi_linear": ["linear_attention", "full_attention"],
    "lfm3": ["conv", "full_attention"],
    "qwen3_5_moe_text": ["linear_attention", "full_attention"],
    "qwen3_5_text": ["linear_attention", "full_attention"],
    "qwen3_next": ["linear_attention", "full_attention"],
}
KV_OF_EVERY_HEAD = {*LATENT, "bailing_hybrid", "dots3_note_text", "kimi_linear"}

# Families that are refused: they have their own attention, or sinks per token.
_REFUSED = "bloom inkling2_text mpt".split()
# Families that only the tests of replaced layers load, to see their layers left.
_LEFT = ["dots3_note_text", "qwen4_exp_text"]
_KINDS = [
    ([*DECODERS, *LATENT, *HYBRIDS, *_REFUSED, *_LEFT], auto.MODEL_FOR_CAUSAL_LM_MAPPING),
    ([*ENCODERS, "megatron-bert"], auto.MODEL_FOR_MASKED_LM_MAPPING),
    ([*ENCODER_DECODERS, "bigbird_pegasus"], auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    (VISION, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING),
]


@functools.cache
def _kind(family: str):
    return next(mapping for families, mapping in _KINDS if family in families)


def since(release: str) -> pytest.MarkDecorator:
    """Skips a test under older releases of transformers, which scripts/matrix.sh runs too."""
    is_older = Version(transformers.__version__) < Version(release)
    return pytest.mark.skipif(is_older, reason=f"transformers {transformers.__version__} is older than {release}")


def _skip_what_is_not_there(family: str) -> None:
    """A release may lack a family, or its attention function. The newest one that is tested has all of them."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family in FAMILIES and "ALL_ATTENTION_FUNCTIONS" not in _source_of(family):
        pytest.skip(f"{family} has attention of its own in transformers {transformers.__version__}")


@functools.cache
def _source_of(family: str) -> str:
    """The source of the file that has a family's model."""
    return inspect.getsource(sys.modules[_kind(family)[CONFIG_MAPPING[family]].__module__])


def make_config(family: str, **changes):
    """A tiny configuration, with the settings that it takes from SIZES."""
    _skip_what_is_not_there(family)
    kind = CONFIG_MAPPING[family]
    taken = set(inspect.signature(kind.__init__).parameters)
    for base in kind.__mro__:
        taken |= set(getattr(base, "__annotations__", ()))
    # Latent attention has a kv head for every query head. The prompts have more than 4 keys to select from.
    sizes = SIZES | ({"num_key_value_heads": 4, "index_topk": 4} if family in KV_OF_EVERY_HEAD else {})
    if family in HYBRIDS:
        sizes |= {"layer_types": HYBRIDS[family]}
    # An alias is left out if the name that it stands for is there.
    sizes = {name: size for name, size in sizes.items() if kind.attribute_map.get(name, "") not in sizes}
    return kind(**{name: size for name, size in sizes.items() if name in taken | set(kind.attribute_map)} | changes)


def make_model(family: str, spread: float = 0.1, **changes):
    """A model in evaluation mode. `spread` is added to its weights, so that biases and norms are not trivial and scores
    differ; with 0 they stay as transformers draws them."""
    torch.manual_seed(0)
    config = make_config(family, **changes)
    model = _kind(family)[type(config)]._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    if hasattr(model, "generation_config") and model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.generation_config.decoder_start_token_id = 1
    return model


def set_attention(model, implementation: str) -> None:
    """Also of a model's parts whose configuration is a copy, such as the stacks of T5: before 5.23 transformers passes
    those over."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(implementation)


def padding(kind: str, batch: int = 3, length: int = 14) -> torch.Tensor:
    """[batch, length], 1 for real tokens; "left" and "right" pad the first row by 5 and the second by 1."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row, count in ((0, 5), (1, 1)):
        if kind == "left":
            mask[row, :count] = 0
        elif kind == "right":
            mask[row, -count:] = 0
    return mask


def inputs(family: str, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of the family's forward, for a padding mask [B, L]."""
    generator = torch.Generator().manual_seed(1)
    if family in VISION:
        return {"pixel_values": torch.randn(len(mask), 3, 32, 32, generator=generator)}
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=generator)
    if family in ENCODER_DECODERS:
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits(model, family: str, implementation: str, mask: torch.Tensor) -> torch.Tensor:
    """[rows, classes] of the real tokens."""
    set_attention(model, implementation)
    return _real_tokens(model(**_cast(inputs(family, mask), model.dtype)).logits, mask)


@torch.no_grad()
def states(model, family: str, implementation: str, mask: torch.Tensor) -> torch.Tensor:
    """The last hidden states [rows, hidden_size] of the real tokens."""
    set_attention(model, implementation)
    out = model(**_cast(inputs(family, mask), model.dtype), output_hidden_states=True)
    hidden = out.decoder_hidden_states if family in ENCODER_DECODERS else out.hidden_states
    return _real_tokens(hidden[-1], mask)


def _real_tokens(out: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return out[mask.bool()] if out.shape[:2] == mask.shape else out.flatten(0, -2)


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@torch.no_grad()
def generated(model, implementation: str, mask: torch.Tensor, **settings) -> torch.Tensor:
    """8 greedy tokens after a prompt, [B, prompt + 8]; for an encoder-decoder after its start token."""
    set_attention(model, implementation)
    prompt = inputs("llama", mask)
    return model.generate(**prompt, do_sample=False, min_new_tokens=8, max_new_tokens=8, **settings)


def backward(model, family: str, implementation: str) -> None:
    """Gradients of the loss of a left-padded batch, at positions where a real token predicts a token. Positions before
    the first real token have no key to attend, so eager's results for them are not compared."""
    model.zero_grad()
    set_attention(model, implementation)
    mask = padding("left")
    batch = inputs(family, mask)
    predicted = torch.zeros_like(mask)
    predicted[:, 1:] = mask[:, :-1] * mask[:, 1:]
    labels = batch["input_ids"].masked_fill(predicted == 0, -100)
    model(**batch, labels=labels).loss.backward()
