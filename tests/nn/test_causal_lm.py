"""CausalLM.generate: greedy and sampled, every cache, ragged prompts, stop tokens, callback, bad input."""

import copy
import math
import pickle
import threading

import attnpack
import pytest
import torch
from latent_cases import HEADS, SIZES, E
from small_lm import greedy, small_lm
from torch import nn
from transformers.generation.logits_process import TopKLogitsWarper


@pytest.fixture(scope="module")
def model():
    return small_lm()


IDS = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_greedy(model, cache):
    tokens = model.generate(IDS, max_new_tokens=12, cache=cache)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, greedy(model, IDS, 12))
    assert tokens[:, 5:].unique().numel() > 4
    assert torch.equal(model.generate(IDS, max_new_tokens=0, cache=cache), IDS)


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_right_padded_prompts_go_on_at_their_own_position(model, cache):
    tokens = model.generate(IDS, max_new_tokens=6, cache=cache, lengths=torch.tensor([3, 5]))
    assert torch.equal(tokens[:, :5], IDS)
    assert torch.equal(tokens[0, 5:], greedy(model, IDS[:1, :3], 6)[0, 3:])
    assert torch.equal(tokens[1, 5:], greedy(model, IDS[1:], 6)[0, 5:])


def test_forward_takes_lengths_and_cache(model):
    lengths, cache = torch.tensor([3, 5]), attnpack.ModelCache(2)
    with torch.no_grad():
        model(IDS, cache, lengths=lengths)
        assert cache.lengths.tolist() == [3, 5]
        token = torch.tensor([[11], [12]])
        out = model(token, cache)
        whole = model(torch.cat([IDS[:1, :3], token[:1]], 1))
        torch.testing.assert_close(out[:1], whole[:, -1:], rtol=1e-4, atol=1e-4)


def test_positions_reach_every_layer(model):
    """RoPE that is stretched by 2 gives, at positions twice as far, what plain RoPE gives."""
    stretched = attnpack.CausalLM(50, 24, 2, 4, 2, hidden_dim=48, rope_scaling={"rope_type": "linear", "factor": 2.0})
    stretched.load_state_dict(model.state_dict())
    wanted, positions = model(IDS), 2 * torch.arange(5)
    for each in (stretched, stretched.cpp()):
        torch.testing.assert_close(each.forward(IDS, positions=positions), wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(each.forward(IDS), wanted, atol=1e-2)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_ones_own_is_filled_and_continued(model, kind):
    cache = attnpack.ModelCache(2)
    if kind == "static":
        cache = attnpack.ModelCache([attnpack.StaticCache(2, 2, 32, 6) for _ in range(2)])
    first = model.generate(IDS, max_new_tokens=4, cache=cache)
    assert len(cache) == 8 and cache[1].k.shape == (2, 2, 8, 6)  # the last token was not fed back
    with torch.no_grad():
        fresh = attnpack.ModelCache(2)
        model(first[:, :-1], fresh)
    torch.testing.assert_close(cache[1].k, fresh[1].k, rtol=1e-4, atol=1e-5)
    more = model.generate(first[:, -1:], max_new_tokens=3, cache=cache)
    assert torch.equal(torch.cat([first, more[:, 1:]], 1), greedy(model, IDS, 7))


def test_a_short_cache_is_refused_before_anything_is_written(model):
    need = IDS.size(1) + 4  # the last new token is not appended
    short, long = (
        attnpack.ModelCache([attnpack.StaticCache(2, 2, room, 6) for _ in range(2)]) for room in (need - 1, need)
    )
    with pytest.raises(ValueError, match=f"cache: got room for {need - 1} positions, want {need}.*longer"):
        model.generate(IDS, max_new_tokens=5, cache=short)
    assert [layer.lengths.tolist() for layer in short] == [[0, 0]] * 2
    assert torch.equal(model.generate(IDS, max_new_tokens=5, cache=long), model.generate(IDS, max_new_tokens=5))


def test_stop_tokens_end_rows_and_the_loop(model):
    """Row 0 stops first, is filled with the token that stopped it, and the loop ends when row 1 has stopped too."""
    free = model.generate(IDS, max_new_tokens=12)[:, 5:].tolist()
    stops = (free[0][2], free[1][5])
    ends = [next(step for step, token in enumerate(row) if token in stops) for row in free]
    assert ends == [2, 5] and free[0][3] not in stops
    tokens = model.generate(IDS, max_new_tokens=12, stop_tokens=stops)
    assert torch.equal(tokens[:, :5], IDS)
    assert tokens[:, 5:].tolist() == [free[0][:2] + 4 * [stops[0]], free[1][:6]]
    assert stops[0] not in free[1]
    tokens = model.generate(IDS, max_new_tokens=12, stop_tokens=stops[:1])
    assert tokens[:, 5:].tolist() == [free[0][:2] + 10 * [stops[0]], free[1]]
    alone = model.generate(IDS[:1], max_new_tokens=12, stop_tokens=[stops[0]])
    assert alone[0, 5:].tolist() == free[0][:3]


@pytest.mark.parametrize("native", [False, True], ids=["python", "cpp"])
def test_one_stop_token_needs_no_list(model, native):
    model = model.cpp() if native else model
    first = int(model.generate(IDS[:1], max_new_tokens=1)[0, -1])
    for stop in (first, [first], (first,)):
        assert model.generate(IDS[:1], max_new_tokens=5, stop_tokens=stop).shape == (1, 6)


def test_callback_streams_and_ends(model):
    seen = []
    tokens = model.generate(IDS, max_new_tokens=6, callback=seen.append)
    assert torch.equal(torch.stack(seen, 1), tokens[:, 5:])
    assert model.generate(IDS, max_new_tokens=6, callback=lambda step: False).size(1) == 6

    def broken(step):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate(IDS, max_new_tokens=6, callback=broken)


def test_other_threads_run_meanwhile(model):
    """The loop does not hold the GIL: another thread sets an event before the callback returns."""
    asked, answered = threading.Event(), threading.Event()

    def other():
        asked.wait(30)
        answered.set()

    thread = threading.Thread(target=other)
    thread.start()
    model.generate(IDS, max_new_tokens=2, callback=lambda step: asked.set() or answered.wait(30))
    thread.join()
    assert answered.is_set()


def test_sampling_follows_its_seed_and_leaves_torchs_generator_alone(model):
    settings = dict(max_new_tokens=10, temperature=1.5)
    before = torch.get_rng_state()
    one, same, other = (model.generate(IDS, seed=seed, **settings) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    free = model.generate(IDS, **settings)
    torch.manual_seed(5)
    assert torch.equal(free, model.generate(IDS, **settings))


def test_sampling_limits():
    """4000 draws of the token after one prompt, in one batch, against the probabilities."""
    torch.manual_seed(0)
    model = attnpack.CausalLM(8, 12, 1, 2, hidden_dim=16).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
        ids = torch.tensor([[1, 2]])
        logits = model(ids)[0, -1]
    many = ids.expand(4000, 2).contiguous()

    def drawn(**settings):
        counts = model.generate(many, max_new_tokens=1, seed=0, **settings)[:, -1].bincount(minlength=8)
        return counts / 4000

    order = logits.argsort(descending=True)
    probs = (logits / 0.7).softmax(-1)
    torch.testing.assert_close(drawn(temperature=0.7), probs, rtol=0, atol=0.03)
    top = torch.zeros(8).index_put((order[:3],), logits[order[:3]].softmax(-1))
    torch.testing.assert_close(drawn(top_k=3), top, rtol=0, atol=0.03)
    probs = logits.softmax(-1)
    kept = order[: int((probs[order].cumsum(0) < 0.6).sum()) + 1]
    nucleus = torch.zeros(8).index_put((kept,), probs[kept] / probs[kept].sum())
    torch.testing.assert_close(drawn(top_p=0.6), nucleus, rtol=0, atol=0.03)
    for settings in (dict(top_k=1), dict(temperature=0.0), dict(top_p=1e-6)):
        assert drawn(**settings)[order[0]] == 1


def test_top_p_that_the_likeliest_tokens_hold_exactly():
    """top_p 0.5 of four equally likely tokens keeps two of them."""
    model = attnpack.CausalLM(4, 8, 1, 1)
    torch.nn.init.zeros_(model.lm_head.weight)
    tokens = model.generate(torch.zeros(200, 1, dtype=torch.int64), max_new_tokens=1, top_p=0.5, seed=0)[:, -1]
    assert tokens.unique().numel() == 2


def test_tokens_that_tie_with_the_last_of_the_top_k_stay():
    """With four equally likely tokens and one less likely, top_k=2 keeps the four, as in transformers."""
    model = attnpack.CausalLM(5, 8, 1, 1).eval()
    ids = torch.zeros(200, 1, dtype=torch.int64)
    with torch.no_grad():
        model.lm_head.weight[:4] = 0
        model.lm_head.weight[4] *= -model(ids[:1])[0, -1, 4].sign()
        kept = TopKLogitsWarper(2)(None, model(ids[:1])[0, -1:]).isfinite().nonzero()[:, 1]
    for each in (model, model.cpp()):
        tokens = each.generate(ids, max_new_tokens=1, top_k=2, seed=0)[:, -1]
        assert torch.equal(tokens.unique(), kept) and len(kept) == 4


def test_one_bit_the_same_alone_and_in_a_batch(model):
    both = model.generate(IDS, max_new_tokens=8)
    for row in range(2):
        assert torch.equal(model.generate(IDS[row : row + 1], max_new_tokens=8)[0], both[row])


def test_bad_input(model):
    for settings, message in (
        (dict(cache="int2"), "cache: got 'int2'"),
        (dict(max_new_tokens=-1), "max_new_tokens: got -1"),
        (dict(top_p=0.0), "top_p: got 0"),
        (dict(top_k=-1), "top_k: got -1"),
        (dict(temperature=-1.0), "temperature: got -1"),
        (dict(lengths=torch.tensor([0, 5])), "lengths"),
        (dict(lengths=torch.tensor([5, 6])), "lengths"),
        (dict(lengths=torch.tensor([5])), "lengths"),
        (dict(cache=attnpack.ModelCache(3)), "cache: got one of 3 layers, want 2"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(IDS, **{"max_new_tokens": 2} | settings)
    for wrong in (IDS[0], IDS.float(), IDS[:, :0]):
        with pytest.raises(ValueError, match="ids: got"):
            model.generate(wrong, max_new_tokens=2)
    with pytest.raises(ValueError, match="ids: got shape"):
        model(IDS[0])


def test_changed_models_are_not_run_as_if_unchanged(model):
    changed = copy.deepcopy(model)
    changed.layers[0].self_attn.q_proj = nn.Sequential(changed.layers[0].self_attn.q_proj)
    with pytest.raises(TypeError, match="q_proj is a Sequential"):
        changed.generate(IDS, max_new_tokens=2)
    changed = copy.deepcopy(model)
    changed.model.layers = changed.model.layers[:1]
    with pytest.raises(TypeError, match="other layers"):
        changed.generate(IDS, max_new_tokens=2)
    for part, name, value in [
        ("0.self_attn", "scale", 3.0),
        ("1.input_layernorm", "eps", 0.5),
        ("0", "pre_norm", False),
    ]:
        changed = copy.deepcopy(model)
        setattr(changed.layers.get_submodule(part), name, value)
        with pytest.raises(TypeError, match="other layers or settings"):
            changed.generate(IDS, max_new_tokens=2)
    changed = copy.deepcopy(model)
    changed.layers[0].note = "a user's own attribute is no setting"
    assert torch.equal(changed.generate(IDS, max_new_tokens=2), model.generate(IDS, max_new_tokens=2))


def test_tied_head_is_one_tensor():
    torch.manual_seed(0)
    model = attnpack.CausalLM(50, 24, 1, 4, tie_embeddings=True)
    assert "lm_head.weight" not in model.state_dict()
    weight = model.model.embed_tokens.weight
    state = dict(model.state_dict()) | {"lm_head.weight": weight.detach()}
    model.load_state_dict(state, strict=True, assign=True)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS), model(IDS))
    assert torch.equal(model.cpp().forward(IDS), model(IDS))


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fresh_model_knows_nothing(module, tied):
    torch.manual_seed(0)
    model = module.CausalLM(512, 64, 2, 4, tie_embeddings=tied)
    ids = torch.randint(512, (2, 32))
    with torch.no_grad():
        logits = model.forward(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
    assert abs(float(loss) - math.log(512)) < 0.3
    table = model.state_dict()["model.embed_tokens.weight"]
    assert 0.018 < float(table.std()) < 0.022
    wide = module.CausalLM(512, 64, 1, 4, init_std=1.0).state_dict()["model.embed_tokens.weight"]
    assert 0.95 < float(wide.std()) < 1.05
    with pytest.raises(ValueError, match="init_std: got -1, want a number such as 0.02"):
        module.CausalLM(8, 24, 1, 4, init_std=-1.0)


@pytest.mark.parametrize("module", [attnpack, attnpack.cpp], ids=["python", "cpp"])
def test_a_model_on_meta_has_no_numbers(module):
    model = module.CausalLM(50, 24, 1, 4, device="meta")
    with pytest.raises(ValueError, match="^attnpack: ids: got a tensor on meta, which holds no token numbers"):
        model.generate(IDS.to("meta"), max_new_tokens=2)
    words = "^attnpack: ids: got device cpu, want the module's device meta; its weights hold no numbers yet"
    with pytest.raises(ValueError, match=words):
        model.forward(IDS)
    with pytest.raises(ValueError, match=words):
        model.generate(IDS, max_new_tokens=2)


def test_frozen_parameters_are_frozen_in_cpp(model):
    frozen = copy.deepcopy(model)
    frozen.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    for name, parameter in frozen.cpp().named_parameters():
        assert parameter.requires_grad == (name != "model.layers.0.self_attn.q_proj.weight")
        assert parameter is frozen.get_parameter(name)


def test_bfloat16_generates():
    torch.manual_seed(0)
    model = attnpack.CausalLM(50, 24, 2, 4, 2, hidden_dim=48, dtype=torch.bfloat16).eval()
    for cache in ("dynamic", "static"):
        assert torch.equal(
            model.generate(IDS, max_new_tokens=4, cache=cache), model.cpp().generate(IDS, max_new_tokens=4)
        )


def test_a_window_is_the_mask_of_every_layer(model):
    """Against the model without a window and with the same mask, in both languages: whole, by steps and in generate."""
    windowed = attnpack.CausalLM(50, 24, 2, 4, 2, hidden_dim=48, window=(2, 0)).eval()
    windowed.load_state_dict(model.state_dict())
    ids = torch.randint(50, (2, 9))
    row, column = torch.arange(9).unsqueeze(1), torch.arange(9)
    near = (row - column).abs() <= 2  # causality limits the other side
    with torch.no_grad():
        expected = model(ids, mask=near)
        torch.testing.assert_close(windowed(ids), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(windowed.cpp().forward(ids), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(ids), expected, atol=1e-2)
        cache = attnpack.ModelCache(2)
        steps = torch.cat([windowed(token, cache) for token in ids.split(1, dim=1)], 1)
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-4)
    own = attnpack.cpp.CausalLM(50, 24, 2, 4, 2, hidden_dim=48, window=(2, 0))
    own.load_state_dict(windowed.state_dict())
    expected = greedy(windowed, IDS, 6)
    for cache in ("dynamic", "static", "none"):
        for each in (windowed, own):
            assert torch.equal(each.generate(IDS, max_new_tokens=6, cache=cache), expected)


def test_int32_ids_are_ids(model):
    for each in (model, model.cpp()):
        assert torch.equal(each.forward(IDS.int()), each.forward(IDS))
        tokens = each.generate(IDS.int(), max_new_tokens=3)
        assert tokens.dtype == torch.int64 and torch.equal(tokens, each.generate(IDS, max_new_tokens=3))


SAMPLED = [{}, {"temperature": 1.0}, {"top_k": 3}]


@pytest.mark.parametrize("settings", SAMPLED, ids=str)
def test_nan_logits_choose_no_token(settings):
    model = attnpack.CausalLM(50, 24, 1, 4).eval()
    with torch.no_grad():
        model.lm_head.weight[7, 0] = float("nan")
    for each in (model, model.cpp()):
        with pytest.raises(ValueError, match="^attnpack: logits: got NaN from the model"):
            each.generate(IDS, max_new_tokens=2, **settings)


def test_a_temperature_that_overflows(model):
    with pytest.raises(ValueError, match="^attnpack: temperature: got 1e-40 for logits up to .*, or 0 for greedy"):
        model.generate(IDS, max_new_tokens=2, temperature=1e-40)
    with pytest.raises(ValueError, match="^attnpack: temperature: got 1e-300 for logits up to"):
        model.generate(IDS, max_new_tokens=2, temperature=1e-300)
    with pytest.raises(ValueError, match="^attnpack: temperature: got inf"):
        model.generate(IDS, max_new_tokens=2, temperature=float("inf"))


@pytest.mark.parametrize("top_p", [1e-46, 1e-300])
def test_a_top_p_that_fp32_lacks_leaves_the_likeliest_token(model, top_p):
    greedy = model.generate(IDS, max_new_tokens=5)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, temperature=1.0, top_p=top_p, seed=0), greedy)


def test_a_hot_temperature_draws_every_token(model):
    drawn = model.generate(IDS[:1].expand(2000, -1), max_new_tokens=1, temperature=1e300, seed=0)[:, -1]
    assert drawn.unique().numel() == model.lm_head.weight.size(0)


LATENT = SIZES | {"q_lora_rank": 20}


@pytest.mark.parametrize("latent", [LATENT, LATENT | {"qk_rope_head_dim": 0, "latent_norm": False}])
@torch.no_grad()
def test_a_language_model_of_latent_attention(latent):
    torch.manual_seed(0)
    model = attnpack.CausalLM(60, E, 2, HEADS, hidden_dim=64, rope_interleaved=True, latent=latent).eval()
    ids, twin = torch.randint(60, (2, 9)), model.cpp()
    assert torch.equal(model(ids), twin.forward(ids))
    tokens = model.generate(ids, max_new_tokens=6)
    for cache in ("static", "none", attnpack.ModelCache([attnpack.LatentCache() for _ in range(2)])):
        assert torch.equal(model.generate(ids, max_new_tokens=6, cache=cache), tokens)
    assert cache.nbytes == 2 * 2 * 14 * (16 + latent["qk_rope_head_dim"]) * 4
    lengths = torch.tensor([5, 9])
    ragged = model.generate(ids, max_new_tokens=4, lengths=lengths)
    assert torch.equal(ragged[0, 9:], model.generate(ids[:1, :5], max_new_tokens=4)[0, 5:])
    copied = twin.clone()
    assert torch.equal(copied.generate(ids, max_new_tokens=6), tokens)
