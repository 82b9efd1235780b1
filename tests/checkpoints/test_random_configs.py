"""Random configurations of every family: equal to transformers, or refused. `scripts/fuzz.py configs` draws any
number."""

import pytest
from fuzz import configs


def test_some_configurations():
    counts, wrong = configs.run(0, 150, 600)
    assert not wrong
    assert counts["equal"] > 60 and counts["refused"] > 15


@pytest.mark.long
def test_thousands_of_configurations():
    counts, wrong = configs.run(100_000, 3000, 1500)
    assert not wrong and counts["equal"] > 1000


@pytest.mark.parametrize("count", [1, 3])
def test_a_gemma_3_whose_layers_all_slide_rotates_by_their_base(count, tmp_path):
    """As the layers' kind says, where no layer differs: seed 15 of the random ones."""
    name, settings = "gemma3", configs.BASES["gemma3"].theirs | {"num_hidden_layers": count}
    assert configs.compare(name, settings | {"layer_types": ["sliding_attention"] * count}, tmp_path) == ("equal", "")


@pytest.mark.parametrize("name", ["phi3", "starcoder2", "qwen3_moe"])
def test_layer_types_that_transformers_does_not_read_are_refused(name, tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    settings = configs.BASES[name].theirs | {"layer_types": kinds, "sliding_window": 5}
    settings |= {"use_sliding_window": True} if name == "qwen3_moe" else {}
    assert configs.compare(name, settings, tmp_path) == ("refused", "")
    agreeing = settings | {"layer_types": ["sliding_attention"] * 3}
    assert configs.compare(name, agreeing, tmp_path) == ("equal", "")
