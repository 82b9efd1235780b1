"""The site's additions to Sphinx: sections of the README, C++ headers, pages of classes, the course with pictures,
words for the search, pages of heads, formulas as MathML, and docstrings as plain text with back-ticks."""

import inspect
from types import FunctionType

from sphinx.pycode import ModuleAnalyzer

from . import heads_pages, mathml, search_words
from .api_pages import (
    ApiClassDirective,
    ApiContentsDirective,
    ApiFunctionDirective,
    ApiModuleDirective,
    ApiTableDirective,
)
from .course import CourseDirective, write_pictures
from .headers_page import HeadersDirective
from .plain_docstrings import escape_lines
from .readme_section import ReadmeDirective


def setup(app):
    app.add_directive("readme", ReadmeDirective)
    app.add_directive("headers", HeadersDirective)
    app.add_directive("api-class", ApiClassDirective)
    app.add_directive("api-function", ApiFunctionDirective)
    app.add_directive("api-module", ApiModuleDirective)
    app.add_directive("api-table", ApiTableDirective)
    app.add_directive("api-contents", ApiContentsDirective)
    app.add_directive("course", CourseDirective)
    app.add_html_math_renderer("mathml", (mathml.visit_inline, None), (mathml.visit_block, None))
    app.connect("autodoc-process-signature", show_whole_signature)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon
    app.connect("doctree-read", search_words.add)
    app.connect("build-finished", write_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def show_whole_signature(app, what, name, obj, options, signature, result):
    """Overloads name their keywords together. So pages show a function's own signature, which has all of them."""
    if isinstance(inspect.unwrap(obj), FunctionType) and obj.__module__.startswith("attnpack."):  # not those of C++
        analyzer = ModuleAnalyzer.for_module(obj.__module__)
        analyzer.analyze()
        analyzer.overloads.clear()


def escape_docstring(app, what, name, obj, options, lines):
    """Python says "Alias for field number 0" of the fields of a named tuple; the class says what they are."""
    lines[:] = [] if lines[:1] and lines[0].startswith("Alias for field number") else escape_lines(lines)


def write_files(app, error):
    """Files that are no pages of Sphinx: those of heads, the course's pictures, and index.html at the top of the site:
    pages keep the paths of the repository, and the first one is docs/index."""
    if error is None and app.builder.format == "html":
        heads_pages.write_pages(app.outdir / "docs/heads")
        write_pictures(app.outdir / "docs/course")
        start = app.builder.get_target_uri(app.config.root_doc)
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={start}"><a href="{start}">attnpack</a>\n'
        (app.outdir / "index.html").write_text(page)
