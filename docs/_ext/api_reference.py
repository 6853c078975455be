"""The API reference follows the code: pages of modules that exist, and references by any name that Python knows."""

from __future__ import annotations

import pathlib
from typing import Any

from docutils import nodes
from library_names import canonical, defined, source
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

GENERATED = "api/generated"

_log = logging.getLogger(__name__)


def _remove_old_pages(app: Sphinx) -> None:
  """Removes generated pages of modules that are gone: they would end the build."""
  for page in (pathlib.Path(app.srcdir) / GENERATED).glob("*.rst"):
    if source(page.stem) is None:
      page.unlink()


def _choose_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
  """Leaves imported constants and aliases to the module that defines them, and Flax's fields to Flax."""
  module = app.env.current_document.autodoc_module
  if what == "module":
    return True if defined(module).get(name) or (name not in defined(module) and not skip) else None
  if name == "__call__" and getattr(obj, "__doc__", None):
    return False
  return True if module.startswith("sao_jax.models") and name in ("name", "parent", "scope") else None


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
  """Looks a name up as a reader would: in the module it stands in, and in the packages around that."""
  if node.get("refdomain") != "py":
    return None
  target, module = node["reftarget"].removesuffix("()"), node.get("py:module") or ""
  domain = env.domains.python_domain
  scopes = [module.rsplit(".", n)[0] for n in range(module.count(".") + 1)] if module else ["sao_jax"]
  for name in (f"{scope}.{target}" for scope in [*scopes, "sao_jax"]):
    full = canonical(name)
    if full not in domain.objects and "." in full:  # a member of a class that is imported from elsewhere
      owner, _, member = full.rpartition(".")
      full = f"{canonical(owner)}.{member}"
    if full in domain.objects:
      return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, contnode)
  if not node["refdoc"].startswith("api/"):
    _log.warning("%s is not in the API reference.", node["reftarget"], location=node, type="ref", subtype="python")
  return None


def setup(app: Sphinx) -> dict[str, bool]:
  app.connect("builder-inited", _remove_old_pages, priority=100)
  app.connect("autodoc-skip-member", _choose_member)
  app.connect("missing-reference", _resolve)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
