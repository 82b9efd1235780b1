"""GGUF files that are written again with their matrices in 8 or 4 bits."""

import json
import struct

import attnpack
import gguf
import gguf_models
import numpy as np
import pytest
import torch
from attnpack.tools import cli
from stored_blocks import llama_file

IDS = torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(4))
LEFT = (
    "position_embd", "token_types", "rope_freqs", "output_norm", "blk.0.attn_norm", "blk.11.attn_q_norm",
    "blk.0.attn_k_norm", "blk.0.ffn_gate_inp", "blk.3.ffn_gate_inp_shexp", "blk.0.ssm_conv1d", "blk.0.ssm_conv1d_q",
    "blk.0.ssm_norm", "blk.0.shortconv.conv", "blk.0.time_mix_w1", "blk.0.time_mix_first", "blk.0.time_mix_lerp_fused",
    "altup_proj", "blk.0.altup_router", "blk.0.laurel_l", "per_layer_model_proj", "blk.0.layer_output_norm",
)  # fmt: skip
ROUNDED = (
    "token_embd", "output", "per_layer_token_embd", "blk.0.attn_q", "blk.0.attn_qkv", "blk.10.ffn_gate", "blk.0.ssm_in",
    "blk.0.shortconv.in_proj", "blk.0.time_mix_key", "blk.0.ffn_down_exps", "blk.0.attn_kv_a_mqa", "blk.0.inp_gate",
)  # fmt: skip


def convert(source, out, kind="Q8_0"):
    assert cli.main(["convert", str(source), str(out), "--to-gguf", kind]) == 0
    return {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}


@pytest.mark.parametrize(("kind", "bits"), (("Q8_0", 8), ("Q4_0", 4)))
def test_a_file_is_written_again(tmp_path, kind, bits, capsys):
    source, out = llama_file(tmp_path / "source.gguf", ["Q5_K", "Q6_K"]), tmp_path / "out.gguf"
    assert cli.main(["convert", str(source), str(out), "--to-gguf", kind]) == 0
    assert f"matrices in {kind}" in capsys.readouterr().out
    numbers = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(source).tensors}
    for tensor in gguf.GGUFReader(out).tensors:
        own = torch.from_numpy(numbers[tensor.name])
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert tensor.tensor_type.name == (kind if own.ndim == 2 else "F32")
        assert (found - own).norm() < (0.01 if bits == 8 else 0.12) * own.norm()
    before, after = (attnpack.CausalLM.from_gguf(p)(IDS).detach() for p in (source, out))
    assert (after - before).norm() < (0.05 if bits == 8 else 0.6) * before.norm()
    stored = attnpack.CausalLM.from_gguf(out, weights="stored")
    assert (stored(IDS) - after).norm() < 0.03 * after.norm()
    assert cli.main(["convert", str(source), str(tmp_path / "again.gguf"), "--to-gguf", kind, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == kind and report["bytes"] == (tmp_path / "again.gguf").stat().st_size
    assert cli.main(["convert", str(tmp_path), str(tmp_path / "x.gguf"), "--to-gguf", kind]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(source), "--to-gguf", kind]) == 2
    assert cli.main(["convert", str(source), str(tmp_path / "y.gguf"), "--to-gguf", kind, "--dtype", "bf16"]) == 2
    assert "--dtype: got together with --to-gguf" in capsys.readouterr().err


def test_what_llama_cpp_leaves_stays(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal((4, 64), np.float32) for name in (*LEFT, *ROUNDED)}
    tensors |= {"blk.0.ffn_up_exps.weight": rng.standard_normal((3, 5, 32), np.float32)}
    tensors |= {
        "blk.0.attn_q.bias": np.ones((1, 64), np.float32),
        "blk.0.attn_v.weight": np.ones((4, 40), np.float32),
        "blk.0.attn_output.weight": np.ones((4, 64), np.float16),
    }
    source = gguf_models.write(tmp_path / "source.gguf", "llama", {}, tensors)
    written = convert(source, tmp_path / "out.gguf", "Q4_0")
    assert list(written) == list(tensors)
    kinds = {name: tensor.tensor_type.name for name, tensor in written.items()}
    assert {name for name, kind in kinds.items() if kind == "Q4_0"} == {
        *(f"{name}.weight" for name in ROUNDED), "blk.0.ffn_up_exps.weight", "blk.0.attn_output.weight",
    }  # fmt: skip
    for name, tensor in written.items():
        back = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensors[name].shape)
        assert np.abs(back - tensors[name]).max() <= (0.5 if kinds[name] == "Q4_0" else 0), name
    assert written["blk.0.ffn_up_exps.weight"].data.shape == (3, 5, 18)


def test_a_mixture_of_experts_keeps_its_router(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=32,
        moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    metadata = {
        "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2, "block_count": 2,
        "context_length": 64, "feed_forward_length": config.intermediate_size, "expert_count": 4,
        "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.key_length": 32,
        "attention.value_length": 32, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    source = gguf_models.write(
        tmp_path / "source.gguf", "qwen3moe", metadata, gguf_models.tensors_of(model, "qwen3moe")
    )
    written = convert(source, tmp_path / "out.gguf")
    kinds = {name.removeprefix("blk.0."): tensor.tensor_type.name for name, tensor in written.items()}
    assert kinds["ffn_gate_inp.weight"] == kinds["attn_q_norm.weight"] == "F32"
    assert kinds["ffn_up_exps.weight"] == "Q8_0"
    before, after = (attnpack.CausalLM.from_gguf(p)(IDS).detach() for p in (source, tmp_path / "out.gguf"))
    assert (after - before).norm() < 0.02 * before.norm()


def greedy_tokens_of_llama_cpp(path, prompts, count):
    import llama_cpp

    llama_cpp.llama_backend_init()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = 64
    settings.n_threads = settings.n_threads_batch = 1
    context, batch = llama_cpp.llama_init_from_model(model, settings), llama_cpp.llama_batch_init(64, 0, 1)
    vocabulary, found = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)), []
    for prompt in prompts:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens, new, seen = prompt.tolist(), prompt.tolist(), 0
        for _ in range(count):
            batch.n_tokens = len(new)
            for i, token in enumerate(new):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, seen + i, 1, 0
                batch.logits[i] = i == len(new) - 1
            assert llama_cpp.llama_decode(context, batch) == 0
            logits = llama_cpp.llama_get_logits_ith(context, len(new) - 1)
            seen, new = seen + len(new), [int(np.argmax(np.ctypeslib.as_array(logits, (vocabulary,))))]
            tokens += new
        found.append(torch.tensor(tokens))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


@pytest.mark.parametrize("kind", ("Q8_0", "Q4_0"))
def test_llama_cpp_has_the_greedy_tokens_of_the_expanded_weights(tmp_path, kind):
    """Up to the first step at which two tokens are nearly as likely: llama.cpp rounds the states to 8 bits."""
    pytest.importorskip("llama_cpp")
    convert(llama_file(tmp_path / "source.gguf", ["Q5_1", "Q6_K"], tied=False), tmp_path / "out.gguf", kind)
    model, count, compared = attnpack.CausalLM.from_gguf(tmp_path / "out.gguf"), 12, 0
    prompts = torch.randint(96, (6, 5), generator=torch.Generator().manual_seed(1))
    for theirs in greedy_tokens_of_llama_cpp(tmp_path / "out.gguf", prompts, count):
        logits = model(theirs[None]).detach()[0, 4:-1]
        first, second = logits.topk(2).values.unbind(-1)
        clear = (first - second > 0.05 * logits.std(-1)).long().cumprod(0).bool()
        assert torch.equal(logits.argmax(-1)[clear], theirs[5:][clear])
        compared += int(clear.sum())
    print(f"{kind}: {compared} of {6 * count} tokens are compared")
    assert compared > 3 * count


@pytest.mark.parametrize("alignment", (8, 64, 4096))
def test_the_alignment_of_the_file_holds(tmp_path, alignment):
    source = llama_file(tmp_path / "source.gguf", ["Q5_1"], layers=1, alignment=alignment)
    written = convert(source, tmp_path / "out.gguf")
    assert all(tensor.data_offset % alignment == 0 for tensor in written.values())
    assert gguf.GGUFReader(tmp_path / "out.gguf").alignment == alignment
    before, after = (attnpack.CausalLM.from_gguf(p)(IDS).detach() for p in (source, tmp_path / "out.gguf"))
    assert (after - before).norm() < 0.05 * before.norm()


def test_metadata_are_the_bytes_of_the_file(tmp_path):
    """Also an array of nothing, an array of arrays, and a text that is not UTF-8."""
    source, out = llama_file(tmp_path / "source.gguf", ["Q8_0", "Q4_1"], layers=1), tmp_path / "out.gguf"
    numbers = struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)
    added = [
        struct.pack("<Q", 8) + b"empty.00" + struct.pack("<IIQ", 9, 8, 0),
        struct.pack("<Q", 8) + b"nested.0" + struct.pack("<IIQ", 9, 9, 2) + numbers + numbers,
        struct.pack("<Q", 8) + b"text.000" + struct.pack("<IQ", 8, 4) + b"\xff\xfe\x00a",
    ]
    assert sum(map(len, added)) % 32 == 0  # so that tensors need no other padding
    whole = source.read_bytes()
    head = whole[:16] + struct.pack("<Q", struct.unpack("<Q", whole[16:24])[0] + len(added))
    source.write_bytes(head + b"".join(added) + whole[24:])
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    written = convert(source, out)
    for item in added:
        assert out.read_bytes().count(item) == 1
    for name, tensor in written.items():  # what has the format already is copied
        if before[name].tensor_type.name == "Q8_0":
            assert np.array_equal(tensor.data, before[name].data)
    fields = gguf.GGUFReader(out).fields
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    assert fields["general.quantization_version"].contents() == 2
    again = convert(out, tmp_path / "again.gguf", "Q4_0")
    assert gguf.GGUFReader(tmp_path / "again.gguf").fields["general.file_type"].contents() == 2 and len(again) > 5


def test_errors_name_what_is_wrong(tmp_path, capsys):
    source = llama_file(tmp_path / "source.gguf", ["Q8_0"], layers=1)
    nowhere = tmp_path / "none" / "out.gguf"
    assert cli.main(["convert", str(source), str(nowhere), "--to-gguf", "Q8_0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"attnpack convert: {nowhere}: lies in no folder that exists; make {nowhere.parent}")
    for value, words in ((np.nan, "not finite"), (1e-9, "too small for a scale")):
        tensors = {"blk.0.attn_q.weight": np.full((2, 32), value, np.float32)}
        gguf_models.write(source, "llama", {}, tensors)
        assert cli.main(["convert", str(source), str(tmp_path / "out.gguf"), "--to-gguf", "Q8_0"]) == 2
        said = capsys.readouterr().err
        assert f"{source}: tensor blk.0.attn_q.weight cannot be written" in said and words in said
        assert not (tmp_path / "out.gguf").exists()
