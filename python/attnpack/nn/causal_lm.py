"""A decoder-only language model. Its generation loop runs in C++."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import cpp
from ..cache import ModelCache, check_kind
from ..errors import MODEL_CACHE, check_ids, reject_keywords
from ..ops import nested, sinusoidal_positions
from .block import DecoderBlock
from .cached_twin import generate_by_twin
from .linear import linear, project
from .native import NativeModule, maker_of
from .sharded_attention import ShardedAttention, check_lengths, refuse_context_parallel
from .stack import Decoder

_BLOCK_PARTS = ("tail", "self_attn", "mlp")  # in the order in which they draw their numbers


class CausalLM(NativeModule):
    """A language model with the layers and state dict names of Llama (Touvron et al. 2023), or those of a relative.

    Args:
        vocab_size, embed_dim, num_layers, num_heads: the sizes.
        num_kv_heads: default num_heads.
        head_dim: default embed_dim / num_heads.
        hidden_dim: width inside the feed-forwards; default 4 * embed_dim.
        max_positions: length of the training sequences; longer sequences are legal.
        rope_base, rope_scaling: base and scaling of the RotaryEmbedding.
        eps: eps of the norms.
        tie_embeddings: use the embedding as the head too. Then there is no lm_head, and an lm_head in a state dict is
            ignored.
        init_std: standard deviation of the new embedding, as in Llama and GPT-2. It is small, so that with
            tie_embeddings the first loss is near ln vocab_size.
        qk_norm: RMSNorm on queries and keys, as in GroupedQueryAttention.
        window: (left, right) of every layer, as in GroupedQueryAttention; a checkpoint's sliding_window of W tokens is
            (W - 1, 0).
        bias: on q, k and v; out_bias: on o_proj, default as bias; mlp_bias: in the feed-forwards.
        rope_interleaved: `interleaved` of the RotaryEmbedding.
        activation: of the feed-forwards, as in FeedForward.
        norm, layout: kind and places of the norms, as in DecoderBlock.
        position_embedding: "rope"; "learned", a table of max_positions rows that is added to the embeddings;
            "sinusoidal", the same with the fixed rows of ops.sinusoidal_positions; or "none".
        embed_scale: factor on the embeddings.
        residual_scale: factor on what attention and feed-forward add, as in DecoderBlock.
        head_bias: a bias on the logits; not together with tie_embeddings.
        logit_scale: factor on the logits.
        final_softcap: c > 0: logits become c * tanh(logit / c).
        dropout, attention_dropout: in training, dropout of the embeddings and of what each block adds, and that of the
            probabilities.
        scores: what attention has beside the usual: a dict with `softcap`, `sinks`, `alibi`, `scale` as in
            GroupedQueryAttention, `query_scale` and `gate` too, and `rope_dim`, the first dims of a head that rotate,
            default all.
        experts: a MixtureOfExperts in place of each feed-forward: a dict with its keywords but for embed_dim.
        layer_settings: where layers differ, a dict for each, with what this layer has of its own: `window` ((-1, -1)
            for none), `rope_base`, `rope_scaling`, `layout`, `num_kv_heads`, `head_dim`, `hidden_dim`; `chunk` and
            `keys_as_values` as in GroupedQueryAttention; `kv_from`, the earlier layer whose keys and values it reads;
            `rope` False for no rotation, `qk_norm` False for no norm on queries and keys, `query_scale` False where the
            model has one, `experts` False for the plain feed-forward, `recurrent` False for attention in a model with
            recurrent layers.
        recurrent: a recurrent layer in the place of each attention: a dict with its `kind`, "gated_delta_net",
            "kimi_delta_attention", "linear_attention", "mamba2" or "gated_convolution", and keywords of that module:
            num_v_heads (the heads of a kind; default num_heads), num_k_heads, head_k_dim (the head_dim of a kind;
            default embed_dim / num_v_heads), head_v_dim, conv_kernel_size, norm_eps (default eps), allow_neg_eigval,
            bias, conv_bias, feature_map, decay; of "mamba2" num_k_heads is num_groups (default 1), head_k_dim
            state_dim and head_v_dim head_dim. Its caches are RecurrentCaches, which cannot be cropped.
        tail: the end of each layer, behind its feed-forward: a dict with `input_dim` and `vocab_size`, both None where
            it is a factor; see LayerTail and LayerInputTable (Gemma 4).
        latent: latent attention in every layer: a dict with kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and
            v_head_dim, and optionally q_lora_rank, latent_norm, query_scale and path, as in MultiHeadLatentAttention,
            which also takes bias. Do not combine it with num_kv_heads, head_dim, qk_norm, window, scores and out_bias.
    """

    _cpp_class = cpp.CausalLM
    _generate: Callable[..., Tensor] | None = None
    """A loop in the place of C++'s, for a model that several processes share."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        hidden_dim: int | None = None,
        max_positions: int = 2048,
        rope_base: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        eps: float = 1e-6,
        tie_embeddings: bool = False,
        init_std: float = 0.02,
        qk_norm: bool | dict[str, Any] = False,
        window: tuple[int, int] | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        mlp_bias: bool = False,
        rope_interleaved: bool = False,
        latent: dict[str, Any] | None = None,
        activation: str = "swiglu",
        norm: str = "rms",
        layout: str | None = None,
        position_embedding: str = "rope",
        embed_scale: float = 1.0,
        residual_scale: float = 1.0,
        head_bias: bool = False,
        logit_scale: float = 1.0,
        final_softcap: float = 0.0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        scores: dict[str, Any] | None = None,
        experts: dict[str, Any] | None = None,
        recurrent: dict[str, Any] | None = None,
        tail: dict[str, Any] | None = None,
        layer_settings: Sequence[dict[str, Any]] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        twin = self._configure(locals())
        factory = {"device": device, "dtype": dtype}

        def table(rows: int) -> nn.Embedding:
            made = nn.Embedding(rows, embed_dim, **factory)
            made.weight.data.mul_(init_std)  # torch draws it from N(0, 1)
            return made

        tables = {"embed_tokens": table(vocab_size)}
        if position_embedding == "learned":
            tables["embed_positions"] = table(max_positions)
        elif position_embedding == "sinusoidal":
            tables["embed_positions"] = fixed = table(max_positions).requires_grad_(False)
            fixed.weight.copy_(sinusoidal_positions(max_positions, embed_dim))
        parts = dict(twin.named_modules().items())
        blocks = [
            self._block(settings, {name: parts.get(f"model.layers.{i}.{name}") for name in _BLOCK_PARTS}, **factory)
            for i, settings in enumerate(twin.resolved_layers())
        ]
        if "model.layer_inputs" in parts:
            tables["layer_inputs"] = maker_of(parts["model.layer_inputs"])(**factory)
        self.model = Decoder(blocks, norm=norm, eps=eps, embed_scale=embed_scale, dropout=dropout, **tables)
        self.lm_head = None if tie_embeddings else nn.Linear(embed_dim, vocab_size, bias=head_bias, **factory)
        self._made_with = copy.deepcopy(_parts(self))
        self.register_load_state_dict_pre_hook(_drop_tied_head)

    def _block(self, settings: dict[str, Any], twins: dict[str, Any], **factory: Any) -> DecoderBlock:
        """The block of a layer with these settings, in which nothing is left to the model's; its parts are like their
        twins."""
        shared = {name: getattr(self, name) for name in ("norm", "eps", "dropout", "residual_scale")}
        shared |= {"layout": settings["layout"], "kv_from": settings["kv_from"]}
        made = {name: maker_of(twin)(**factory) for name, twin in twins.items() if twin is not None}
        return DecoderBlock(made["self_attn"], made["mlp"], tail=made.get("tail"), **shared)

    @classmethod
    def from_gguf(
        cls,
        path: str | bytes | os.PathLike,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_positions: int | None = None,
        weights: str = "expanded",
    ) -> CausalLM:
        """The model of a GGUF file, in evaluation mode: Llama and the architectures that `checkpoints.build` lists.

        weights="stored" keeps quantised weights as the file holds them, and multiplies them as they are: such a model
        has no gradients. `checkpoints.build` says what stays. They are mapped from the file, which must stay as it is
        while a model uses it: if the file is overwritten, weights change, and if it is cut, reading them ends the
        process (SIGBUS).
        """
        from ..checkpoints import build

        return build.from_gguf(cls, path, dtype=dtype, device=device, max_positions=max_positions, weights=weights)

    @classmethod
    def from_hf(
        cls,
        directory: str | bytes | os.PathLike,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_positions: int | None = None,
    ) -> CausalLM:
        """The model of a Hugging Face directory, in evaluation mode: Llama and the families that `checkpoints.build`
        lists."""
        from ..checkpoints import build

        return build.from_hf(cls, directory, dtype=dtype, device=device, max_positions=max_positions)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder blocks."""
        return self.model.layers

    def forward(
        self,
        ids: Tensor,
        cache: ModelCache | None = None,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Logits [B, L, vocab_size].

        Args:
            ids: int64 [B, L]. Jagged nested ids [B, L*] give nested logits [B, L*, vocab_size]: those of one call per
                sequence, without padding, also for training. They take no cache, mask or lengths.
            cache: the tokens continue the cached sequence. The cache is left as it was by a call that raises.
            mask: broadcastable to [B, Hq, L, keys]; it applies in addition to causality.
            positions: int64 [L] or [B, L], for RoPE; default the positions after the cached ones.
            lengths: [B], the number of valid tokens of each right-padded row.
        """
        reject_keywords(unknown, MODEL_CACHE)
        check_ids("ids", nested.one_row("ids", ids))
        if nested.is_nested(ids):
            nested.refuse(cache=cache, mask=mask, lengths=lengths)
        check_lengths("lengths", lengths, ids)
        hidden = self.model(ids, cache=cache, mask=mask, positions=positions, kv_lens=lengths)
        if self.lm_head is None:
            logits = linear(hidden, self.model.embed_tokens.weight)
        else:
            logits = project(self.lm_head, hidden)
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        return self.final_softcap * torch.tanh(logits / self.final_softcap) if self.final_softcap else logits

    def generate(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int,
        cache: str | ModelCache = "dynamic",
        num_return_sequences: int = 1,
        lengths: Tensor | None = None,
        stop_tokens: int | Iterable[int] = (),
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        callback: Callable[[Tensor], bool | None] | None = None,
        **unknown: Any,
    ) -> Tensor:
        """The prompt followed by the new tokens, [B * num_return_sequences, L + new]. The whole loop runs in C++.

        Args:
            ids: the prompt, int64 [B, L].
            max_new_tokens: the limit. Fewer tokens come if all rows have stopped, or if the callback ends generation.
            cache: "dynamic", "static" (allocated at once), "sliding" (SlidingWindowCaches for layers with a window,
                "dynamic" for the others), "paged" (PagedCaches), "int8", "int4" (QuantizedCaches; int4 with
                exact_first=4, exact_last=128), "none" (each token computes everything anew), or a ModelCache: the
                prompt then continues the cached sequence. A row that has stopped appends its fill tokens to the cache
                while other rows run.
            num_return_sequences: answers to each prompt, which follow each other in the result. The prompt runs once.
                Its answers share its pages in PagedCaches, other caches copy their rows. Greedy answers are equal.
                Tokens are those of a prompt that is repeated in `ids`, as far as rounding in the linear layers allows.
                A ModelCache then has B * num_return_sequences sequences; StaticCaches in it are refused.
            lengths: [B], the number of valid tokens of each right-padded prompt. A row continues at its own position,
                but its new tokens are in the columns from L on.
            stop_tokens: a number or several. A row that gives one of them stops; it is filled with that token while
                other rows run.
            temperature, top_k, top_p: sample from softmax(logits / temperature), restricted to the top_k likeliest
                tokens and to the fewest tokens that hold top_p of the probability. Tokens that tie with the last of
                the top_k stay too, and top_k=0 is no limit, as in transformers. Greedy if none of the three is given,
                or at temperature 0.
            seed: seed of the sampling, 0 to 2**64 - 1; default torch's generator.
            callback: a function of each step's tokens [B]; if it returns False, generation ends.

        Raises:
            ValueError: an argument does not fit. TypeError: C++ cannot run this model, see `cpp()`.
        """
        reject_keywords(unknown, MODEL_CACHE, "generate")
        refuse_context_parallel("generate is called", "call it outside, with the whole prompt on each rank")
        if not isinstance(cache, str):
            check_kind(cache, ModelCache, "generate")
        arguments = {
            "max_new_tokens": max_new_tokens,
            "num_return_sequences": num_return_sequences,
            "lengths": lengths,
            "stop_tokens": stop_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "callback": callback,
        }
        first_cache = cache.layers[0] if isinstance(cache, ModelCache) else None
        loop = first_cache.generate if isinstance(first_cache, ShardedAttention) else self._generate
        return (loop or generate_by_twin)(self, ids, cache=cache, **arguments)

    def _twin(self) -> cpp.CausalLM:
        if not _same_parts(self._made_with, _parts(self)):
            raise TypeError(
                "attnpack: CausalLM has other layers or settings than it was made with, and its C++ twin is made from "
                "the same arguments. Build the model with the arguments that give these, or call the Python module"
            )
        return super()._twin()


def _parts(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Type and plain attributes (causal, scale, eps ...) of each module of attnpack in the model."""
    native = (child for child in model.modules() if isinstance(child, NativeModule))
    return [
        (type(child).__name__, {k: v for k, v in vars(child).items() if not k.startswith("_") and k != "training"})
        for child in native
    ]


def _same_parts(before: list[tuple[str, dict[str, Any]]], now: list[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the modules have the same types and settings. Attributes that were added later do not count."""
    return [kind for kind, _ in before] == [kind for kind, _ in now] and all(
        was.items() <= settings.items() for (_, was), (_, settings) in zip(before, now, strict=True)
    )


def _drop_tied_head(model: CausalLM, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Drops lm_head from the state dict of a tied model: some checkpoints store the embedding a second time."""
    if model.lm_head is None:
        state_dict.pop(prefix + "lm_head.weight", None)
