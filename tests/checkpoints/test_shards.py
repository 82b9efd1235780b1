"""Checkpoints in shards: an index that contradicts its files is refused."""

import json

import pytest
from hf_checkpoints import CONFIGS, random_model, refused


def test_missing_shard(tmp_path):
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    refused(tmp_path, "model-00001-of-")


@pytest.mark.parametrize("change", ["a name too many", "a name too few"])
def test_a_shard_is_held_against_the_index_before_the_next_is_opened(change, tmp_path):
    """Reading a header may take a second."""
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    first, *_, last = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    (tmp_path / last).write_bytes(b"no header")
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = next(name for name, shard in places.items() if shard == first)
    if change == "a name too many":
        places["another"] = first
    else:
        del places[name]
    index.write_text(json.dumps({"weight_map": places}))
    refused(tmp_path, {"a name too many": f"another is in {first}", "a name too few": f"not name {name}"}[change])
