"""What the site adds to Sphinx: sections of the README, C++ headers, and docstrings as plain text with back-ticks."""

from .headers_page import HeadersDirective
from .plain_docstrings import escape_lines
from .readme_section import ReadmeDirective


def setup(app):
    app.add_directive("readme", ReadmeDirective)
    app.add_directive("headers", HeadersDirective)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)  # before napoleon
    app.connect("build-finished", redirect_to_start)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def escape_docstring(app, what, name, obj, options, lines):
    lines[:] = escape_lines(lines)


def redirect_to_start(app, error):
    """index.html at the top of the site: pages keep the paths of the repository, and the first one is docs/index."""
    if error is None and app.builder.format == "html":
        start = app.builder.get_target_uri(app.config.root_doc)
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={start}"><a href="{start}">attnpack</a>\n'
        (app.outdir / "index.html").write_text(page)
