"""The notebooks of `colab/`, which lie outside the site's sources: copied to `docs/notebooks/` before each build."""

from __future__ import annotations

import pathlib
import shutil

from sphinx.application import Sphinx
from sphinx.config import Config

COLAB = pathlib.Path(__file__).parents[2] / "colab"


def _copy(app: Sphinx, config: Config) -> None:
  folder = pathlib.Path(app.srcdir) / "notebooks"
  folder.mkdir(exist_ok=True)
  wanted = {path.name: path for path in COLAB.glob("*.ipynb")}
  for copy in folder.glob("*.ipynb"):
    if copy.name not in wanted:
      copy.unlink()
  for name, path in wanted.items():
    copy = folder / name
    if not copy.exists() or copy.read_bytes() != path.read_bytes():
      shutil.copyfile(path, copy)


def setup(app: Sphinx) -> dict[str, bool]:
  app.connect("config-inited", _copy)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
