"""Docstrings and signatures as the site shows them.

Napoleon takes care of the sections of docstrings. It is called from here because as an extension it reads "The seed:
one per run." below an attribute as a type.
"""

from __future__ import annotations

import re
from typing import Any

from docstring_markup import to_rst
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

_NAPOLEON = Config(napoleon_use_rtype=False, strip_signature_backslash=True)  # `lambda_` is a name
_ALIAS = re.compile(r"TypeAliasForwardRef\('(?:\w+\.)*(\w+)'\)")


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
  if what == "class" and lines and lines[0].startswith(f"{name.rpartition('.')[2]}("):
    lines.clear()  # what dataclasses write where there is no docstring: the signature
  kind = "object" if what in ("attribute", "data", "property") else what
  converted = GoogleDocstring(to_rst("\n".join(lines)), _NAPOLEON, app, kind, name, obj, options)
  lines[:] = [*converted.lines(), ""]


def _process_signature(
  app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
  """Removes what says nothing: the arguments of protocols, Flax's own, and the addresses of defaults."""
  if signature is None:
    return None
  if signature == "(*args, **kwargs)" and what == "class":
    return "", returned
  signature = re.sub(r"(, )?parent: .*name: .*\)$", ")", signature)
  signature = re.sub(r"<(?:[^<>]|<[^<>]*>)*>", "...", signature)
  return _ALIAS.sub(r"\1", signature), returned and _ALIAS.sub(r"\1", returned)


def setup(app: Sphinx) -> dict[str, bool]:
  app.connect("autodoc-process-docstring", _process)
  app.connect("autodoc-process-signature", _process_signature)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
