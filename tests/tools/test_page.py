"""The page of attention: its numbers are the model's, it needs no network, and it works in headless Chromium."""

import base64
import copy
import html
import json
import re
import shlex
from pathlib import Path

import attnpack
import matplotlib.image
import pytest
import torch
from attnpack.tools import cli
from attnpack.tools.plot.attention import lm_attention
from attnpack.tools.plot.page import attention_page
from browser import CHROMIUM, NO_CHROMIUM, browse, unpack

TOKENS = ["a", " <b>", '"c"', "</script>", "\n", "d&amp;"]


@pytest.fixture(scope="module")
def model():
    """Two layers, 4 query heads on 2 key-value heads, with sinks; the second layer sees 3 tokens."""
    torch.manual_seed(0)
    settings = [{}, {"window": (2, 0)}]
    made = attnpack.CausalLM(
        50, 32, 2, 4, 2, hidden_dim=48, max_positions=64, scores={"sinks": True}, layer_settings=settings
    )
    with torch.no_grad():
        for layer in made.layers:
            layer.self_attn.sinks.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
            layer.self_attn.q_proj.weight.mul_(4)
    return made.eval()


@pytest.fixture(scope="module")
def page(model):
    return attention_page(model, range(len(TOKENS)), TOKENS)


def data_of(page):
    return json.loads(re.search(r'<script id="data".*?>(.*?)</script>', str(page), flags=re.S).group(1))


def test_numbers_are_those_of_the_model(model, page):
    data = data_of(page)
    values = values_of(model)
    assert data["tokens"] == TOKENS and [layer["number"] for layer in data["layers"]] == [0, 1]
    for layer, wanted in zip(data["layers"], lm_attention(model, torch.arange(6)[None]), strict=True):
        assert (layer["heads"], layer["dim"], layer["kv"], layer["sinks"]) == (4, 8, [0, 0, 1, 1], [0, 1, 2, -1])
        weights = unpack(layer["weights"], 4, 6, 6)
        torch.testing.assert_close(weights, wanted[0], atol=1e-4, rtol=0)
        q, k = unpack(layer["q"], 4, 6, 8), unpack(layer["k"], 2, 6, 8)
        sinks = model.layers[layer["number"]].self_attn.sinks
        window = model.layers[layer["number"]].self_attn.window or (-1, -1)
        scored = attnpack.attention_scores(
            q[None], k[None], causal=True, window=window, sinks=sinks, scale=layer["scale"]
        )
        torch.testing.assert_close(scored[0], weights, atol=1e-3, rtol=0, msg="q and k are those of the operator")
        assert layer["v_dim"] == 8
        torch.testing.assert_close(unpack(layer["v"], 2, 6, 8), values[layer["number"]], atol=1e-4, rtol=0)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    for layer, left in zip(data["layers"], (6, 2), strict=True):
        assert torch.equal(hidden_of(layer, 6), ((distance < 0) | (distance > left)).expand(1, 6, 6))
    assert [layer["mask"] for layer in data["layers"]] == ["causal", "causal, a window of 2 keys before"]


def values_of(model):
    """The values of each layer [2, 6, 8], by the weights of its projection."""
    found = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args: found.append((args[0] @ module.v_proj.weight.T).view(6, 2, 8).transpose(0, 1))
        )
        for layer in model.layers
    ]
    with torch.no_grad():
        model(torch.arange(6)[None])
    for hook in hooks:
        hook.remove()
    return found


def hidden_of(layer, length):
    """bool [1 or H, L, L]"""
    count = layer["hidden"]["heads"]
    found = torch.frombuffer(bytearray(base64.b64decode(layer["hidden"]["base64"])), dtype=torch.uint8)
    bits = found.unsqueeze(1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten()[: count * length**2].view(count, length, length).bool()


def test_needs_no_network(page):
    assert not re.search(r"https?:|@import|<link|<img|\bsrc=|url\(", str(page))
    assert "default-src 'none'" in str(page)


def test_a_notebook_shows_it_in_a_frame(page):
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)".*</iframe>', page._repr_html_(), flags=re.S)
    assert html.unescape(frame.group(1)) == str(page)


def test_some_layers_alone(model):
    data = data_of(attention_page(model, [1, 2], ["x", "y"], layers=[1]))
    assert [layer["number"] for layer in data["layers"]] == [1] and data["open"]["layer"] == 1
    assert data_of(attention_page(model, [1, 2], ["x", "y"], layer=1))["open"]["layer"] == 1
    data = data_of(attention_page(model, torch.tensor([[1, 2]]), ["x", "y"]))
    assert data["open"] == data["findings"][0]


def test_the_title_names_the_model(model, page):
    assert "heads of CausalLM on" in str(page)
    named = str(attention_page(model, [1, 2], ["x", "y"], name="a <b> ATTENTION_DATA"))
    assert named.count("a &lt;b&gt; ATTENTION_DATA") == 2 and data_of(named)["tokens"] == ["x", "y"]
    assert "<title>Attention heads of a &lt;b&gt;" in named


def test_a_page_of_transformers_has_the_name_of_the_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = transformers.LlamaModel(transformers.LlamaConfig(**sizes, intermediate_size=32))
    made.save_pretrained(tmp_path / "Tiny-Llama")
    made = transformers.LlamaModel.from_pretrained(tmp_path / "Tiny-Llama").eval()
    page = str(attention_page(made, [1, 2], ["x", "y"]))
    assert "heads of Tiny-Llama on" in page and str(tmp_path) not in page


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"layers": [2]}, "layers: got 2, want 0 to 1, the model's layers"),
        ({"layers": []}, "layers: got none, want numbers of layers, or None for all"),
        ({"layer": 2}, "layer: got 2, want 0 to 1, the model's layers"),
        ({"layer": -1}, "layer: got -1, want 0 to 1"),
        ({"layers": [1], "layer": 0}, r"layer: got 0, want one of the layers that are shown, \[1\]"),
        ({"ids": []}, "ids: got 0 tokens, want 1 to 256"),
        ({"ids": [0] * 257}, "ids: got 257 tokens, want 1 to 256"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, r"ids: got shape \[2, 3\], want one sequence"),
        ({"tokens": ["x"]}, r"tokens: got 1 texts for 2 ids, want one for each: \[tokenizer.decode"),
        ({"tokens": ["x"] * 3}, "tokens: got 3 texts for 2 ids"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(model, arguments, said):
    with pytest.raises(ValueError, match=said):
        attention_page(model, **{"ids": [1, 2], "tokens": ["x", "y"], **arguments})


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"ids": "a text"}, "ids is 'a text' .str., wants the ids of a sequence, such as tokenizer.encode"),
        ({"ids": 3}, "ids is 3 .int., wants the ids"),
        ({"tokens": "xy"}, "tokens is 'xy' .str., wants a list of texts, one for each id"),
        ({"tokens": ["x", 2]}, "tokens.1. is 2 .int., wants a text"),
        ({"layers": 1}, "layers is 1 .int., wants a list of numbers of layers"),
        ({"model": "llama"}, "model is 'llama' .str., wants a model with .*, or a model of transformers"),
        ({"model": torch.nn.Embedding(4, 4)}, "model: got a Embedding that called no self-attention"),
    ],
    ids=str,
)
def test_arguments_of_another_kind(model, arguments, said):
    with pytest.raises(TypeError, match=said):
        attention_page(**{"model": model, "ids": [1, 2], "tokens": ["x", "y"], **arguments})


def test_weights_that_are_not_numbers(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="model: layer 1 has NaN or infinity in its weights"):
        attention_page(broken, [1, 2], ["x", "y"])


def test_latent_attention_has_a_page():
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    latent = attnpack.CausalLM(50, 32, 1, 4, hidden_dim=48, max_positions=64, latent=sizes)
    (layer,) = data_of(attention_page(latent, [1, 2, 3], ["x", "y", "z"]))["layers"]
    wanted = lm_attention(latent, torch.tensor([[1, 2, 3]]))[0][0]
    torch.testing.assert_close(unpack(layer["weights"], 4, 3, 3), wanted, atol=1e-4, rtol=0)


def chromium(folder, page, *options, where="", script=""):
    """The output of headless Chromium for the page, opened at `where`, after `script` ran in it."""
    file = folder / "page.html"
    file.write_text(str(page).replace("</body>", f"<script>{script}</script></body>"))
    return browse(folder / "profile", f"file://{file}#{where}", *options)


def details(dom):
    return dict(re.findall(r"<td>([^<]*)</td><td>([^<]*)</td>", re.search(r'id="pair">(.*?)</table>', dom)[1]))


def softmax_of(dom):
    """The rows of the softmax table, each a list of its cells' texts."""
    rows = re.findall(r"<tr.*?>(.*?)</tr>", re.search(r'id="softmax">(.*?)</table>', dom, flags=re.S)[1])
    return [re.findall(r"<t[dh]>([^<]*)", row) for row in rows]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)


@needs_chromium
def test_says_the_details_of_a_query_and_a_key(model, page, tmp_path):
    weights = lm_attention(model, torch.arange(6)[None])[1][0, 2]
    said = details(chromium(tmp_path, page, "--dump-dom", where="layer=1&head=2&query=4&key=3"))
    assert said["weight"] == f"{100 * weights[4, 3]:.1f}%" and said["query"] == "4: \\n"
    assert (
        said["on the sink"] == f"{100 * (1 - weights[4].sum()):.1f}%"
        and said["key-value head"] == "1, read by heads 2, 3"
    )
    hidden = details(chromium(tmp_path, page, "--dump-dom", where="layer=1&head=2&query=4&key=1"))
    assert hidden["weight"] == "0, hidden by the mask" and weights[4, 1] == 0


@needs_chromium
def test_a_score_adds_up_to_what_the_softmax_takes(tmp_path):
    """Soft cap, ALiBi and what a mask adds are shown, and their sum is the score of `attention_scores`."""
    torch.manual_seed(1)
    scores = {"softcap": 3.0, "alibi": True}
    made = attnpack.CausalLM(50, 32, 1, 4, 2, hidden_dim=48, scores=scores, position_embedding="none").eval()
    attention, added = made.layers[0].self_attn, torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        attention.q_proj.weight.mul_(8)
        found = []
        attention.register_forward_pre_hook(lambda layer, args: found.append(args[0]))
        page = attention_page(made, range(6), TOKENS, mask=added)
        q, k, _ = attention.project(found[0])
    settings = attention._settings(q) | {"causal": True}
    wanted = attnpack.attention_scores(q, k, added, stage="masked", **settings)[0, 3, 4, 1].item()
    said = details(chromium(tmp_path, page, "--dump-dom", where="layer=0&head=3&query=4&key=1"))
    number = {name: float(t.replace("\u2212", "-")) for name, t in said.items() if re.fullmatch(r"[\u2212+\d.]+", t)}
    parts = [number[name] for name in ("q\u00b7k \u00d7 scale", "soft cap of 3", "ALiBi, distance 3", "the mask adds")]
    assert number["score"] == pytest.approx(wanted, abs=0.006) and sum(parts) == pytest.approx(wanted, abs=0.03)
    assert parts[2] == pytest.approx(-3 * attnpack.ops.alibi_slopes(4)[3], abs=0.006) and abs(parts[1]) > 0.05
    assert parts[3] == pytest.approx(added[0, 3, 4, 1].item(), abs=0.006)


@needs_chromium
def test_opens_at_a_layer(model, tmp_path):
    page = attention_page(model, range(len(TOKENS)), TOKENS, layer=1)
    said = chromium(tmp_path, page, "--dump-dom")
    assert f"Layer 1, head {page.opened.head}, key-value head {page.opened.head // 2}" in said
    assert details(said)["query"].startswith(f"{page.opened.query}: ")
    assert "Layer 0, head 3, key-value head 1" in chromium(tmp_path, page, "--dump-dom", where="layer=0&head=3")
    assert "Layer 0, head 0, key-value head 0" in chromium(tmp_path, page, "--dump-dom", where="layer=7&head=x&key=-1")
    script = "history.replaceState(null, '', '#layer=0&head=2'); window.onhashchange();"
    assert "Layer 0, head 2, key-value head 1" in chromium(tmp_path, page, "--dump-dom", script=script)


@needs_chromium
@pytest.mark.parametrize("size", ["1280,720", "500,900"])
@pytest.mark.parametrize("words", [TOKENS, [f" word{n}" for n in range(256)]], ids=["short", "long"])
def test_fits_the_window(model, words, size, tmp_path):
    """Nothing reaches over the right edge; and in a wide window the three parts stand beside each other."""
    script = """
      const boxes = names => [...document.querySelectorAll(names)].map(each => each.getBoundingClientRect());
      const right = Math.max(...boxes("section, #large, #details *, p").map(box => box.right));
      const tops = boxes("section").map(box => Math.round(box.top));
      document.title = JSON.stringify([right, document.documentElement.clientWidth, tops]);
    """
    page = attention_page(model, [n % 50 for n in range(len(words))], words)
    dom = chromium(tmp_path, page, "--dump-dom", f"--window-size={size}", script=script)
    right, width, tops = json.loads(re.search("<title>(.*?)</title>", dom)[1])
    assert right <= width and width > 400
    assert (len(set(tops)) == 1) == (width > 1150), tops


@needs_chromium
def test_the_softmax_of_a_query_is_the_models(tmp_path):
    """Score, exp, weight and output of each key, with a sink; the sums are those of the column."""
    torch.manual_seed(0)
    made = attnpack.CausalLM(50, 32, 1, 4, 2, hidden_dim=48, scores={"sinks": True}).eval()
    with torch.no_grad():
        made.layers[0].self_attn.sinks.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
        made.layers[0].self_attn.q_proj.weight.mul_(4)
    page = attention_page(made, range(6), TOKENS)
    dom = chromium(tmp_path, page, "--dump-dom", where="layer=0&head=2&query=3&key=1")
    names, *keys, sink, output = softmax_of(dom)
    assert names == ["key", "score", "e^(score \u2212 max)", "weight", "value"] and len(keys) == 4
    (layer,) = data_of(page)["layers"]
    q, k = unpack(layer["q"], 4, 6, 8)[2, 3], unpack(layer["k"], 2, 6, 8)[1, :4]
    scores = torch.cat([k @ q * layer["scale"], torch.tensor([2.0])]).double()
    exps = (scores - scores.max()).exp()
    shown = [[float(cell.replace("\u2212", "-").rstrip("%")) for cell in row[1:4]] for row in [*keys, sink]]
    wanted = torch.stack([scores, exps, 100 * exps / exps.sum()], 1)
    torch.testing.assert_close(torch.tensor(shown).double(), wanted, atol=0.06, rtol=0)
    assert float(output[2]) == pytest.approx(exps.sum().item(), abs=1e-3)
    assert "3 of 6" not in dom and "2 of 6 keys are hidden" in dom
    mass = lm_attention(made, torch.arange(6)[None])[0][0, 2, :, 1].sum()
    assert details(dom)["mass of the key"] == f"{mass:.2f} of 6 queries' weights"


@needs_chromium
def test_the_output_is_the_sum_of_weight_times_value(model, page, tmp_path):
    """The strip of the output has the colours of the numbers."""
    script = """
      const strips = [...document.querySelectorAll("#softmax canvas")];
      const image = strips[strips.length - 1].getContext("2d").getImageData(0, 0, 8, 1).data;
      document.title = JSON.stringify(Array.from(image));
    """
    dom = chromium(tmp_path, page, "--dump-dom", where="layer=0&head=3&query=4&key=1", script=script)
    values = values_of(model)[0][1]
    output = lm_attention(model, torch.arange(6)[None])[0][0, 3, 4] @ values
    much = (output / values.abs().max()).clamp(-1, 1)
    full = torch.where(much[:, None] > 0, torch.tensor([0.0, 158, 115]), torch.tensor([204.0, 121, 167]))
    shown = torch.tensor(json.loads(re.search("<title>(.*?)</title>", dom)[1])).view(8, 4)[:, :3]
    torch.testing.assert_close(shown.float(), 255 + (full - 255) * much.abs()[:, None], atol=1.5, rtol=0)


@needs_chromium
def test_a_click_pins_and_the_address_follows(page, tmp_path):
    hover = """
      const span = n => document.querySelectorAll("#sentence span")[n];
      const point = (n, kind) => span(n).dispatchEvent(new MouseEvent(kind));
      const tell = () => location.hash + " " + document.querySelector("#pair td:nth-child(2)").textContent;
      const found = [];
      point(3, "click"); point(4, "mouseenter"); found.push(tell());
      point(3, "click"); point(4, "mouseenter"); found.push(tell());
      point(2, "click"); document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
      point(5, "mouseenter"); found.push(tell());
      document.getElementById("small-1-2").click(); found.push(location.hash);
      document.title = JSON.stringify(found);
    """
    dom = chromium(tmp_path, page, "--dump-dom", where="layer=0&head=1", script=hover)
    title = html.unescape(re.search("<title>(.*?)</title>", dom)[1])
    pinned, free, escaped, clicked = json.loads(title)
    assert re.fullmatch(r"#layer=0&head=1&query=3&key=\d 3: .*", pinned)
    assert free.endswith("4: \\n") and escaped.endswith("5: d&amp;")
    assert re.fullmatch(r"#layer=1&head=2&query=5&key=\d", clicked)
    crossing = """document.querySelectorAll("#sentence span")[3].dispatchEvent(new MouseEvent("mouseenter"));"""
    sent = chromium(tmp_path, page, "--dump-dom", where="layer=0&head=1&query=2&key=1", script=crossing)
    assert details(sent)["query"].startswith("2: "), "a link that was sent is pinned"


@needs_chromium
def test_a_finding_is_a_button(page, tmp_path):
    last = len(page.findings) - 1
    script = f"""document.querySelectorAll("#findings button")[{last}].click();"""
    dom = chromium(tmp_path, page, "--dump-dom", where="layer=1&head=3", script=script)
    wanted = page.findings[last]
    assert f"Layer {wanted.layer}, head {wanted.head}, key" in dom
    assert details(dom)["key"].startswith(f"{wanted.key}: ")
    assert f"head {wanted.head}, {round(100 * wanted.share)}%</button>" in dom


@needs_chromium
def test_hovering_a_token_and_arrow_keys(model, page, tmp_path):
    script = """
      document.querySelectorAll("#sentence span")[3].dispatchEvent(new MouseEvent("mouseenter"));
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
    """
    dom = chromium(tmp_path, page, "--dump-dom", script=script)
    assert "Layer 1, head 1, key-value head 0" in dom
    assert details(dom)["query"] == "3: &lt;/script&gt;"
    shares = [float(share) for share in re.findall(r'<span[^>]*title="([\d.]+)%"', dom)]
    wanted = 100 * lm_attention(model, torch.arange(6)[None])[1][0, 1, 3]
    torch.testing.assert_close(torch.tensor(shares), wanted, atol=0.06, rtol=0)
    assert len(re.findall(r"<canvas[^>]*id=\"small-", dom)) == 8


@needs_chromium
def test_a_screenshot_shows_hatches_frames_and_weights(page, tmp_path):
    chromium(tmp_path, page, f"--screenshot={tmp_path}/page.png", "--window-size=1200,700", where="layer=0&head=0")
    pixels = matplotlib.image.imread(tmp_path / "page.png")[..., :3]
    found = {tuple(round(float(c) * 255) for c in pixel) for pixel in pixels.reshape(-1, 3)}
    assert {(0xF2, 0xF2, 0xF2), (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= found and len(found) > 60


def test_the_command_writes_a_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["plot", "attention", "The cat sat", "--html", str(out), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["layers"] == 30 and len(data_of(out.read_text())["tokens"]) == len(figures["tokens"]) == 3
    assert figures["layer"] == data_of(out.read_text())["open"]["layer"] == figures["findings"][0]["layer"]
    assert cli.main(["plot", "attention", "The cat sat", "--html", str(out), "--layer", "29"]) == 0
    assert data_of(out.read_text())["open"]["layer"] == 29 and len(data_of(out.read_text())["layers"]) == 30
    capsys.readouterr()
    for arguments, said in (
        (["x", "--layer", "30"], "--layer: got 30, want 0 to 29, the model's layers"),
        (["x", "--out", "x.png"], "--out: got 'x.png' beside --html, which writes only a page; leave one out"),
        (["x " * 300], "text: got 301 tokens, want at most 256; give a shorter one"),
    ):
        assert cli.main(["plot", "attention", *arguments, "--html", str(out)]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["plot", "attention", "The cat sat", "--html", str(out), "--layers", "3", "29"]) == 0
    assert re.search(r"wrote .*page.html, \d\.\d MiB", capsys.readouterr().out)
    data = data_of(out.read_text(encoding="utf-8"))
    assert data["open"]["layer"] in (3, 29) and [layer["number"] for layer in data["layers"]] == [3, 29]
    assert "heads of SmolLM2-135M-Instruct on" in out.read_text(encoding="utf-8")
    assert cli.main(["plot", "attention", "x", "--layers", "3", "--out", str(tmp_path / "x.png")]) == 2
    assert "--layers: got some without --html" in capsys.readouterr().err
    assert cli.main(["plot", "attention", "x", "--html", str(tmp_path / "page.png")]) == 2
    assert "--html: got" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_picture_of_a_small_model_shows_its_last_layer(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    small = attnpack.CausalLM(49152, 16, 2, 2, hidden_dim=16).eval()
    monkeypatch.setattr("attnpack.checkpoints.load", lambda path: small)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", "attention", "The cat", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["layer"] == 1 and figures["picture"] == "attention.png" and (tmp_path / "attention.png").exists()


def test_the_commands_of_the_howto_run(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/howto/heads.md").read_text(encoding="utf-8")
    commands = re.findall(r"^attnpack (.*)$", text, flags=re.M)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert cli.main(shlex.split(command)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"heads.png", "heads.html"} and len(commands) == 2
    data = data_of((tmp_path / "heads.html").read_text(encoding="utf-8"))
    assert data["open"] in data["findings"] and len(data["layers"]) == 30 and data["tokens"][1] == " cat"
