"""The documentation site: built without warnings, every public name and header on a page, no dead link inside."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import attnpack
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
pytest.importorskip("myst_nb", reason="the extra `docs` is not installed")
from extension import headers, mathml, plain_docstrings, readme_section  # noqa: E402

MODULES = ["backend", "convert", "checkpoints", "flash", "distributed", "hf", "onnx", "reference", "cpp"]
MODULES += ["tools.plot.page", "tools.plot.attention", "tools.plot.schematic"]


@pytest.fixture(scope="module")
def site():
    """The folder of a site that is built anew: a page that was read before would not warn again."""
    command = ["bash", "scripts/docs.sh", "-E"]
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
    return {path.resolve(): Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


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


def test_methods_and_arguments_of_modules_are_on_their_page(pages, site):
    page = pages[(site / "docs/api/python/modules.html").resolve()]
    assert {"attnpack.CausalLM.generate", "attnpack.GroupedQueryAttention.forward"} <= page.ids
    assert "attnpack.CausalLM.register_forward_hook" not in page.ids  # nn.Module's are torch's to describe
    assert "kv head read by each query head" in pages[(site / "docs/api/cpp/modules.html").resolve()].text


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
    wanted = {"ops": "dropout_p: float = 0.0", "modules": "kv_from: KVCache", "flash": "softcap: float = 0.0"}
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
