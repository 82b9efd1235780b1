"""Every module with inputs for a call: the cases of the parity and module tests."""

from collections.abc import Callable
from dataclasses import dataclass

import attnpack
import torch
from torch import Tensor, nn

EMBED = 24
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}


@dataclass(frozen=True)
class ModuleCase:
    name: str
    build: Callable[..., nn.Module]  # takes device and dtype
    inputs: Callable[[], tuple[Tensor, ...]]
    attends: bool = True


def _x(length: int = 5, width: int = EMBED) -> Tensor:
    return torch.randn(2, length, width, requires_grad=True)


def _rope(**settings) -> attnpack.RotaryEmbedding:
    return attnpack.RotaryEmbedding(6, **settings)


def _attention(**factory) -> attnpack.GroupedQueryAttention:
    return attnpack.GroupedQueryAttention(EMBED, 4, 2, rope=_rope(), **factory)


def _latent(rotated: int = 6, **settings) -> attnpack.MultiHeadLatentAttention:
    return attnpack.MultiHeadLatentAttention(EMBED, 4, **{**LATENT, "qk_rope_head_dim": rotated}, **settings)


def _decoder_block(cross: bool = False, norm: str = "rms", pre_norm: bool = True, **factory) -> attnpack.DecoderBlock:
    other = attnpack.MultiHeadAttention(EMBED, 4, **factory) if cross else None
    feed_forward = attnpack.FeedForward(EMBED, 32, **factory)
    return attnpack.DecoderBlock(
        _attention(**factory), feed_forward, norm=norm, pre_norm=pre_norm, cross_attention=other
    )


def _encoder_block(norm: str = "rms", residual_scale: float = 1.0, **factory) -> attnpack.EncoderBlock:
    feed_forward = attnpack.FeedForward(EMBED, 32, activation="gelu", bias=True, **factory)
    attention = attnpack.MultiHeadAttention(EMBED, 4, **factory)
    return attnpack.EncoderBlock(attention, feed_forward, norm=norm, residual_scale=residual_scale)


def _layout(layout: str, norm: str = "rms", residual_scale: float = 1.0, **factory) -> attnpack.DecoderBlock:
    parts = (_attention(**factory), attnpack.FeedForward(EMBED, 32, **factory))
    return attnpack.DecoderBlock(*parts, norm=norm, layout=layout, residual_scale=residual_scale)


def _learned_positions(**factory) -> attnpack.Decoder:
    tables = {"embed_tokens": nn.Embedding(32, EMBED, **factory), "embed_positions": nn.Embedding(9, EMBED, **factory)}
    return attnpack.Decoder([_decoder_block(**factory)], embed_scale=2.0, **tables)


def _encoder_decoder(**factory) -> attnpack.EncoderDecoder:
    encoder = attnpack.Encoder([_encoder_block(**factory)])
    return attnpack.EncoderDecoder(encoder, attnpack.Decoder([_decoder_block(cross=True, **factory)], norm="layer"))


def _causal_lm(**settings) -> attnpack.CausalLM:
    return attnpack.CausalLM(32, EMBED, 2, 4, 2, hidden_dim=32, **settings)


def _ids() -> Tensor:
    return torch.randint(32, (2, 5))


CASES = [
    ModuleCase("self_attention", lambda **f: attnpack.SelfAttention(EMBED, 16, causal=True, **f), lambda: (_x(),)),
    ModuleCase("self_attention_bias", lambda **f: attnpack.SelfAttention(EMBED, bias=True, **f), lambda: (_x(),)),
    ModuleCase("multi_head", lambda **f: attnpack.MultiHeadAttention(EMBED, 4, causal=True, **f), lambda: (_x(),)),
    ModuleCase(
        "multi_head_cross",
        lambda **f: attnpack.MultiHeadAttention(EMBED, 4, kdim=10, vdim=10, bias=True, out_bias=False, **f),
        lambda: (_x(), _x(7, 10)),
    ),
    ModuleCase(
        "grouped",
        lambda **f: attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, qk_norm=True, rope=_rope(), **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "grouped_uneven",
        lambda **f: attnpack.GroupedQueryAttention(EMBED, 4, 2, head_map=[0, 1, 0, 0], scale=0.3, head_dim=8, **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "multi_query",
        lambda **f: attnpack.MultiQueryAttention(
            EMBED, 4, bias=True, rope=_rope(interleaved=True, scaling={"type": "linear", "factor": 2.0}), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "grouped_yarn",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, rope=_rope(scaling={"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "grouped_dynamic",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, rope=_rope(max_positions=3, scaling={"rope_type": "dynamic", "factor": 4.0}), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "windowed",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, window=(2, 0), softcap=2.0, sinks=True, rope=_rope(), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "alibi",
        lambda **f: attnpack.MultiHeadAttention(EMBED, 6, causal=True, alibi=True, **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "latent",
        lambda **f: _latent(causal=True, q_lora_rank=8, bias=True, rope=_rope(interleaved=True, scaling=YARN), **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "latent_absorbed", lambda **f: _latent(path="absorbed", rope=_rope(), causal=True, **f), lambda: (_x(),)
    ),
    ModuleCase("latent_plain", lambda **f: _latent(0, latent_norm=False, **f), lambda: (_x(),)),
    ModuleCase("latent_folded", lambda **f: _latent(folded=True, rope=_rope(), **f), lambda: (_x(),)),
    ModuleCase("latent_cross", lambda **f: _latent(causal=True, **f), lambda: (_x(), _x(7))),
    ModuleCase(
        "projected_windowed",
        lambda **f: attnpack.ProjectedAttention(4, 2, 6, window=(1, 2), softcap=1.5, **f),
        lambda: (_x(), _x(5, 12), _x(5, 12)),
    ),
    ModuleCase(
        "projected",
        lambda **f: attnpack.ProjectedAttention(4, 2, 6, causal=True, rope=_rope(), **f),
        lambda: (_x(), _x(5, 12), _x(5, 12)),
    ),
    ModuleCase(
        "gated_by_head",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, gate="head", gate_activation="softplus", rope=_rope(), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "gated_by_element",
        lambda **f: attnpack.MultiQueryAttention(EMBED, 4, gate="element", bias=True, head_dim=8, **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "keys_as_values",
        lambda **f: attnpack.MultiHeadAttention(EMBED, 4, kdim=10, keys_as_values=True, qk_norm=True, **f),
        lambda: (_x(), _x(7, 10)),
    ),
    ModuleCase(
        "values_normed",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, qk_norm={"values": True, "eps": 1e-3}, q_lora_rank=9, bias=True, rope=_rope(), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "latent_gated",
        lambda **f: _latent(causal=True, gate="element", rope=_rope(), q_lora_rank=8, **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "latent_folded_gated", lambda **f: _latent(folded=True, gate="head", rope=_rope(), **f), lambda: (_x(),)
    ),
    ModuleCase(
        "differential_first",
        lambda **f: attnpack.DifferentialAttention(
            EMBED, 8, 4, version=1, head_dim=6, causal=True, bias=True, rope=_rope(), lambda_init=0.3, **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "differential_second",
        lambda **f: attnpack.DifferentialAttention(EMBED, 4, 2, causal=True, window=(2, 0), softcap=2.0, **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "differential_cross", lambda **f: attnpack.DifferentialAttention(EMBED, 4, 4, **f), lambda: (_x(), _x(7))
    ),
    ModuleCase(
        "sparse_all_keys",
        lambda **f: attnpack.SparseAttention(EMBED, 4, 2, selector="mean", top_k=9, causal=True, bias=True, **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "sparse_blocks",
        lambda **f: attnpack.SparseAttention(
            EMBED, 4, 2, selector="max", top_k=1, key_block=2, num_local=0, causal=True, rope=_rope(), softcap=2.0, **f
        ),
        lambda: (_x(9),),
    ),
    ModuleCase(
        "gated_delta_net",
        lambda **f: attnpack.GatedDeltaNet(EMBED, 2, 4, head_k_dim=5, head_v_dim=6, norm_eps=1e-5, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase(
        "kimi_delta_attention",
        lambda **f: attnpack.KimiDeltaAttention(EMBED, 2, head_dim=5, conv_kernel_size=3, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase(
        "linear_attention",
        lambda **f: attnpack.LinearAttention(EMBED, 4, feature_map="elu", decay="learned", bias=True, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase(
        "mamba2",
        lambda **f: attnpack.Mamba2(EMBED, 4, head_dim=6, state_dim=5, num_groups=2, bias=True, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase(
        "gated_convolution",
        lambda **f: attnpack.GatedConvolution(EMBED, bias=True, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase("encoder_block", _encoder_block, lambda: (_x(),)),
    ModuleCase("encoder_block_layer_norm", lambda **f: _encoder_block("layer", **f), lambda: (_x(),)),
    ModuleCase("decoder_block", _decoder_block, lambda: (_x(),)),
    ModuleCase("decoder_block_post_norm", lambda **f: _decoder_block(pre_norm=False, **f), lambda: (_x(),)),
    ModuleCase("decoder_block_cross", lambda **f: _decoder_block(cross=True, **f), lambda: (_x(), _x(7))),
    ModuleCase("encoder", lambda **f: attnpack.Encoder([_encoder_block(**f)], norm=None), lambda: (_x(),)),
    ModuleCase("decoder", lambda **f: attnpack.Decoder([_decoder_block(**f), _decoder_block(**f)]), lambda: (_x(),)),
    ModuleCase(
        "qk_norm_of_all_heads",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, qk_norm={"all_heads": True, "plus_one": True, "eps": 1e-3}, rope=_rope(), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "qk_norm_after_rope",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, qk_norm={"after_rope": True, "values": True}, rope=_rope(), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "qk_norm_after_rope_cross",
        lambda **f: attnpack.GroupedQueryAttention(EMBED, 4, 2, qk_norm={"after_rope": True}, rope=_rope(), **f),
        lambda: (_x(), _x(7)),
    ),
    ModuleCase(
        "qk_norm_without_weights",
        lambda **f: attnpack.GroupedQueryAttention(
            EMBED, 4, 2, causal=True, qk_norm={"weights": False, "eps": 1e-3}, rope=_rope(), **f
        ),
        lambda: (_x(),),
    ),
    ModuleCase(
        "grouped_in_chunks",
        lambda **f: attnpack.GroupedQueryAttention(EMBED, 4, 2, causal=True, chunk=2, rope=_rope(), **f),
        lambda: (_x(),),
    ),
    ModuleCase(
        "layer_tail",
        lambda **f: attnpack.LayerTail(EMBED, input_dim=6, **f),
        lambda: (_x(), _x(5, 6)),
        attends=False,
    ),
    ModuleCase("layer_tail_factor", lambda **f: attnpack.LayerTail(EMBED, **f), lambda: (_x(),), attends=False),
    ModuleCase(
        "causal_lm_shared_keys",
        lambda **f: _causal_lm(
            layout="sandwich",
            activation="geglu_tanh",
            qk_norm={"values": True},
            tail={"input_dim": 6},
            layer_settings=[{"keys_as_values": True}, {"kv_from": 0, "hidden_dim": 20}],
            **f,
        ),
        lambda: (_ids(),),
    ),
    ModuleCase(
        "causal_lm_heads_by_layer",
        lambda **f: _causal_lm(
            tail={},
            layer_settings=[
                {"head_dim": 6, "num_kv_heads": 4, "chunk": 2},
                {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
            ],
            **f,
        ),
        lambda: (_ids(),),
    ),
    ModuleCase(
        "decoder_block_layer_no_bias",
        lambda **f: _layout("parallel", norm="layer_no_bias", residual_scale=0.3, **f),
        lambda: (_x(),),
    ),
    ModuleCase("encoder_block_residual_scale", lambda **f: _encoder_block(residual_scale=0.3, **f), lambda: (_x(),)),
    ModuleCase("decoder_block_sandwich", lambda **f: _layout("sandwich", norm="rms_plus_one", **f), lambda: (_x(),)),
    ModuleCase("decoder_block_output", lambda **f: _layout("output", **f), lambda: (_x(),)),
    ModuleCase("decoder_block_parallel", lambda **f: _layout("parallel", norm="layer", **f), lambda: (_x(),)),
    ModuleCase("decoder_block_parallel_two", lambda **f: _layout("parallel_two", **f), lambda: (_x(),)),
    ModuleCase("decoder_learned_positions", _learned_positions, lambda: (_ids(),)),
    ModuleCase("encoder_decoder", _encoder_decoder, lambda: (_x(), _x(7))),
    ModuleCase("causal_lm", _causal_lm, lambda: (_ids(),)),
    ModuleCase("causal_lm_tied", lambda **f: _causal_lm(tie_embeddings=True, bias=True, **f), lambda: (_ids(),)),
    ModuleCase(
        "causal_lm_latent",
        lambda **f: attnpack.CausalLM(32, EMBED, 2, 4, hidden_dim=32, rope_interleaved=True, latent=LATENT, **f),
        lambda: (_ids(),),
    ),
    ModuleCase(
        "causal_lm_of_many_kinds",
        lambda **f: _causal_lm(
            norm="rms_plus_one",
            layout="sandwich",
            activation="geglu_tanh",
            embed_scale=3.0,
            final_softcap=2.0,
            scores={"softcap": 3.0, "sinks": True, "scale": 0.3, "rope_dim": 4},
            qk_norm={"plus_one": True},
            residual_scale=0.6,
            logit_scale=0.4,
            head_bias=True,
            experts={"hidden_dim": 8, "num_experts": 3, "top_k": 2},
            layer_settings=[{"window": (2, 0), "rope_base": 100.0, "experts": False}, {"rope": False}],
            **f,
        ),
        lambda: (_ids(),),
    ),
    ModuleCase(
        "causal_lm_query_scale",
        lambda **f: _causal_lm(
            qk_norm=True,
            scores={"query_scale": {"type": "llama4", "floor_scale": 2, "attn_scale": 0.5}},
            layer_settings=[{"query_scale": False}, {"rope": False, "qk_norm": False}],
            **f,
        ),
        lambda: (_ids(),),
    ),
    ModuleCase(
        "experts_weigh_inputs",
        lambda **f: attnpack.MixtureOfExperts(EMBED, 8, 4, 2, scores="sigmoid", weigh_inputs=True, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase("experts", lambda **f: attnpack.MixtureOfExperts(EMBED, 8, 4, 2, **f), lambda: (_x(),), attends=False),
    ModuleCase(
        "experts_in_groups",
        lambda **f: attnpack.MixtureOfExperts(
            EMBED,
            8,
            4,
            2,
            scores="sigmoid",
            normalize=True,
            scaling=1.5,
            num_groups=2,
            top_groups=1,
            correction=True,
            gate_bias=True,
            activation="clamped_swiglu",
            bias=True,
            shared_dim=12,
            **f,
        ),
        lambda: (_x(),),
        attends=False,
    ),  # fmt: skip
    ModuleCase(
        "rms_norm_plus_one", lambda **f: attnpack.RMSNorm(EMBED, plus_one=True, **f), lambda: (_x(),), attends=False
    ),
    *(
        ModuleCase(
            name,
            lambda name=name, **f: attnpack.FeedForward(EMBED, 32, activation=name, **f),
            lambda: (_x(),),
            attends=False,
        )
        for name in ("geglu", "geglu_tanh", "clamped_swiglu", "gelu_tanh", "relu", "relu2")
    ),
    ModuleCase("rms_norm", lambda **f: attnpack.RMSNorm(EMBED, **f), lambda: (_x(),), attends=False),
    ModuleCase("swiglu", lambda **f: attnpack.FeedForward(EMBED, 32, **f), lambda: (_x(),), attends=False),
    ModuleCase(
        "gelu",
        lambda **f: attnpack.FeedForward(EMBED, 32, activation="gelu", bias=True, **f),
        lambda: (_x(),),
        attends=False,
    ),
    ModuleCase(
        "rotary",
        lambda **f: attnpack.RotaryEmbedding(4, base=500.0, **f),
        lambda: (torch.randn(2, 3, 5, 6, requires_grad=True),),
        attends=False,
    ),
]


def make_case(case: ModuleCase, seed: int = 0, **factory) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module with random parameters (norm weights too, which start at 1), and inputs."""
    torch.manual_seed(seed)
    module = case.build(**factory)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module, case.inputs()
