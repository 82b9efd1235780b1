"""The parts of transformers' insides that attnpack.hf reads: all are there, and a missing one is named."""

import sys

import attnpack.hf
import pytest
import torch
import transformers
from attnpack.extras import TESTED
from attnpack.hf import internals, paged
from hf_families import generated, logits, make_model, padding
from marks import long
from processes import run_python
from transformers import masking_utils


def test_all_parts_are_there():
    internals.check()


def test_a_missing_part_is_named(monkeypatch):
    monkeypatch.delattr(masking_utils, "sliding_window_overlay")
    with pytest.raises(ImportError) as caught:
        attnpack.hf.register()
    assert str(caught.value) == (
        "attnpack.hf reads transformers.masking_utils.sliding_window_overlay.sliding_window of transformers for "
        f"windows, and transformers {transformers.__version__} has none; install one of the tested releases: "
        f"pip install transformers=={TESTED['transformers'][-1]}"
    )


def test_a_closure_that_holds_another_variable_is_named(monkeypatch):
    def sliding_window_overlay(width):
        return lambda batch, head, query, key: key > query - width

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    with pytest.raises(ImportError, match="masking_utils.sliding_window_overlay.sliding_window of transformers for"):
        attnpack.hf.register()


@pytest.mark.parametrize("part", ["and_masks", long("sdpa_mask")])
def test_the_import_says_the_same(part):
    code = f"from transformers import masking_utils; del masking_utils.{part}; import attnpack.hf"
    ran = run_python(code)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: attnpack.hf reads transformers.masking_utils.{part}"), ran.stderr
    assert transformers.__version__ in last


def test_pages_of_an_older_kind_are_refused(monkeypatch):
    monkeypatch.setattr(paged, "HAS_ALLOCATORS", False)
    attnpack.hf.register()
    model = make_model("llama")
    model.set_attn_implementation("attnpack")
    with pytest.raises(
        ValueError, match=r"attnpack: generate_batch: transformers 5\.\d+\.\d+ keeps its pages in another"
    ):
        model.generate_batch([[3, 4, 5]], progress_bar=False)


def test_without_transformers_the_packages_are_named():
    ran = run_python("import sys; sys.modules['transformers'] = None; import attnpack.hf")
    assert "attnpack.hf needs transformers 5" in ran.stderr and "pip install " in ran.stderr, ran.stderr
    assert "attnpack[" not in ran.stderr


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_layer_takes_its_cache_by_both_names(family):
    """`cache` from transformers 5.24 on, `past_key_values` before."""
    model = attnpack.hf.replace_attention(make_model(family)).eval()
    layer, x = model.model.layers[0].self_attn, torch.randn(1, 3, model.config.hidden_size)
    table = model.model.rotary_emb(x, torch.arange(3)[None])
    outs = {}
    for name in ("cache", "past_key_values"):
        cache = transformers.DynamicCache(config=model.config)
        parts = [
            layer(x[:, i : i + 1], position_embeddings=tuple(t[:, i : i + 1] for t in table), **{name: cache})[0]
            for i in range(3)
        ]
        assert cache.get_seq_length() == 3
        outs[name] = torch.cat(parts, 1)
    assert torch.equal(*outs.values())
    torch.testing.assert_close(outs["cache"], layer(x, position_embeddings=table)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cache: got it and past_key_values, its name before transformers 5.24"):
        layer(x, position_embeddings=table, cache=cache, past_key_values=cache)
    with pytest.raises(TypeError, match="cache is an attnpack DynamicCache, a replaced layer wants a cache of trans"):
        layer(x, position_embeddings=table, cache=attnpack.DynamicCache())


def test_models_take_caches_by_both_names():
    """The model's own keyword, whatever its release calls it, reaches the replaced layers."""
    model = attnpack.hf.replace_attention(make_model("llama")).eval()
    ids = torch.randint(model.config.vocab_size, (1, 6))
    with torch.no_grad():
        wanted = model(ids).logits
        for name in ("past_key_values", "cache") if "cache" in _keywords(model) else ("past_key_values",):
            cache = transformers.DynamicCache(config=model.config)
            found = [model(part, **{name: cache}).logits for part in ids.split([4, 1, 1], 1)]
            torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-5)


def _keywords(model):
    return model.forward.__wrapped__.__code__.co_varnames if hasattr(model.forward, "__wrapped__") else ()


def test_generate_under_a_replaced_model_is_equal():
    theirs = make_model("llama")
    expected = generated(theirs, "eager", padding("left"))
    ours = attnpack.hf.replace_attention(theirs)
    assert torch.equal(generated(ours, "attnpack", padding("left")), expected)
    assert logits(ours, "llama", "attnpack", padding("none")).isfinite().all()
    assert sys.modules["attnpack.hf"].NAME == "attnpack"
