"""The documentation site: built without warnings, every public name and header on a page, no dead link inside."""

import functools
import html
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import types
import xml.etree.ElementTree as ElementTree
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlencode

import attnpack
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
pytest.importorskip("myst_nb", reason="the extra `docs` is not installed")
from browser import CHROMIUM, NO_CHROMIUM, browse, unpack  # noqa: E402
from extension import (  # noqa: E402
    api_pages,
    cards,
    course,
    headers,
    heads_pages,
    mathml,
    plain_docstrings,
    readme_section,
    search_words,
)
from marks import long  # noqa: E402

MODULES = ["backend", "convert", "checkpoints", "flash", "distributed", "hf", "onnx", "reference", "cpp"]
MODULES += ["tools.plot.page", "tools.plot.attention", "tools.plot.schematic"]


@pytest.fixture(scope="module")
def site():
    """The folder of a site that is built anew: a page that was read before would not warn again. Members of classes do
    not stand beside their page, because a third of the time goes into copies of that list."""
    command = ["bash", "scripts/docs.sh", "-E", "-D", "toc_object_entries=0"]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ, VIRTUAL_ENV=sys.prefix)
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return ROOT / "build/docs"


LOADING = ("script", "link", "img", "iframe", "source", "embed", "object")  # elements whose files a browser asks for


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.ids, self.texts, self.loaded = path, [], set(), [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = "".join(self.texts)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes["id"]} if "id" in attributes else set()
        self.loaded += [attributes.get("src", attributes.get("href"))] if tag in LOADING else []
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def pages(site):
    built = [path for path in site.rglob("*.html") if "_static" not in path.parts and path.parent.name != "heads"]
    return {path.resolve(): Page(path) for path in built}


def public_names():
    """attnpack.__all__, and what the modules that a user imports by name define or export."""
    for name in attnpack.__all__:
        if not isinstance(getattr(attnpack, name), types.ModuleType):
            yield f"attnpack.{name}"
    for module in MODULES:
        content = importlib.import_module(f"attnpack.{module}")
        own = [name for name, value in vars(content).items() if getattr(value, "__module__", "") == content.__name__]
        bound = [name for name in vars(content) if module == "cpp" and isinstance(getattr(content, name), type)]
        for name in getattr(content, "__all__", own + bound):
            if not name.startswith("_"):
                yield f"attnpack.{module}.{name}"


def test_every_public_python_name_is_on_a_page(pages):
    described = set().union(*(page.ids for page in pages.values()))
    names = set(public_names())
    assert {"attnpack.attention", "attnpack.cpp.CausalLM", "attnpack.hf.register"} <= names and len(names) > 90
    assert sorted(names - described) == []


def test_the_index_of_python_has_a_line_for_every_public_name(pages, site):
    """Grouped; the classes of C++ and the parts of modules have pages with such tables of their own."""
    index = pages[(site / "docs/api/python/index.html").resolve()]
    linked = {link.partition("#")[2] for link in index.links}
    elsewhere = ("attnpack.cpp.", "attnpack.__version__")
    assert [name for name in public_names() if name not in linked and not name.startswith(elsewhere)] == []
    for heading in ("Functions", "Layers of attention", "Models", "Caches", "Conversion", "Tools"):
        assert f"<h2>{heading}<" in index.path.read_text()
    cpp = pages[(site / "docs/api/python/cpp.html").resolve()]
    assert {link.partition("#")[2] for link in cpp.links} >= {"attnpack.cpp.Mamba2", "attnpack.cpp.CausalLM"}


def test_tables_take_their_names_from_a_page():
    assert dict(api_pages.contents("modules"))["Parts"][0] == "~attnpack.RotaryEmbedding"
    ((heading, names),) = api_pages.contents("convert")
    assert heading == "attnpack.convert" and "~attnpack.convert.to_mla" in names
    assert [heading for heading, _ in api_pages.contents("plot")][:2] == ["page", "attention"]
    assert api_pages.public_names("attnpack.hf") == ["register", "unregister", "replace_attention"]


def test_methods_and_arguments_of_modules_are_on_their_page(pages, site):
    def page(name):
        return pages[(site / f"docs/api/python/modules/{name}.html").resolve()]

    assert "attnpack.CausalLM.generate" in page("CausalLM").ids
    assert "attnpack.CausalLM.register_forward_hook" not in page("CausalLM").ids  # nn.Module's are torch's to describe
    assert "attnpack.CausalLM.extra_repr" not in page("CausalLM").ids
    text = page("GroupedQueryAttention").path.read_text()
    members = re.findall(r'id="attnpack\.GroupedQueryAttention\.(\w+)"', text)
    assert members[0] == "forward" and {"project", "cpp"} <= set(members)
    assert "kv head read by each query head" in pages[(site / "docs/api/cpp/modules_attention.html").resolve()].text


def test_every_public_header_and_its_names_are_on_a_page(pages, site):
    shown = "\n".join(page.text for path, page in pages.items() if (site / "docs/api/cpp").resolve() in path.parents)
    found = headers.public_headers()
    umbrella = (ROOT / "csrc/attnpack/attnpack.h").read_text()
    assert set(re.findall(r"#include <(attnpack/.*?)>", umbrella)) <= set(found)
    for header in found:
        assert header in shown, f"{header} is on no page: name its folder in docs/api/cpp"
        for paragraph in headers.read((ROOT / "csrc" / header).read_text()):
            assert "".join(paragraph.code.split()) in "".join(shown.split()), f"{header}: {paragraph.names}"


def test_public_headers_are_those_that_are_installed():
    (excluded,) = re.findall(r'REGEX "/(.*)\$" EXCLUDE', (ROOT / "cmake/Install.cmake").read_text())
    assert set(headers.NOT_PUBLIC) == set(re.findall(r"\w+", excluded)) - {"ops"}
    assert "attnpack/ops/attention.h" in headers.public_headers()
    assert "attnpack/modules/attention/grouped_attention.h" not in headers.public_headers("modules/*")
    assert not [header for header in headers.public_headers() if re.search(rf"/{excluded}/", header)]


def test_formulas_of_notebooks_are_rendered(site):
    seen = 0
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        formulas = [cell for cell in cells if cell["cell_type"] == "markdown" and "$" in "".join(cell["source"])]
        page = (site / f"notebooks/{notebook.stem}.html").read_text()
        assert page.count("<math ") >= len(formulas), notebook.name
        assert page.count("<math ") == page.count('class="math"'), notebook.name
        seen += len(formulas)
    assert seen > 20


def test_formulas_are_mathml():
    assert "<msqrt><mrow><mi>d</mi></mrow></msqrt>" in mathml.mathml(r"\sqrt{d}", "inline")
    with pytest.raises(ValueError, match=r"does not know \\nonsense in \$a \\nonsense\$"):
        mathml.mathml(r"a \nonsense", "block")


def test_the_site_needs_no_network(pages, site):
    """No page asks another server for a script, a style sheet, a font or a picture."""
    loaded = {link for page in pages.values() for link in page.loaded if link}
    assert any("site.css" in link for link in loaded) and any(link.endswith(".png") for link in loaded)
    assert [link for link in loaded if re.match(r"(\w+:)?//", link)] == []
    sheets = [path.read_text() for path in site.rglob("*.css")]
    asked = [address for sheet in sheets for address in re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]*)", sheet)]
    assert len(asked) > 5 and [address for address in asked if re.match(r"(https?:)?//", address)] == []


def test_pages_show_whole_signatures(pages, site):
    """Not the overloads, which name their keywords together."""
    wanted = {
        "ops/attention": "dropout_p: float = 0.0",
        "modules/GroupedQueryAttention": "kv_from: KVCache",
        "flash": "softcap: float = 0.0",
    }
    for page, text in wanted.items():
        shown = " ".join(pages[(site / f"docs/api/python/{page}.html").resolve()].text.split())
        assert text in shown and "**rules" not in shown and "**inputs" not in shown


def test_commands_of_the_pages_are_taken():
    """The arguments of `attnpack bench` and `plot` on pages: the parser knows them, and the sections are there."""
    from attnpack.tools import cli
    from attnpack.tools.bench import SECTIONS, model

    seen = 0
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "PERFORMANCE.md"]:
        for command in re.findall(r"^(?:\| `)?attnpack ((?:bench|plot)\b[^`|#\n]*)", path.read_text(), flags=re.M):
            arguments = cli.build_parser().parse_args(shlex.split(command.partition(">")[0]))
            if command.startswith("plot"):  # tests/tools/test_page.py runs them
                continue
            assert set(arguments.sections) <= {*SECTIONS, model.SECTION}, f"{path}: attnpack {command}"
            seen += 1
    assert seen > 3


def test_links_inside_the_site_lead_somewhere(pages, site):
    dead, seen = [], 0
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            seen += 1
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            here = pages.get(file)
            if not file.exists() or (anchor and here and anchor not in here.ids):
                dead.append((path.name, link))
    assert seen > 1000 and dead == []


def test_the_readmes_links_lead_into_the_site(pages, site):
    start = pages[(site / "docs/start.html").resolve()]
    assert {"examples.html#hello-attention", "howto/torch.html", "caches.html"} <= {
        *start.links,
        *pages[(site / "docs/variants.html").resolve()].links,
    }
    assert "torch.testing.assert_close" in start.text


def test_notebooks_show_their_stored_outputs(pages, site):
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        page = pages[(site / "notebooks" / notebook.name).with_suffix(".html").resolve()]
        assert any("_images/" in link for link in page.links) or notebook.stem == "errata", notebook.name


def test_the_home_shows_the_course_with_pictures(pages, site):
    home = pages[(site / "docs/index.html").resolve()]
    shown = [link for link in home.links if link.startswith("course/")]
    names = [notebook.name for notebook in course.notebooks()]
    assert [Path(link).stem for link in shown] == names
    assert set(names) == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for notebook in course.notebooks():
        assert f"{notebook.number}. {notebook.title()}" in home.text


SVG = "{http://www.w3.org/2000/svg}"
LEAST = 11  # pixels: smaller words cannot be read on a card


@pytest.mark.parametrize("name", cards.CARDS)
def test_a_cards_picture_can_be_read(name):
    """Its words are large enough and, by the width of a wide font's letters, inside the picture."""
    drawing = cards.CARDS[name]()
    assert drawing.width <= cards.WIDTH + 40 and drawing.height <= cards.HEIGHT + 10
    words = list(ElementTree.fromstring(str(drawing)).iter(f"{SVG}text"))
    assert len(words) >= 3
    for each in words:
        size, anchor, x = float(each.get("font-size")), each.get("text-anchor"), float(each.get("x"))
        length = 0.55 * size * len(each.text)
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * length
        assert size >= LEAST, each.text
        if name != "multi_query_attention":  # two drawings side by side, each with its own zero
            assert left >= -2 and left + length <= drawing.width + 2, each.text


def test_the_pictures_of_the_cards_are_on_the_site(site):
    for notebook in course.notebooks():
        assert (site / f"docs/course/{notebook.name}.svg").read_text() == str(cards.CARDS[notebook.name]())
    assert set(cards.CARDS) == {notebook.name for notebook in course.notebooks()}


def test_the_font_of_formulas_has_their_characters(pages, site):
    """Its file is asked for by the style sheet, so a browser needs no font of its own."""
    ttLib = pytest.importorskip("fontTools.ttLib")
    (file,) = re.findall(r'url\("(fonts/[^"]*)"\)', (site / "_static/site.css").read_text())
    font = ttLib.TTFont(site / "_static" / file)
    known = set(font.getBestCmap())
    assert "MATH" in font
    invisible = set("\u2061\u2062\u2063\u2064\u200b\u2009\u2003\u2002\u205f\u00a0")
    for path in pages:
        for formula in re.findall(r"<math .*?</math>", path.read_text(), flags=re.S):
            text = html.unescape(re.sub(r"<mtext>.*?</mtext>|<[^>]*>|\s", "", formula, flags=re.S))
            missing = {c for c in text if ord(c) not in known and c not in invisible}
            assert not missing, (
                f"{path.name}: {missing} is not in the font: docs/static/fonts/LICENSE says how it was made"
            )


@pytest.fixture(scope="module")
def found(site, tmp_path_factory):
    """A function: the pages that the site's search lists for words, best first."""
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    serve = partial(QuietFiles, directory=site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path_factory.mktemp("chromium")

    def search(words):
        address = f"http://127.0.0.1:{server.server_port}/search.html?{urlencode({'q': words})}"
        dom = browse(folder, address, "--virtual-time-budget=8000", "--dump-dom")
        return re.findall(r'<li class="kind-\w+"><a href="([^"#?]*)', dom)

    yield search
    server.shutdown()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    "words, page",
    [
        ("kv cache", "notebooks/kv_cache"),
        long("rope", "notebooks/positions"),
        ("GQA", "notebooks/grouped_query_attention"),
        long("grouped query attention", "notebooks/grouped_query_attention"),
        ("attention", "notebooks/attention_from_scratch"),
        long("MLA", "notebooks/latent_attention"),
        long("GroupedQueryAttention", "docs/api/python/modules/GroupedQueryAttention"),
        ("PagedCache", "docs/api/python/caches/PagedCache"),
    ],
)
def test_the_search_finds_the_page_first(found, words, page):
    assert found(words)[0] == f"{page}.html"


def test_every_notebook_has_words_for_the_search():
    assert set(search_words.WORDS) == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


LINK = re.compile(
    r'<a\s+href="\.\./heads/(\w+)\.html(?:#layer=(\d+)&head=(\d+)&query=(\d+)&key=(\d+))?">(.*?)</a>', re.S
)


@functools.cache
def stored(name):
    return json.loads((heads_pages.FOLDER / f"{name}.json").read_text())


def weights_of(name, layer, head):
    """[L, L]"""
    data = stored(name)
    length = len(data["tokens"])
    return data["tokens"], unpack(data["layers"][layer]["weights"], -1, length, length)[head]


def test_the_weights_that_the_howto_names_are_on_the_pages_of_heads(site):
    text = (ROOT / "docs/howto/heads.md").read_text()
    links = LINK.findall(text)
    assert {name for name, *_ in links} == set(heads_pages.TEXTS) and len(links) >= 10
    for name, *place, said in links:
        assert (site / f"docs/heads/{name}.html").exists()
        if not place[0]:
            continue
        layer, head, query, key = map(int, place)
        tokens, weights = weights_of(name, layer, head)
        if percent := re.search(r"(\d+)%", said):
            assert abs(100 * weights[query, key] - int(percent[1])) <= 0.5, said
            words = re.findall(r'"([^"]+)"', said)
            assert {word.strip() for word in words} <= {tokens[query].strip(), tokens[key].strip()}, said
    assert "Tokyo and Rome together 95%" in text
    assert abs(weights_of("capitals", 17, 5)[1][13, [2, 6, 10]].sum() - 0.95) < 0.005
    value = stored("pronoun")["layers"][18]
    norms = unpack(value["v"], 3, -1, value["v_dim"])[value["kv"][8]].norm(dim=-1)
    assert norms[0] < 0.2 * norms[1:].mean(), "the strip of the sink's value is almost white"


def test_a_page_of_heads_opens_where_its_text_begins(tmp_path):
    links = LINK.findall((ROOT / "docs/howto/heads.md").read_text())
    heads_pages.write_pages(tmp_path)
    for name in heads_pages.TEXTS:
        first = next(place for page, *place, _ in links if page == name and place[0])
        page = (tmp_path / f"{name}.html").read_text()
        opened = json.loads(re.search(r'id="data" type="application/json">(.*?)</script>', page, re.S)[1])["open"]
        assert [opened[each] for each in ("layer", "head", "query", "key")] == list(map(int, first))


@pytest.mark.long
def test_the_pages_of_heads_are_the_models():
    """The stored numbers are those that SmolLM2 gives today."""
    for name, text in heads_pages.TEXTS.items():
        fresh = heads_pages.compute(text)
        kept = stored(name)
        assert fresh["tokens"] == kept["tokens"], "python docs/extension/heads_pages.py"
        for mine, theirs in zip(fresh["layers"], kept["layers"], strict=True):
            a, b = (unpack(each["weights"], -1) for each in (mine, theirs))
            torch.testing.assert_close(a, b, atol=2e-3, rtol=0)
        picked = [[each[name] for name in ("habit", "layer", "head")] for each in fresh["findings"]]
        assert picked == [[each[name] for name in ("habit", "layer", "head")] for each in kept["findings"]]


def test_every_example_in_cpp_is_shown():
    shown = (ROOT / "docs/examples.md").read_text()
    for example in (ROOT / "examples/cpp").iterdir():
        assert f"examples/cpp/{example.name}/main.cpp" in shown


HEADER = """
#pragma once
#include <x.h>
namespace attnpack {

// Alone.

// What it does.
at::Tensor pool(const at::Tensor& weight,  // [H * D, E]
                int64_t heads = {});

#define X_PARTS(X)                         \\
  /* How many positions. */                \\
  X(int64_t, held, 0, "int cache_held=0")  \\
  X(std::optional<at::Tensor>, dropped, std::nullopt, "Tensor? cache_dropped=None")

class Cache : public Base {
 public:
  int64_t len() const { return 1; }
  X_PARTS(X_MEMBER)
  int64_t last() const;

 protected:
  int64_t hidden_ = 0;
};
TORCH_MODULE(Cache);

namespace detail {
void secret();
}

using Groups = std::vector<std::vector<int64_t>>;

}  // namespace attnpack
"""


def test_reads_headers():
    alone, pool, cache, groups = headers.read(HEADER)
    assert alone == ([], "Alone.", "")
    assert pool.names == ["pool"] and pool.comment == "What it does." and "// [H * D, E]" in pool.code
    assert cache.names == ["Cache"] and "len()" in cache.code and "last()" in cache.code
    assert "hidden_" not in cache.code
    assert "  // How many positions.\n  int64_t held = 0;\n" in cache.code
    assert "  std::optional<at::Tensor> dropped = std::nullopt;\n  int64_t last()" in cache.code
    assert cache.code.endswith("};\nTORCH_MODULE(Cache);")
    assert groups.names == ["Groups"]


def test_docstrings_are_plain_text():
    lines = ["max |x| * w of *rows in `a * b` and ``c_``, tail_ :func:`f_`"]
    expected = "max \\|x\\| \\* w of \\*rows in `a * b` and ``c_``, tail\\_ :func:`f_`"
    assert plain_docstrings.escape_lines(lines) == [expected]


def test_sections_of_the_readme():
    text = "a\n\n## One\n\nfirst [x](y.md)\n\n```sh\n# no heading\n```\n\nlast [e](examples/cpp/a_b)\n\n## Two\n\nz\n"
    one = readme_section.section(text, "One")
    assert one.startswith("first") and one.endswith("a_b)\n") and "# no heading" in one
    assert readme_section.links_from_root("[x](y.md) [h](https://a) [e](examples/cpp/a_b)") == (
        "[x](/y.md) [h](https://a) [e](/docs/examples.md#a-b)"
    )
    with pytest.raises(ValueError, match="no section 'Three', only .*'One', 'Two'"):
        readme_section.section(text, "Three")
