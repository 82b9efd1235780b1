"""Models whose weights stay as a GGUF file holds them, in both languages, against the same weights expanded."""

import copy
import io
import math
import pickle

import attnpack
import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attnpack import StoredEmbedding, StoredLinear, ops
from attnpack.tools import cli
from gguf_models import native_model
from processes import run_python
from stored_blocks import FORMATS, llama_file
from torch import nn

KINDS = list(FORMATS)
IDS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return llama_file(tmp_path_factory.mktemp("stored") / "model.gguf", KINDS)


@pytest.fixture(autouse=True)
def without_gradients(request):
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


def stored_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, StoredLinear | StoredEmbedding)]


@pytest.mark.parametrize("tied", (True, False))
def test_each_weight_stays_as_the_file_holds_it(tmp_path, tied):
    file = llama_file(tmp_path / "model.gguf", KINDS, tied)
    stored = attnpack.CausalLM.from_gguf(file, weights="stored", dtype=torch.float64)
    layers = stored_layers(stored)
    assert len(layers) == (15 if tied else 16) and {layer.format for layer in layers} == set(KINDS)
    held = {t.name: t.data for t in gguf.GGUFReader(file).tensors}
    down = stored.layers[1].mlp.down_proj.weight
    assert np.array_equal(down.flatten(-2), held["blk.1.ffn_down.weight"])
    assert sum(layer.weight.nbytes for layer in layers) == sum(x.nbytes for x in held.values() if x.dtype == np.uint8)
    expanded = attnpack.CausalLM.from_gguf(file, dtype=torch.float64)
    torch.testing.assert_close(stored(IDS), expanded(IDS), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(stored.cpp().forward(IDS), expanded(IDS), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_both_languages_compute_the_same_bits_near_the_expanded_model(path, dtype):
    stored = attnpack.CausalLM.from_gguf(path, weights="stored", dtype=dtype)
    expanded = attnpack.CausalLM.from_gguf(path, dtype=torch.float64)
    found, exact = stored(IDS), expanded(IDS).detach()
    assert found.dtype == dtype and not found.requires_grad
    assert torch.equal(stored.cpp().forward(IDS), found)
    error = (found.double() - exact).norm() / exact.norm()
    assert error < (0.02 if dtype == torch.float32 else 0.04)
    tokens = stored.generate(IDS, max_new_tokens=6)
    assert torch.equal(tokens, stored.cpp().generate(IDS, max_new_tokens=6, cache="static"))
    assert torch.equal(tokens, stored.generate(IDS, max_new_tokens=6))  # by the kept twin
    native = native_model(path, dtype, "stored")
    assert torch.equal(native.forward(IDS), found)
    assert not any(parameter.requires_grad for _, parameter in native.named_parameters())


def test_rows_of_a_batch_are_those_of_single_texts(path):
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    steps = [model(row[None]) for row in IDS]
    torch.testing.assert_close(model(IDS), torch.cat(steps), rtol=1e-4, atol=1e-5)


def test_copies_pickles_and_state_dicts(path):
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    want = model(IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), attnpack.CausalLM.from_cpp(model.cpp())):
        assert torch.equal(other(IDS), want)
        assert len(stored_layers(other)) == 15
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    blank = copy.deepcopy(model)
    for parameter in blank.parameters():
        parameter.data.zero_()
    blank.load_state_dict(torch.load(file))
    assert torch.equal(blank(IDS), want)
    twin = model.cpp().clone()
    assert torch.equal(twin.forward(IDS), want)
    twin.load_state_dict(model.cpp().state_dict())
    assert torch.equal(twin.forward(IDS), want)


def test_a_dtype_moves_numbers_and_no_codes(path):
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    want = attnpack.CausalLM.from_gguf(path, weights="stored", dtype=torch.bfloat16)(IDS)
    twin = model.cpp().clone().to(torch.bfloat16)
    model.to(torch.bfloat16)
    assert model.model.embed_tokens.weight.dtype == torch.uint8
    assert torch.equal(model(IDS), want) and torch.equal(twin.forward(IDS), want)


def test_the_tied_table_is_one_tensor(path):
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    assert model.lm_head is None and isinstance(model.model.embed_tokens, StoredEmbedding)
    states = model.model(IDS)
    table = attnpack.ops.widen_stored(model.model.embed_tokens.weight)
    exact = states.double() @ table.double().t()
    assert (model(IDS) - exact).abs().max() < 0.01 * exact.abs().max()
    with pytest.raises(ValueError, match="ids holds 96, wants 0 to 95"):
        model(torch.tensor([[96]]))
    with pytest.raises(ValueError, match="ids holds 96, wants 0 to 95"):
        model.cpp().forward(torch.tensor([[96]]))


def test_a_table_of_layer_inputs_has_the_dtype_of_the_embedding(path):
    table = attnpack.LayerInputTable(96, 8, 2, 128, dtype=torch.bfloat16)
    blocks = attnpack.CausalLM.from_gguf(path, weights="stored").model.embed_tokens.weight
    table.embed_tokens = StoredEmbedding.from_blocks(blocks, torch.bfloat16)
    embedding = torch.randn(2, 11, 8, dtype=torch.bfloat16)
    found = table(IDS, embedding)
    assert found.dtype == torch.bfloat16 and torch.equal(table.cpp().forward(IDS, embedding), found)


def test_gradients_are_refused(path):
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model(IDS).isfinite().all()
    states = torch.randn(1, 3, 256, requires_grad=True)
    for part in (model.layers[0], model.layers[0].cpp(), model.layers[0].mlp.down_proj):
        width = 512 if part is model.layers[0].mlp.down_proj else 256
        with pytest.raises(RuntimeError, match="has no gradient"):
            part.forward(states.repeat(1, 1, width // 256))


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_not_finite_are_refused(tmp_path, kind, value):
    file = llama_file(tmp_path / "model.gguf", [kind], layers=1)
    reader = gguf.GGUFReader(file, "r+")
    tensor = next(t for t in reader.tensors if t.name == "blk.0.ffn_down.weight")
    at = FORMATS[kind][2][-1]
    tensor.data[200, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    tensor.data.flush()
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight has a scale that is not finite"):
        attnpack.CausalLM.from_gguf(file, weights="stored")


def test_wrong_arguments_are_refused(path, tmp_path):
    with pytest.raises(ValueError, match="weights: got 'both', want 'expanded' or 'stored'"):
        attnpack.CausalLM.from_gguf(path, weights="both")
    with pytest.raises(ValueError, match="want cpu"):
        attnpack.CausalLM.from_gguf(path, weights="stored", device="meta")
    with pytest.raises(ValueError, match="is a directory"):
        attnpack.checkpoints.load(tmp_path, weights="stored")
    model = attnpack.CausalLM.from_gguf(path, weights="stored").cpp()
    state = model.state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match="down_proj"):
        model.assign_state_dict(state | {name: state[name][:, :1]})


def test_plain_types_stay_plain(tmp_path):
    file = llama_file(tmp_path / "model.gguf", ["Q8_0"], layers=1)
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(tmp_path / "half.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "ffn" in tensor.name and "norm" not in tensor.name:
            writer.add_tensor(tensor.name, numbers.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = attnpack.CausalLM.from_gguf(tmp_path / "half.gguf", weights="stored")
    assert type(model.layers[0].mlp.up_proj) is nn.Linear and type(model.layers[0].self_attn.q_proj) is StoredLinear
    exact = attnpack.CausalLM.from_gguf(tmp_path / "half.gguf")(IDS).detach()
    assert (model(IDS) - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(model.cpp().forward(IDS), model(IDS))


def test_generate_on_the_command_line(path, capsys, monkeypatch):
    tokenizer = attnpack.checkpoints.load_tokenizer(attnpack.checkpoints.smollm2_path())
    monkeypatch.setattr(attnpack.checkpoints, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(tokenizer, "chat", lambda prompt: [1, 2, 3])
    monkeypatch.setattr(tokenizer, "stop_tokens", ())
    command = ["generate", "hello", "--model", str(path), "--weights", "stored", "--max-new-tokens", "3", "--json"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    model = attnpack.CausalLM.from_gguf(path, weights="stored")
    held = sum(p.nbytes for p in model.parameters())
    assert f'"weight_bytes": {held}' in out
    assert cli.main(command[:-1]) == 0
    wide = sum(p.nbytes for p in attnpack.CausalLM.from_gguf(path).parameters())
    assert capsys.readouterr().err == f"weights: {held / 2**20:.0f} MiB, and {wide / 2**20:.0f} in fp32\n"
    assert held < 0.4 * wide


@pytest.fixture(scope="module")
def topics_ids(topics_text):
    tokenizer = attnpack.checkpoints.load_tokenizer(attnpack.checkpoints.smollm2_path())
    return torch.tensor([tokenizer.encode(topics_text[:20000])[:1024]])


def perplexity(model, ids):
    logits = model(ids)[0, :-1]
    pieces = zip(logits.split(100), ids[0, 1:].split(100), strict=True)  # the whole takes 200 MB
    return math.exp(sum(F.cross_entropy(*piece, reduction="sum").item() for piece in pieces) / (ids.size(1) - 1))


def test_smollm2_stored_beside_the_same_weights_expanded(smollm2, topics_ids):
    stored = attnpack.CausalLM.from_gguf(attnpack.checkpoints.smollm2_path(), weights="stored")
    assert sum(parameter.nbytes for parameter in stored.parameters()) < 95 << 20
    ours, exact = perplexity(stored, topics_ids), perplexity(smollm2, topics_ids)
    print(f"perplexity of Q4_1 {ours:.4f} stored, {exact:.4f} expanded")
    assert abs(ours / exact - 1) < 0.01


@pytest.mark.long
def test_smollm2_in_8_and_4_bits(smollm2, topics_ids):
    exact = perplexity(smollm2, topics_ids)
    rounded = attnpack.convert.quantize_(copy.deepcopy(smollm2), bits=8)
    numbers = {n: ops.widen_stored(x) if x.dtype == torch.uint8 else x for n, x in rounded.state_dict().items()}
    expanded = copy.deepcopy(smollm2)
    expanded.load_state_dict(numbers)
    ours = perplexity(rounded, topics_ids)
    print(f"perplexity of Q8_0 {ours:.4f} stored, {perplexity(expanded, topics_ids):.4f} expanded, {exact:.4f} exact")
    assert abs(ours / perplexity(expanded, topics_ids) - 1) < 0.003
    settings = {"bits": 4, "head_bits": 8, "exact_first": 2, "exact_last": 2}
    worse = perplexity(attnpack.convert.quantize_(copy.deepcopy(smollm2), **settings), topics_ids)
    print(f"of 4 bits, with the head in 8 and four exact blocks: {worse:.4f}")
    assert worse / exact - 1 < 0.2


def test_memory_grows_by_the_file_and_little_more():
    path = attnpack.checkpoints.smollm2_path()
    process = run_python(GROWTH.format(path=str(path)))
    assert process.returncode == 0, process.text
    grown = int(process.stdout.split()[-1])
    assert grown < path.stat().st_size + (100 << 20), f"{grown / 2**20:.0f} MiB"


GROWTH = """
import attnpack, torch
from attnpack import checkpoints
from attnpack.tools.memory import peak_bytes
torch.ones(300, 300) @ torch.ones(300, 300)

def use():
    model = attnpack.CausalLM.from_gguf({path!r}, weights="stored")
    model.generate(torch.randint(1000, (1, 16)), max_new_tokens=24)

print(peak_bytes(use))
"""
