"""Models with recurrent layers between those of attention: from_hf against transformers, caches, tokens, refusals."""

import json

import attnpack
import pytest
import torch
from attnpack._C import checkpoints
from hf_checkpoints import edit_config, saved_once
from hf_families import since
from hybrid_families import HYBRIDS, SIZES, hybrid_peer
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

pytestmark = since("5.24")
TEXT = torch.randint(SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
EACH = pytest.mark.parametrize("name", HYBRIDS)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Gives the directory of a family's checkpoint, which is written once."""
    return saved_once(tmp_path_factory, hybrid_peer)


@pytest.fixture(scope="module")
def model_of(directory_of):
    made = {}
    return lambda name: made.setdefault(name, attnpack.CausalLM.from_hf(directory_of(name)))


@EACH
def test_both_languages_load_the_model_of_transformers(name, directory_of, model_of):
    model, peer = model_of(name), hybrid_peer(name)
    native = checkpoints.causal_lm_from_hf(str(directory_of(name)), torch.float32, None)
    with torch.no_grad():
        wanted = peer(TEXT).logits
        assert wanted.std() > 0.1
        for logits in (model(TEXT), native.forward(TEXT)):
            assert_close(logits, wanted, rtol=1e-4, atol=2e-4)
    kinds = {"RecurrentCache", "LatentCache" if name == "kimi_linear" else "DynamicCache"}
    assert {type(layer).__name__ for layer in model.model.new_cache().layers} == kinds


@EACH
def test_the_options_of_the_family_give_the_same_model(name, model_of):
    loaded = model_of(name)
    model = attnpack.CausalLM(96, 32, 3, 4, **HYBRIDS[name].ours).eval()
    assert model.load_state_dict(loaded.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(model(TEXT), loaded(TEXT))
        twin = model.cpp()
        assert_close(twin.forward(TEXT), model(TEXT), rtol=1e-5, atol=1e-5)
        assert torch.equal(attnpack.CausalLM.from_cpp(twin)(TEXT), model(TEXT))


@EACH
def test_every_cache_gives_the_tokens_of_transformers(name, model_of):
    model = model_of(name)
    wanted = hybrid_peer(name).generate(TEXT, max_new_tokens=8, do_sample=False)
    for cache in ["dynamic", "static", "sliding", "none"] + ([] if name == "kimi_linear" else ["paged", "int8"]):
        tokens = model.generate(TEXT, max_new_tokens=8, cache=cache)
        assert tokens.equal(wanted) or cache == "int8", cache
    held = model.model.new_cache()
    model.generate(TEXT, max_new_tokens=3, cache=held)
    assert len(held) == 22


@EACH
def test_gradients_are_those_of_transformers(name, directory_of, model_of):
    peer, model = hybrid_peer(name), model_of(name)
    weight = torch.randn(2, 20, 96, generator=torch.Generator().manual_seed(2))
    loss = (peer(TEXT).logits * weight).sum()
    embedding = torch.autograd.grad(loss, peer.get_input_embeddings().weight)[0]
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ours = torch.autograd.grad((model(TEXT) * weight).sum(), list(learned.values()), allow_unused=True)
    named = dict(zip(learned, ours, strict=True))
    scale = embedding.abs().max().item()
    assert_close(named["model.embed_tokens.weight"], embedding, rtol=1e-3, atol=1e-4 * scale)
    unused = [n for n, grad in named.items() if grad is None]
    assert all(".experts." in n for n in unused), unused  # that no token chose


@EACH
def test_rows_of_different_lengths_and_answers(name, model_of):
    model = model_of(name)
    lengths = torch.tensor([20, 13])
    together = model.generate(TEXT, max_new_tokens=5, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model.generate(TEXT[row : row + 1, :length], max_new_tokens=5)
        assert together[row, 20:].equal(alone[0, length:])
    answers = model.generate(TEXT, max_new_tokens=5, num_return_sequences=2)
    assert answers.equal(model.generate(TEXT, max_new_tokens=5).repeat_interleave(2, 0))


@EACH
def test_beams_by_reorder_and_no_crop(name, model_of):
    model = model_of(name)
    cache = model.model.new_cache()
    with torch.no_grad():
        model(TEXT, cache)
        cache.reorder([1, 0])
        step = model(TEXT[:, :1], cache)
        swapped = model(torch.cat([TEXT.flip(0), TEXT[:, :1]], 1))[:, -1:]
    assert_close(step, swapped, rtol=1e-4, atol=2e-4)
    before = cache.clone()
    with pytest.raises(ValueError, match="n: got 5 for a RecurrentCache that has read 21 positions: a state cannot"):
        cache.crop(5)
    assert [len(layer) for layer in cache.layers] == [21, 21, 21] and cache.nbytes == before.nbytes


def test_a_model_of_linear_attention():
    torch.manual_seed(0)
    recurrent = {"kind": "linear_attention", "feature_map": "elu", "decay": "learned"}
    model = attnpack.CausalLM(32, 24, 2, 4, hidden_dim=32, recurrent=recurrent).eval()
    ids = torch.randint(32, (2, 9))
    cache = model.model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache) for part in ids.split([5, 1, 3], 1)]
        assert_close(torch.cat(parts, 1), model(ids), rtol=1e-4, atol=1e-4)
    assert model.generate(ids, max_new_tokens=4).equal(model.generate(ids, max_new_tokens=4, cache="none"))


def test_layers_of_attention_get_fewer_kv_heads():
    torch.manual_seed(0)
    recurrent = {"kind": "mamba2", "num_v_heads": 4, "head_k_dim": 6, "head_v_dim": 8}
    layers = [{}, {"recurrent": False}, {}]
    model = attnpack.CausalLM(32, 24, 3, 4, hidden_dim=32, recurrent=recurrent, layer_settings=layers).eval()
    made = attnpack.convert.to_gqa(model, 2)
    before, after = model.state_dict(), made.state_dict()
    merged = [
        name for name in before if before[name].shape != after[name].shape or not torch.equal(before[name], after[name])
    ]
    assert merged == [f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv"]
    pairs = before[merged[0]].unflatten(0, (2, 2, 6)).mean(1).flatten(0, 1)
    assert_close(after[merged[0]], pairs)
    ids = torch.randint(32, (2, 9))
    assert made.generate(ids, max_new_tokens=4).equal(made.generate(ids, max_new_tokens=4, cache="none"))
    pure = attnpack.CausalLM(32, 24, 2, 4, hidden_dim=32, recurrent=recurrent)
    with pytest.raises(ValueError, match="model: got one whose layers are all recurrent, which have no kv heads"):
        attnpack.convert.to_gqa(pure, 2)


def test_wrong_options_are_named():
    for given, message in (
        ({"recurrent": {"kind": "mamba"}}, "recurrent: got kind 'mamba', want 'gated_delta_net', 'kimi_delta_"),
        ({"recurrent": {"heads": 2}}, "recurrent: got 'heads', want kind, num_v_heads, num_k_heads"),
        ({"recurrent": {"num_k_heads": 3}}, "num_k_heads: got 3, which does not divide num_v_heads 4"),
        ({"layer_settings": [{"recurrent": 3}, {}]}, "layer_settings"),
        ({"experts": {"hidden_dim": 8, "num_experts": 2, "top_k": 1, "shared_gate": True}}, "shared_gate: got True"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            attnpack.CausalLM(32, 24, 2, 4, **given)


@pytest.mark.parametrize("name, change, message", [
    ("qwen3_5", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "layer_types in config"),
    ("qwen3_5", {"attention_bias": True}, "attention_bias"),
    ("qwen3_next", {"linear_num_value_heads": 8}, "asks for|does not fit"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ("kimi_linear", {"qk_rope_head_dim": 0, "head_dim": 0}, "qk_rope_head_dim in config.json is 0, wants an int of"),
    ("kimi_linear", {"linear_attn_config": {"kda_layers": [9]}, "layer_types": None}, "names layer 9, wants 1 to 3"),
    ("lfm2", {"conv_bias": False}, "unexpected"),
    ("granitemoehybrid", {"layer_types": ["mamba", "slow", "mamba"]}, "wants 'attention' or 'mamba' for each of 3"),
    ("granitemoehybrid", {"mamba_n_heads": 7}, "mamba_n_heads in config.json is 7, which does not divide 64"),
    ("granitemoehybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit in config.json is"),
    ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act 'gelu' in config.json is not supported"),
    ("bamba", {"attn_layer_indices": [3]}, "names layer 3, wants 0 to 2"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(name, change, message, directory_of, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(directory_of(name) / "model.safetensors")
    (tmp_path / "config.json").write_text((directory_of(name) / "config.json").read_text())
    edit_config(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        attnpack.CausalLM.from_hf(tmp_path)


def test_kimi_reads_the_object_of_released_checkpoints(directory_of, tmp_path):
    config = json.loads((directory_of("kimi_linear") / "config.json").read_text())
    for flat in ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        config.pop(flat, None)
    config["linear_attn_config"] = {"head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 4,
                                    "kda_layers": [1, 3], "full_attn_layers": [2]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(directory_of("kimi_linear") / "model.safetensors")
    with torch.no_grad():
        assert_close(attnpack.CausalLM.from_hf(tmp_path)(TEXT), hybrid_peer("kimi_linear")(TEXT).logits,
                     rtol=1e-4, atol=2e-4)  # fmt: skip


def test_a_convolution_in_three_tensors_wants_all_of_them(directory_of, tmp_path):
    state = load_file(directory_of("olmo_hybrid") / "model.safetensors")
    lost = next(name for name in state if name.endswith("linear_attn.k_conv1d.weight"))
    state.pop(lost)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory_of("olmo_hybrid") / "config.json").read_text())
    with pytest.raises(ValueError, match="conv1d.weight has shape"):
        attnpack.CausalLM.from_hf(tmp_path)
