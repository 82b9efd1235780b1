"""Formulas as MathML, which browsers show without a script: the site needs no network."""

from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def mathml(latex: str, display: str) -> str:
    """The element <math> of a formula in LaTeX; display: "inline" or "block".

    Raises:
        ValueError: latex2mathml does not know a command of the formula. It would show the command's name.
    """
    made = convert(latex, display=display)
    left = [text for text in ElementTree.fromstring(made).itertext() if "\\" in text]
    if left:
        raise ValueError(f"latex2mathml does not know {left[0]} in ${latex}$: write the formula with other commands")
    return made


def visit_inline(translator, node):
    _show(translator, node, "span", "inline")


def visit_block(translator, node):
    _show(translator, node, "div", "block")


def _show(translator, node, tag, display):
    try:
        formula = mathml(node.astext(), display)
    except ValueError as error:
        LOGGER.warning(str(error), location=node)
        formula = translator.encode(node.astext())
    translator.body.append(translator.starttag(node, tag, "", CLASS="math") + formula + f"</{tag}>")
    raise nodes.SkipNode
