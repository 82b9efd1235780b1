"""`attnpack convert` on whole checkpoints: transformers on OUT, and refused IN."""

import json
import os
import shutil
import signal
import subprocess
import sys

import attnpack
import pytest
import torch
import torch.nn.functional as F
from attnpack import convert
from attnpack.checkpoints import load_tokenizer, smollm2_path
from attnpack.checkpoints.companions import config_json
from attnpack.checkpoints.gguf import GgufCheckpoint
from attnpack.tools import cli
from fuzz import lies
from hf_checkpoints import CONFIGS, LINEAR, MHA, edit_config, edit_weights, random_model, write_tokenizer
from marks import long
from processes import run_python
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Qwen3Config,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    T5GemmaModuleConfig,
)

FAMILIES = {
    "llama": LlamaConfig(**MHA),
    "llama-biases-tied": LlamaConfig(**MHA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-linear-rope": LlamaConfig(**MHA, rope_parameters=LINEAR),
    "mistral-wide-heads": CONFIGS["mistral-wide-heads"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3": Qwen3Config(**MHA, head_dim=16),
}


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama with four kv heads, without a tokenizer: (model of transformers, directory)."""
    model = random_model(FAMILIES["llama"])
    model.save_pretrained(tmp_path / "in")
    return model, tmp_path / "in"


def run(*arguments) -> int:
    return cli.main(["convert", *map(str, arguments)])


def refused(capsys, tmp_path, arguments, *words) -> None:
    before = sorted(tmp_path.iterdir())
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("attnpack convert: ") and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err, printed.err
    assert sorted(tmp_path.iterdir()) == before


def open_in_transformers(directory):
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def same_logits(directory, like=None) -> None:
    """(our model, transformers' model, a model of the kind of `like`), all on the converted weights."""
    ids = torch.randint(96, (2, 30))
    with torch.no_grad():
        theirs = open_in_transformers(directory)(ids).logits
        torch.testing.assert_close(attnpack.CausalLM.from_hf(directory)(ids), theirs, rtol=0, atol=1e-4)
        if like is not None:
            torch.testing.assert_close(like(ids), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_opens_out_and_computes_the_same(name, tmp_path, capsys):
    model = random_model(FAMILIES[name])
    model.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    for method in ("mean", "aligned"):
        assert run(tmp_path / "in", tmp_path / method, "--kv-heads", 1, "--method", method, "--tokens", 64) == 0
        config = json.loads((tmp_path / method / "config.json").read_text())
        assert config["num_key_value_heads"] == 1
        original = attnpack.CausalLM.from_hf(tmp_path / "in")
        same_logits(tmp_path / method, convert.to_mqa(original) if method == "mean" else None)
    assert "perplexity on 64 tokens" in capsys.readouterr().out
    unchanged = model.config.num_key_value_heads
    assert run(tmp_path / "in", tmp_path / "same", "--kv-heads", unchanged) == 0
    before, after = (load_file(tmp_path / part / "model.safetensors") for part in ("in", "same"))
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items()) and set(before) == set(after)


def test_equal_heads_in_scattered_groups_keep_the_logits(llama, tmp_path):
    """Query heads are put in another order, so that the configuration needs no head map."""
    model, directory = llama

    def share(tensors):
        for name, tensor in tensors.items():
            if name.split(".")[-2] in ("k_proj", "v_proj"):
                heads = tensor.view(4, 8, -1)
                heads[3], heads[1] = heads[0], heads[2]

    edit_weights(directory, share)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert run(directory, tmp_path / "out", "--kv-heads", 2, "--groups", "0,3", "2,1") == 0
    same_logits(tmp_path / "out", lambda ids: model(ids).logits)
    write_tokenizer(directory)
    assert run(directory, tmp_path / "similar", "--kv-heads", 2, "--method", "similar", "--tokens", 64) == 0
    same_logits(tmp_path / "similar", lambda ids: model(ids).logits)


def test_shards_stay_shards_and_dtypes_stay_theirs(tmp_path, capsys):
    random_model(LlamaConfig(**MHA)).to(torch.bfloat16).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert run(tmp_path / "in", tmp_path / "out", "--kv-heads", 2) == 0
    names = sorted(path.name for path in (tmp_path / "in").glob("*.safetensors*"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors*")) == names and len(names) > 2
    assert open_in_transformers(tmp_path / "out").dtype == torch.bfloat16
    assert "no tokenizer" in capsys.readouterr().out
    assert run(tmp_path / "in", tmp_path / "fp16", "--kv-heads", 2, "--dtype", "fp16") == 0
    half = attnpack.CausalLM.from_hf(tmp_path / "fp16", dtype=torch.float16).state_dict()
    for name, tensor in attnpack.CausalLM.from_hf(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(half[name].float(), tensor, rtol=1e-2, atol=1e-3)
    assert open_in_transformers(tmp_path / "fp16").dtype == torch.float16


def test_one_shard_keeps_its_index(llama, tmp_path):
    source, shard = llama[1], "model-00001-of-00001.safetensors"
    names = load_file(source / "model.safetensors")
    (source / "model.safetensors").rename(source / shard)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    assert run(source, tmp_path / "out", "--kv-heads", 2) == 0
    same_logits(tmp_path / "out")


def test_json_and_what_is_said_without_a_tokenizer(llama, tmp_path, capsys):
    assert run(llama[1], tmp_path / "out", "--kv-heads", 2, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity"] is None and report["perplexity_before"] is None
    assert report["kv_heads_before"] == 4 and report["kv_heads"] == 2 and report["method"] == "aligned"
    assert report["kv_bytes_per_token"] == 2 * 3 * 2 * 8 * 4
    assert any(
        "perplexity and calibration are left out" in note and "has no tokenizer.json" in note
        for note in report["notes"]
    )


def warnings_of(capsys, *arguments):
    assert run(*arguments) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def test_aligned_without_a_text_warns(llama, tmp_path, capsys):
    out = iter(tmp_path / str(i) for i in range(9))
    two, none = ("--kv-heads", 2), ("--tokens", 0)
    for given in (two, (*two, *none)):  # neither a tokenizer nor tokens
        (warning,) = warnings_of(capsys, llama[1], next(out), *given)
        assert "can be worse than mean" in warning
        assert warning.endswith("give --tokens 2048 and a checkpoint with its tokenizer, or take --method mean")
    write_tokenizer(llama[1])
    assert len(warnings_of(capsys, llama[1], next(out), *two, *none)) == 1
    assert not warnings_of(capsys, llama[1], next(out), *two, "--tokens", 100)
    assert not warnings_of(capsys, llama[1], next(out), "--kv-heads", 4, *none)
    for method in ("mean", "similar"):
        assert not warnings_of(capsys, llama[1], next(out), *two, *none, "--method", method)


def test_aligned_of_an_encoder_decoder_warns(t5gemma, tmp_path, capsys):
    (warning,) = warnings_of(capsys, t5gemma[1], tmp_path / "out", "--kv-heads", 2)
    assert "can be worse than mean" in warning and warning.endswith("16,080): take --method mean")
    assert not warnings_of(capsys, t5gemma[1], tmp_path / "mean", "--kv-heads", 2, "--method", "mean")


def test_perplexity_is_that_of_the_two_models(llama, tmp_path, capsys):
    write_tokenizer(llama[1])
    text = tmp_path / "text.txt"
    text.write_text("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 9)
    assert run(llama[1], tmp_path / "out", "--kv-heads", 1, "--text", text, "--tokens", 200, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    ids = torch.tensor(load_tokenizer(llama[1]).encode(text.read_text())[: report["tokens"]]).view(-1, 128)
    for key, directory in (("perplexity_before", llama[1]), ("perplexity", tmp_path / "out")):
        with torch.no_grad():
            loss = AutoModelForCausalLM.from_pretrained(directory)(ids, labels=ids).loss
        assert report[key] == pytest.approx(loss.exp().item(), rel=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("DOG").input_ids == ids_of(llama[1], "DOG")


def ids_of(directory, text):
    return load_tokenizer(directory).encode(text)


def test_advice_comes_where_it_got_worse(llama, tmp_path, capsys):
    write_tokenizer(llama[1])
    for name, heads in (("worse", 1), ("same", 4)):
        assert run(llama[1], tmp_path / name, "--kv-heads", heads, "--tokens", 100) == 0
        printed = capsys.readouterr().out
        before, after = (float(x) for x in printed.split("at a time: ")[1].split("\n")[0].split(" -> "))
        assert ("attnpack uptrain" in printed) == (after > before)


def nan(tensors):
    tensors["model.layers.2.self_attn.v_proj.weight"][3, 1] = torch.nan


def append(directory, more: bytes):
    with (directory / "model.safetensors").open("ab") as file:
        file.write(more)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda places, last: places.pop("model.norm.weight"), "does not name model.norm.weight of model-0"),
        (lambda places, last: places.update({"model.norm.weight": last}), "says that model.norm.weight is in"),
        (
            lambda places, last: places.update({"model.norm.weight": "../in/" + last}),
            "the name of one in the same folder",
        ),
        (lambda places, last: places.update({"model.norm.weight": 3}), "names the file 3"),
        (lambda places, last: places.update({"model.norm.weight": "gone.safetensors"}), "lacks gone.safetensors"),
        (
            lambda places, last: places.update({"model.norm.weight": "attnpack_convert.json"}),
            "the name of one in the same",
        ),
        (lambda places, last: places.clear(), "has no weight_map"),
    ],
    ids=["lacking", "wrong", "outside", "number", "gone", "record", "empty"],
)
def test_an_index_that_is_not_of_its_shards_is_refused(tmp_path, capsys, damage, words):
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    index = tmp_path / "in" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = sorted(set(content["weight_map"].values()) - {content["weight_map"]["model.norm.weight"]})
    damage(content["weight_map"], names[-1])
    index.write_text(json.dumps(content))
    capsys.readouterr()  # transformers' progress bar
    refused(capsys, tmp_path, [tmp_path / "in", tmp_path / "out", "--kv-heads", 2], words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: edit_weights(d, nan), ("layers.2.self_attn.v_proj.weight", "holds NaN")),
        (lambda d: edit_weights(d, lambda t: t.pop("model.norm.weight")), ("lacks model.norm.weight",)),
        (lambda d: edit_weights(d, lambda t: t.update(extra=torch.ones(2))), ("unexpected extra",)),
        (lambda d: edit_config(d, model_type="bert"), ("model_type 'bert' is not supported",)),
        (lambda d: edit_config(d, num_attention_heads=8), ("has shape",)),
        (lambda d: os.truncate(d / "model.safetensors", 9000), ("model.safetensors", "truncated")),
        (lambda d: (d / "model.safetensors").unlink(), ("neither model.safetensors nor",)),
        (lambda d: (d / "config.json").write_text("{"), ("config.json", "cannot be read as JSON")),
        (lambda d: (d / "config.json").write_text("[1]"), ("config.json: holds a list",)),
        (lambda d: shutil.rmtree(d), ("no such file or directory; give a Hugging Face directory or a GGUF file",)),
        (lambda d: edit_config(d, model_type="t5"), ("'t5' is not supported", "t5gemma")),
        (lambda d: append(d, b"more"), ("model.safetensors: has 4 bytes after its last tensor",)),
    ],
    ids=[
        "nan",
        "missing",
        "extra",
        "family",
        "heads",
        "truncated",
        "weights",
        "config",
        "list",
        "nothing",
        "t5",
        "appended",
    ],
)
def test_a_bad_checkpoint_is_one_sentence_and_nothing_written(llama, tmp_path, capsys, damage, words):
    damage(llama[1])
    refused(capsys, tmp_path, [llama[1], tmp_path / "out", "--kv-heads", 2], *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-heads", 3], ("num_kv_heads: got 3, which does not divide the 4 key-value heads", "choose 1 or 2")),
        (["--kv-heads", 8], ("num_kv_heads: got 8, want 1 to the 4 heads",)),
        (["--kv-heads", 2, "--groups", "0,1", "2"], ("groups: got head 3 in none",)),
        (["--kv-heads", 2, "--groups", "0,1,2", "3"], ("groups: got one that 3 query heads read",)),
        (["--kv-heads", 2, "--window", 5, "--method", "mean"], ("window: got 5, which does not divide",)),
        (["--kv-heads", 2, "--window", 2], ("window: got 2 for method 'aligned', want 1",)),
        (["--kv-heads", 2, "--seed", 1], ("seed: got one for method 'aligned'",)),
        (["--kv-heads", 2, "--method", "similar", "--groups", "0,1", "2,3"], ("groups: got some for method",)),
        (["--kv-heads", 2, "--encoder"], ("--encoder", "is no encoder-decoder model")),
        (["--kv-heads", 2, "--text", "nowhere.txt"], ("nowhere.txt: no such file",)),
        (["--kv-heads", 2, "--text", "nowhere.txt", "--tokens", 0], ("nowhere.txt: no such file",)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_request_that_does_not_fit(llama, tmp_path, capsys, arguments, words):
    write_tokenizer(llama[1])
    refused(capsys, tmp_path, [llama[1], tmp_path / "out", *arguments], *words)


def test_every_layer_draws_heads_of_its_own(llama, tmp_path):
    """Two runs with one seed draw the same numbers."""
    for name in ("out", "again"):
        assert run(llama[1], tmp_path / name, "--kv-heads", 2, "--method", "random", "--seed", 7, "--tokens", 0) == 0
    out, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert out.keys() == again.keys() and all(torch.equal(out[name], again[name]) for name in out)
    names = [name for name in out if name.split(".")[-2] in ("k_proj", "v_proj")]
    drawn = torch.stack([F.normalize(out[name].flatten(), dim=0) for name in names])
    alike = drawn @ drawn.T - torch.eye(len(names))  # cosines of 512 numbers: 0.04 is one standard deviation
    assert len(names) == 6 and alike.abs().max() < 0.3


@pytest.mark.parametrize("way", ["out", "in"])
def test_out_in_in_is_refused_through_a_link(way, llama, tmp_path, capsys):
    link = tmp_path / "link"
    link.symlink_to(llama[1])
    source, out = (llama[1], link / "out") if way == "out" else (link, llama[1] / "out")
    refused(capsys, tmp_path, [source, out, "--kv-heads", 2], "which stays as it is")
    assert not (llama[1] / "out").exists()


def test_out_that_exists_is_left_alone(llama, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    refused(capsys, tmp_path, [llama[1], tmp_path / "out", "--kv-heads", 2], "out: exists already")
    refused(capsys, tmp_path, [llama[1], tmp_path / "no" / "out", "--kv-heads", 2], "lies in no folder")
    refused(capsys, tmp_path, [llama[1], llama[1] / "out", "--kv-heads", 2], "which stays as it is")
    for seed in ("-1", str(2**64), "x"):
        with pytest.raises(SystemExit):
            run(llama[1], tmp_path / "new", "--kv-heads", 2, "--method", "random", "--seed", seed)
        assert "expected a whole number from 0 to 2**64 - 1" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


# Stops before the second layer, prints that, and waits to be killed.
SLOW = """
import sys, time
from attnpack.convert.checkpoint import conversion as checkpoint
merge = checkpoint.merge_layer
def stopping(tensors, attention, request, layer, calibration):
    if layer == 1:
        print("midway", flush=True)
        time.sleep(60)
    return merge(tensors, attention, request, layer, calibration)
checkpoint.merge_layer = stopping
from attnpack.tools import cli
cli.main(["convert", sys.argv[1], sys.argv[2], "--kv-heads", "2"])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, long(signal.SIGINT)], ids=str)
def test_a_killed_conversion_leaves_no_out_and_the_next_one_succeeds(number, llama, tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, llama[1], out],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a test suite in the background ignores this signal
    ) as process:
        assert process.stdout.readline() == "midway\n"
        assert run(llama[1], out, "--kv-heads", 2) == 2  # the directory is being written
        process.send_signal(number)
        process.wait(timeout=30)
    assert not out.exists()
    assert (tmp_path / ".out.partial").exists() == (number == signal.SIGKILL)
    assert run(llama[1], out, "--kv-heads", 2) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    same_logits(out)


def test_memory_stays_that_of_a_layer(tmp_path):
    """The model has 24 layers of 6 MB each. The first conversion loads libraries, so the second one is measured."""
    sizes = {**MHA, "hidden_size": 256, "intermediate_size": 1500, "num_hidden_layers": 24}
    random_model(LlamaConfig(**sizes)).save_pretrained(tmp_path / "in")
    weights = (tmp_path / "in" / "model.safetensors").stat().st_size
    assert weights > 130e6
    measured = run_python(f"""
from pathlib import Path
from attnpack.convert.checkpoint.conversion import Request, convert_checkpoint
from attnpack.tools.memory import peak_bytes
source, out = Path({str(tmp_path / "in")!r}), Path({str(tmp_path / "out")!r})
convert_checkpoint(source, out.with_name("first"), Request(2))
print(peak_bytes(lambda: convert_checkpoint(source, out, Request(2))))
""")
    assert measured.returncode == 0, measured.stderr
    assert int(measured.stdout) < weights / 4


@pytest.fixture
def t5gemma(tmp_path):
    """A tiny encoder-decoder model with four kv heads in both parts: (model of transformers, directory)."""
    sizes = {**MHA, "num_hidden_layers": 2, "head_dim": 8, "attention_bias": True}
    parts = {part: T5GemmaModuleConfig(**sizes) for part in ("encoder", "decoder")}
    torch.manual_seed(0)
    model = T5GemmaForConditionalGeneration(T5GemmaConfig(**parts, vocab_size=96)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
            if name.split(".")[-2] in ("k_proj", "v_proj"):  # pairs of equal heads, but not in the encoder
                heads = parameter.view(4, 8, -1)
                heads[1::2] = heads[::2] if "decoder" in name else heads[1::2]
    model.save_pretrained(tmp_path / "in")
    return model, tmp_path / "in"


@pytest.mark.parametrize("encoder", [False, True])
def test_of_an_encoder_decoder_the_decoder_changes_and_the_encoder_on_request(encoder, t5gemma, tmp_path, capsys):
    model, directory = t5gemma
    assert run(directory, tmp_path / "out", "--kv-heads", 2, *(["--encoder"] if encoder else [])) == 0
    assert "perplexity and calibration are left out" in capsys.readouterr().out
    converted, info = T5GemmaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    heads = {part: getattr(converted.config, part).num_key_value_heads for part in ("encoder", "decoder")}
    assert heads == {"encoder": 2 if encoder else 4, "decoder": 2}
    ids = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        wanted = model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
        found = converted.eval()(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
    assert torch.allclose(found, wanted, atol=1e-4) != encoder  # the decoder's heads were equal in pairs


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: edit_weights(d, lambda t: t.update(extra=torch.ones(2))), "has unexpected extra"),
        (
            lambda d: edit_weights(d, lambda t: t.pop("model.decoder.layers.1.cross_attn.v_proj.weight")),
            "lacks model.d",
        ),
        (lambda d: edit_config(d, decoder={"num_hidden_layers": 2}), "num_attention_heads of the decoder"),
        (lambda d: edit_weights(d, lambda t: t["model.decoder.norm.weight"].fill_(torch.inf)), "holds infinity"),
    ],
    ids=["extra", "missing", "config", "infinity"],
)
def test_a_bad_encoder_decoder_is_one_sentence(t5gemma, tmp_path, capsys, damage, words):
    damage(t5gemma[1])
    refused(capsys, tmp_path, [t5gemma[1], tmp_path / "out", "--kv-heads", 2], words)


def test_the_stop_tokens_of_a_gguf_file_are_kept(tmp_path):
    checkpoint = GgufCheckpoint(lies.write(lies.whole_gguf(), tmp_path / "in"))
    assert config_json(checkpoint, 1)["eos_token_id"] == 31
    checkpoint.file.metadata["tokenizer.ggml.eot_token_id"] = 30
    assert config_json(checkpoint, 1)["eos_token_id"] == [31, 30]


def test_smollm2_from_gguf(tmp_path, capsys, smollm2):
    """The real model: OUT with the same number of heads equals the GGUF file's model, with its tokenizer."""
    assert run(smollm2_path(), tmp_path / "out", "--kv-heads", 3, "--tokens", 128, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity"] == report["perplexity_before"] and report["notes"] == []
    ids = torch.tensor([load_tokenizer(smollm2_path()).encode("The llama is a domesticated South American camelid.")])
    theirs = open_in_transformers(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("The llama is a domesticated South American camelid.").input_ids == ids[0].tolist()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == load_tokenizer(
        smollm2_path()
    ).chat_text("Hi").removesuffix("<|im_start|>assistant\n")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, smollm2(ids), rtol=0, atol=2e-3)
