"""The page of attention: its numbers are the model's, it needs no network, and it works in headless Chromium."""

import base64
import html
import json
import re
import shutil
import subprocess

import attnpack
import matplotlib.image
import pytest
import torch
from attnpack.tools import cli
from attnpack.tools.plot.attention import lm_attention
from attnpack.tools.plot.page import attention_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


def unpack(packed, *shape):
    integers = torch.frombuffer(bytearray(base64.b64decode(packed["base64"])), dtype=torch.int16)
    return (integers * packed["factor"]).view(shape)


def test_numbers_are_those_of_the_model(model, page):
    data = data_of(page)
    assert data["tokens"] == TOKENS and [layer["number"] for layer in data["layers"]] == [0, 1]
    for layer, wanted in zip(data["layers"], lm_attention(model, torch.arange(6)[None]), strict=True):
        assert (layer["heads"], layer["dim"], layer["kv"], layer["sinks"]) == (4, 8, [0, 0, 1, 1], True)
        weights = unpack(layer["weights"], 4, 6, 6)
        torch.testing.assert_close(weights, wanted[0], atol=1e-4, rtol=0)
        q, k = unpack(layer["q"], 4, 6, 8), unpack(layer["k"], 2, 6, 8)
        sinks = model.layers[layer["number"]].self_attn.sinks
        scored = attnpack.attention_scores(
            q[None], k[None], causal=True, window=(layer["window"], 0), sinks=sinks, scale=layer["scale"]
        )
        torch.testing.assert_close(scored[0], weights, atol=1e-3, rtol=0, msg="q and k are those of the operator")
    assert [layer["window"] for layer in data["layers"]] == [6, 2]


def test_needs_no_network(page):
    assert not re.search(r"https?:|@import|<link|<img|\bsrc=|url\(", str(page))
    assert "default-src 'none'" in str(page)


def test_a_notebook_shows_it_in_a_frame(page):
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)".*</iframe>', page._repr_html_(), flags=re.S)
    assert html.unescape(frame.group(1)) == str(page)


def test_some_layers_alone(model):
    assert [layer["number"] for layer in data_of(attention_page(model, [1, 2], ["x", "y"], layers=[1]))["layers"]] == [
        1
    ]
    with pytest.raises(ValueError, match="layers: got 2, want 0 to 1"):
        attention_page(model, [1], ["x"], layers=[2])
    for ids in ([], [0] * 257):
        with pytest.raises(ValueError, match="want 1 to 256"):
            attention_page(model, ids, ids)


def test_latent_attention_has_a_page():
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    latent = attnpack.CausalLM(50, 32, 1, 4, hidden_dim=48, max_positions=64, latent=sizes)
    (layer,) = data_of(attention_page(latent, [1, 2, 3], ["x", "y", "z"]))["layers"]
    wanted = lm_attention(latent, torch.tensor([[1, 2, 3]]))[0][0]
    torch.testing.assert_close(unpack(layer["weights"], 4, 3, 3), wanted, atol=1e-4, rtol=0)


def chromium(folder, page, *options, where="", script=""):
    """What headless Chromium prints for the page, opened at `where`, after `script` ran in it."""
    file = folder / "page.html"
    file.write_text(str(page).replace("</body>", f"<script>{script}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    command += [*options, f"file://{file}#{where}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def details(dom):
    return dict(re.findall(r"<td>([^<]*)</td><td>([^<]*)</td>", re.search(r'id="details">(.*)</section>', dom)[1]))


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")


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
    assert cli.main(["plot", "attention", "x", "--html", str(tmp_path / "page.png")]) == 2
    assert "--html: got" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
