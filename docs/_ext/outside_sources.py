"""Sources outside `docs/`: notebooks and tables are copied before each build; included files get links that fit."""

from __future__ import annotations

import pathlib
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from sphinx.application import Sphinx
  from sphinx.config import Config

ROOT = pathlib.Path(__file__).parents[2]
COPIED = {"notebooks": "colab/*.ipynb", "suites": "experiments/results/**/*.md"}
"""Folders of `docs/` that git ignores, and the files of the repository that they hold."""

_SUITE = re.compile(r"experiments/results/([\w/]+)/\w+\.md")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "RESULTS.md": "results.md"}


def _page(path: str) -> str:
  """Returns the name of a copy: that of the suite's folder, since two bases may have the same suite.

  >>> _page("experiments/results/tool_math/main/main.md"), _page("colab/01_losses.ipynb")
  ('tool_math_main.md', '01_losses.ipynb')
  """
  suite = _SUITE.fullmatch(path)
  return f"{suite[1].replace('/', '_')}.md" if suite else path.rpartition("/")[2]


def _copy(app: Sphinx, config: Config) -> None:
  for name, pattern in COPIED.items():
    folder = pathlib.Path(app.srcdir) / name
    folder.mkdir(exist_ok=True)
    wanted = {_page(path.relative_to(ROOT).as_posix()): path for path in ROOT.glob(pattern)}
    for old in folder.iterdir():
      if old.is_file() and old.name not in wanted:
        old.unlink()
    for page, path in wanted.items():
      copy = folder / page
      if not copy.exists() or copy.read_bytes() != path.read_bytes():
        shutil.copyfile(path, copy)


def relocate(text: str) -> str:
  """Rewrites the links of a file in the repository's root for a page in `docs/`.

  >>> relocate("[a](docs/scaling.md), [b](RESULTS.md), [c](setup.py)")
  '[a](scaling.md), [b](results.md), `c`'
  """

  def link(match: re.Match[str]) -> str:
    image, label, target = match.groups()
    path, _, anchor = target.partition("#")
    if image:
      return f"![{label}](../{target})"
    if _SUITE.fullmatch(path):
      page = f"suites/{_page(path)}"
    elif path.startswith("docs/"):
      page = path.removeprefix("docs/")
    elif path in _PAGES:
      page = _PAGES[path]
    else:
      return f"`{label}`"  # not on the site
    return f"[{label}]({page}{'#' + anchor if anchor else ''})"

  return _LINK.sub(link, text)


def _included(app: Sphinx, path: pathlib.Path, docname: str, content: list[str]) -> None:
  if (app.srcdir / path).resolve().parent == ROOT:
    content[0] = relocate(content[0])


def setup(app: Sphinx) -> dict[str, bool]:
  app.connect("config-inited", _copy)
  app.connect("include-read", _included)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
