"""Equations as MathML, which browsers draw themselves: MathJax would be loaded from another host."""

from __future__ import annotations

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

_SIZE = re.compile(r"\\[bB]igg?[lmr]?(?![A-Za-z])")
"""Commands for the size of a bracket; MathML's brackets grow by themselves."""

_log = logging.getLogger(__name__)


def _prepare(equation: str) -> str:
  """Replaces the commands that docutils does not know."""
  return re.sub(r"\\dots(?![A-Za-z])", r"\\ldots", _SIZE.sub("", equation))


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
  try:
    return tex2mathml(_prepare(node.astext()), as_block=as_block)
  except MathError as error:
    _log.warning("This equation cannot be converted to MathML: %s", error, location=node)
    return ""


def _inline(self: HTML5Translator, node: nodes.math) -> None:
  self.body.append(_mathml(node, as_block=False))
  raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.math_block) -> None:
  self.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>\n')
  raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
  app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
  return {"parallel_read_safe": True, "parallel_write_safe": True}
