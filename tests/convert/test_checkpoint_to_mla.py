"""Whole checkpoints to latent attention: the logits of the original at full rank, in transformers too, and the rest."""

import json
import shutil

import attnpack
import pytest
import torch
from attnpack import convert
from attnpack.tools import cli
from gguf_models import tensors_of, write
from hf_checkpoints import DYNAMIC, SIZES, edit_weights, random_model, saved_once, write_tokenizer
from latent_checkpoints import FAMILIES, head_dim, kv_width
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
    SmolLM3Config,
)

IDS = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function from a family's name to the directory of its original, which has no tokenizer."""
    return saved_once(tmp_path_factory, lambda name: random_model(FAMILIES[name]))


def run(*arguments) -> int:
    return cli.main(["convert", *map(str, arguments)])


def logits(directory, ids=IDS, dtype=torch.float32):
    with torch.no_grad():
        return attnpack.CausalLM.from_hf(directory, dtype=dtype)(ids)


def logits_in_transformers(directory, ids=IDS):
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_the_full_rank_gives_the_logits_of_the_original(name, source, tmp_path, capsys):
    width = kv_width(FAMILIES[name])
    assert run(source(name), tmp_path / "out", "--kv-lora-rank", 2 * width, "--tokens", 0) == 0
    assert f"latents of {2 * width} and a rotating key of {width}" in capsys.readouterr().out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    assert config["kv_lora_rank"] == 2 * width and config["qk_rope_head_dim"] == width
    wanted = logits_in_transformers(source(name))
    torch.testing.assert_close(logits(tmp_path / "out"), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_in_transformers(tmp_path / "out"), wanted, rtol=0, atol=2e-3)
    short = IDS[:, :20]  # within the trained length of longrope
    torch.testing.assert_close(
        logits_in_transformers(tmp_path / "out", short), logits_in_transformers(source(name), short), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "granite", "qwen2"])
def test_fewer_rotating_dims_run_alike_in_transformers(name, source, tmp_path):
    width = kv_width(FAMILIES[name])
    for rope in (2, width // 2):
        out = tmp_path / str(rope)
        report = convert.checkpoint_to_mla(source(name), out, width, rope, tokens=0)
        assert report.qk_rope_head_dim == rope and report.kv_lora_rank == width
        assert report.kv_bytes_per_token == 3 * 4 * (width + rope)
        assert report.kv_bytes_per_token_before == 3 * 4 * 2 * width
        torch.testing.assert_close(logits(out), logits_in_transformers(out), rtol=0, atol=2e-3)


def test_a_wider_key_and_a_wider_latent_lose_less(source, tmp_path):
    wanted, width = logits(source("llama")), kv_width(FAMILIES["llama"])

    def error(rank, rope):
        out = tmp_path / f"{rank}-{rope}"
        convert.checkpoint_to_mla(source("llama"), out, rank, rope, tokens=0)
        return (logits(out) - wanted).norm() / wanted.norm()

    by_rope = [error(2 * width, rope) for rope in (2, width // 2, width)]
    by_rank = [error(rank, width) for rank in (2, width // 2, width + 1)]
    for errors in (by_rope, by_rank):
        assert errors[0] > 1.2 * errors[1] > 1e-3 and errors[2] < 1e-5


def test_equal_keys_of_all_heads_need_one_head_of_rotating_dims(source, tmp_path):
    """Where a head's pairs are those of another one, turned and scaled, a frequency has one component."""
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path / "in")

    def share(tensors):
        turn = torch.polar(torch.tensor([0.5, 2.0, 1.0, 0.7]), torch.tensor([0.3, 2.0, 5.0, 1.0]))[:, None]
        for name, tensor in tensors.items():
            if name.endswith("k_proj.weight"):
                heads = tensor.view(2, 2, 4, -1)
                turned = torch.complex(heads[0, 0], heads[0, 1]) * turn
                heads[1, 0], heads[1, 1] = turned.real, turned.imag

    edit_weights(tmp_path / "in", share)
    convert.checkpoint_to_mla(tmp_path / "in", tmp_path / "out", 18, 8, tokens=0)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "in"), rtol=0, atol=1e-4)
    rope = json.loads((tmp_path / "out/config.json").read_text())["rope_scaling"]
    assert rope["short_factor"] == pytest.approx([1.0] * 4)


def test_pairs_that_hardly_turn_are_the_ones_that_stop(tmp_path):
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e24})
    random_model(config).save_pretrained(tmp_path / "in")  # frequencies 1, 1e-6, 1e-12, 1e-18
    errors = []
    for rope in (4, 2):
        convert.checkpoint_to_mla(tmp_path / "in", tmp_path / str(rope), 32, rope, tokens=0)
        errors.append((logits(tmp_path / str(rope)) - logits(tmp_path / "in")).abs().max())
    assert errors[0] < 2e-3 and errors[1] > 2e-2
    rope = json.loads((tmp_path / "4/config.json").read_text())["rope_scaling"]
    assert rope["short_factor"] == pytest.approx([1.0, 1e-12])  # the base has 1 and 1e-12, wanted are 1 and 1


def test_values_of_low_rank_need_a_latent_of_that_rank_and_its_constant(tmp_path):
    random_model(FAMILIES["llama"]).save_pretrained(tmp_path / "in")

    def thin(tensors):
        for name, tensor in tensors.items():
            if name.endswith("v_proj.weight"):
                u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
                tensor.copy_(u[:, :5] * s[:5] @ vh[:5])

    edit_weights(tmp_path / "in", thin)
    errors = []
    for rank in (6, 5):
        convert.checkpoint_to_mla(tmp_path / "in", tmp_path / str(rank), rank, tokens=0)
        errors.append((logits(tmp_path / str(rank)) - logits(tmp_path / "in")).abs().max())
    assert errors[0] < 1e-4 and errors[1] > 1e-3


def test_where_nothing_turns_dims_without_rotation_are_exact(source):
    """All tokens at one position, for which the mean rotation of a text of one token is none."""
    model = attnpack.CausalLM.from_hf(source("llama"))
    made = convert.to_mla(model, 32, rope_dim=4, length=1)
    here, apart = torch.full((40,), 7), torch.arange(40)
    with torch.no_grad():
        torch.testing.assert_close(made(IDS, positions=here), model(IDS, positions=here), rtol=0, atol=1e-4)
        assert (made(IDS, positions=apart) - model(IDS, positions=apart)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama-biases", "qwen2-tied", "llama-longrope"])
def test_a_model_becomes_what_the_command_writes(name, source, tmp_path):
    model = attnpack.CausalLM.from_hf(source(name))
    convert.checkpoint_to_mla(source(name), tmp_path / "out", 20, 6, tokens=0)
    written = attnpack.CausalLM.from_hf(tmp_path / "out").state_dict()
    for given in (model, model.cpp()):
        made = convert.to_mla(given, 20, rope_dim=6)
        assert type(made) is type(given)
        state = {name: tensor.detach() for name, tensor in made.state_dict().items()}
        assert set(state) == set(written)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, written[key], rtol=1e-5, atol=1e-5, msg=key)
        with torch.no_grad():
            torch.testing.assert_close(made(IDS), logits(tmp_path / "out"), rtol=0, atol=1e-4)


def test_what_is_frozen_and_the_modes_of_the_modules_stay(source):
    model = attnpack.CausalLM.from_hf(source("llama")).train()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].eval()
    native = model.cpp()
    for given in (model, native):
        made = convert.to_mla(given, 20, rope_dim=6, ids=IDS)
        trained = {name: p.requires_grad for name, p in made.named_parameters()}
        assert not trained["model.embed_tokens.weight"] and trained["model.norm.weight"]
    modes = {name: module.training for name, module in model.named_modules()}
    assert not modes["model.layers.0.mlp"] and modes["model.layers.1.mlp"]


def test_a_model_keeps_its_factors_and_learns_from_a_text(source):
    model = attnpack.CausalLM.from_hf(source("granite"))
    exact = convert.to_mla(model, 32)
    seen, blind = convert.to_mla(model, 9, rope_dim=4, ids=IDS), convert.to_mla(model, 9, rope_dim=4, length=40)
    assert exact.embed_scale == 3.0 and exact.latent["kv_lora_rank"] == 32 and exact.latent["latent_norm"]
    assert not exact.training and exact.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    with torch.no_grad():
        wanted = model(IDS)
        torch.testing.assert_close(exact(IDS), wanted, rtol=0, atol=1e-4)
        errors = [(made(IDS) - wanted).norm() for made in (seen, blind)]
    assert errors[0] < 0.9 * errors[1]
    with pytest.raises(ValueError, match="ids: got shape"):
        convert.to_mla(model, 9, ids=IDS[0])
    with pytest.raises(ValueError, match="calibration: got one for a whole model"):
        convert.to_mla(model, 9, calibration=torch.randn(1, 4, 32))


def test_a_layer_with_rotating_dims_of_all_heads_is_exact():
    torch.manual_seed(0)
    rope = attnpack.RotaryEmbedding(6, base=100.0, scaling={"rope_type": "linear", "factor": 2.0})
    layer = attnpack.GroupedQueryAttention(24, 4, 2, rope=rope, causal=True, bias=True, dtype=torch.float64)
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    made = convert.to_mla(layer, 12, rope_dim=12)
    assert made.rope.dim == 12 and made.qk_rope_head_dim == 12
    with torch.no_grad():
        torch.testing.assert_close(made(x), layer(x), rtol=1e-8, atol=1e-8)
        assert (convert.to_mla(layer, 24, rope_dim=6)(x) - layer(x)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="rope_dim: got 5, want an even number from 2 to 12"):
        convert.to_mla(layer, 12, rope_dim=5)
    with pytest.raises(ValueError, match="rope_dim: got 2, want none for a layer without RoPE"):
        convert.to_mla(attnpack.MultiHeadAttention(24, 4), 12, rope_dim=2)


def test_generation_reads_latent_caches(source, tmp_path):
    report = convert.checkpoint_to_mla(source("llama-tied"), tmp_path / "out", 32, tokens=0)
    model, original = (attnpack.CausalLM.from_hf(path) for path in (tmp_path / "out", source("llama-tied")))
    for kind in ("dynamic", "static", "none"):
        assert torch.equal(
            model.generate(IDS[:, :5], max_new_tokens=12, cache=kind),
            original.generate(IDS[:, :5], max_new_tokens=12, cache=kind),
        )
    cache = attnpack.ModelCache([attnpack.LatentCache() for _ in range(3)])
    with torch.no_grad():
        steps = torch.cat([model(token, cache=cache) for token in IDS.split(1, 1)], 1)
    torch.testing.assert_close(steps, model(IDS).detach(), rtol=0, atol=1e-4)
    assert cache.nbytes == IDS.numel() * report.kv_bytes_per_token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shards_stay_and_half_precision_is_that_of_the_original(dtype, tmp_path):
    model = random_model(FAMILIES["qwen2"])
    model.save_pretrained(tmp_path / "exact")
    model.to(dtype).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    convert.checkpoint_to_mla(tmp_path / "in", tmp_path / "out", 33, tokens=0)
    names = sorted(path.name for path in (tmp_path / "in").glob("*.safetensors*"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors*")) == names and len(names) > 2
    wanted = logits(tmp_path / "exact")

    def error(found):
        return (found.float() - wanted).norm()

    assert error(logits(tmp_path / "out", dtype=dtype)) < 3 * error(logits(tmp_path / "in", dtype=dtype))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == dtype
    with torch.no_grad():
        assert error(theirs(IDS).logits) < 3 * error(logits(tmp_path / "in", dtype=dtype))


def test_the_report_and_the_notes(source, tmp_path, capsys):
    assert run(source("llama"), tmp_path / "out", "--kv-lora-rank", 9, "--rope-dim", 4, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kv_lora_rank"] == 9 and report["perplexity"] is None
    assert any("has no tokenizer.json" in note for note in report["notes"])
    assert any(note.startswith("without a text the latents are made by the weights") for note in report["notes"])
    assert json.loads((tmp_path / "out/attnpack_convert.json").read_text())["source"] == str(source("llama"))
    random_model(FAMILIES["granite"]).save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    (tmp_path / "text.txt").write_text("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 9)
    text = ("--text", tmp_path / "text.txt", "--tokens", 200, "--json")
    assert run(tmp_path / "in", tmp_path / "seen", "--kv-lora-rank", 9, "--rope-dim", 4, *text) == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["notes"]
    tokenizer = attnpack.checkpoints.load_tokenizer(tmp_path / "seen")
    ids = torch.tensor(tokenizer.encode((tmp_path / "text.txt").read_text())[: report["tokens"]]).view(-1, 128)
    for key, directory in (("perplexity_before", "in"), ("perplexity", "seen")):
        with torch.no_grad():
            loss = AutoModelForCausalLM.from_pretrained(tmp_path / directory)(ids, labels=ids).loss
        assert report[key] == pytest.approx(loss.exp().item(), rel=1e-3)


def test_gguf_files(tmp_path):
    model = random_model(FAMILIES["llama-tied"])
    config = model.config
    settings = {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    write(tmp_path / "model.gguf", "llama", settings, tensors_of(model, "llama"))
    convert.checkpoint_to_mla(tmp_path / "model.gguf", tmp_path / "out", 32, tokens=0)
    with torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "out"), model(IDS).logits, rtol=0, atol=1e-4)


REFUSED = {
    "qwen3": (Qwen3Config(**SIZES, head_dim=16), ["qk_norm"]),
    "gemma2": (
        Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=20.0),
        ["softcap (a soft cap on the", "window"],
    ),
    "mistral": (MistralConfig(**SIZES, sliding_window=16), ["window"]),
    "gpt-oss": (GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1), ["sinks"]),
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=2, sliding_window=None), ["experts (a mixture of experts)"]),
    "smollm3": (SmolLM3Config(**SIZES, pad_token_id=0, no_rope_layers=[1, 0, 1]), ["layers without RoPE"]),
    "dynamic": (
        LlamaConfig(**{**SIZES, "max_position_embeddings": 32}, rope_parameters=DYNAMIC),
        ["rope_scaling 'dynamic'"],
    ),
    "mlp-bias": (LlamaConfig(**SIZES, mlp_bias=True), ["mlp_bias"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_latent_attention_cannot_hold_is_named(name, tmp_path, capsys):
    config, words = REFUSED[name]
    random_model(config).save_pretrained(tmp_path / "in")
    capsys.readouterr()
    assert run(tmp_path / "in", tmp_path / "out", "--kv-lora-rank", 32, "--tokens", 0) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"attnpack convert: {tmp_path / 'in'}") and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err, printed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"qk_norm": True, "window": (3, 0)}, r"here: qk_norm \(norms of queries and keys\), window \("),
        ({"scores": {"softcap": 5.0, "sinks": True}}, r"here: softcap \(a soft cap on the scores\), sinks"),
        ({"position_embedding": "learned", "norm": "layer"}, r"here: layers without RoPE .*, norm 'layer'"),
        ({"latent": dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
          "num_kv_heads": None}, "got one of latent attention, which needs no conversion"),
    ],
)  # fmt: skip
def test_a_model_that_latent_attention_cannot_hold_is_refused(settings, words):
    model = attnpack.CausalLM(**({"vocab_size": 96, "embed_dim": 32, "num_layers": 1, "num_heads": 4,
                                  "num_kv_heads": 2} | settings))  # fmt: skip
    for given in (model, model.cpp()):
        with pytest.raises(ValueError, match=words):
            convert.to_mla(given, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-lora-rank", 1), "--kv-lora-rank: got 1, want an int of at least 2; from 32 on nothing is lost"),
        (("--kv-lora-rank", 10**9), "--kv-lora-rank: got 1000000000, want 2 to 65536; the full rank is 32"),
        (("--kv-lora-rank", 8, "--rope-dim", 5), "--rope-dim: got 5, want an even number from 2 to 16"),
        (("--kv-lora-rank", 8, "--rope-dim", 18), "--rope-dim: got 18, want an even number from 2 to 16"),
        (("--kv-heads", 1, "--rope-dim", 8), "--rope-dim: got one without --kv-lora-rank"),
        (("--rope-dim", 8), "--rope-dim: got one without --kv-lora-rank; give both, or leave it out"),
        (("--kv-lora-rank", 8, "--seed", 1, "--encoder"), "--seed, --encoder: got together with --kv-lora-rank"),
    ],
)
def test_sizes_that_do_not_fit_name_the_flag(arguments, words, source, tmp_path, capsys):
    assert run(source("llama"), tmp_path / "out", *arguments) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_leaves_nothing_behind(source, tmp_path):
    weights = shutil.copytree(source("llama"), tmp_path / "in") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors"):
        convert.checkpoint_to_mla(tmp_path / "in", tmp_path / "out", 9, tokens=0)
    assert not (tmp_path / "out").exists()


def test_a_latent_checkpoint_and_a_rank_of_zero_are_refused(source, tmp_path, capsys):
    convert.checkpoint_to_mla(source("llama"), tmp_path / "out", 9, tokens=0)
    assert run(tmp_path / "out", tmp_path / "twice", "--kv-lora-rank", 8) == 2
    assert "got one of latent attention, which needs no conversion" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(source("llama"), tmp_path / "none", "--kv-lora-rank", 0)
    assert "--kv-lora-rank" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--kv-lora-rank: got 0"):
        convert.checkpoint_to_mla(source("llama"), tmp_path / "none", 0)
    assert head_dim(FAMILIES["llama"]) == 8
