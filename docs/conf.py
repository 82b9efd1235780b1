"""Settings of the documentation site, which `bash scripts/docs.sh` builds. The repository's root is the source folder,
so that links between pages, notebooks, tables and sources are the same on the site and in the repository."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

project = "attnpack"
author = "attnpack developers"
copyright = "2026, attnpack developers"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/**/*.md",
    "notebooks/*.ipynb",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "PERFORMANCE.md",
]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "extension"]

smartquotes_action = "De"  # dashes and dots; quotes stay straight, as some stand before links
html_theme = "furo"
html_title = "attnpack"
html_copy_source = False
html_favicon = "static/favicon.svg"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "static/scorer.js")

myst_enable_extensions = ["colon_fence", "dollarmath"]  # formulas of notebooks too
myst_heading_anchors = 3
nb_execution_mode = "off"  # pages show the outputs that the notebooks store

default_role = "py:obj"  # docstrings write names in single back-ticks
autodoc_member_order = "bysource"
autosummary_generate = False
autodoc_typehints = "signature"

napoleon_use_rtype = False
