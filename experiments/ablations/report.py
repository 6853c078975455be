"""Rebuilds the tables and plots of committed results from their CSV files."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from experiments.ablations import results
from experiments.ablations.suites import SUITES, Suite

NOTHING = "Not run yet."


def rebuild(folder: pathlib.Path, own: Mapping[str, Suite] | None = None) -> list[str]:
  """Writes `SUITE/SUITE.md` and plots for every `SUITE/SUITE.csv` in a folder or below it.

  Args:
    folder: the folder of the results.
    own: suites besides `SUITES`, by the name of their folder.

  Returns:
    The folders of the suites, relative to `folder`.

  Raises:
    ValueError: the folder holds no results.
  """
  known = {**SUITES, **(own or {})}
  done = [path.parent for name in known for path in sorted(folder.rglob(f"{name}/{name}.csv"))]
  if not done:
    raise ValueError(f"{folder} must hold SUITE/SUITE.csv of one of {', '.join(known)}; it holds none.")
  for path in done:
    old = (path / f"{path.name}.md").read_text(encoding="utf-8")
    results.draw_all(path, path.name, known[path.name], old.partition(results.MADE)[2])
  return [path.relative_to(folder).as_posix() for path in done]


def fill(text: str, folder: pathlib.Path) -> str:
  """Returns the document with new tables from the CSV files between each `<!-- SUITE -->` and `<!-- end -->` line.

  Args:
    text: the document. A mark is the path of a suite's folder below `folder`: `main`, `tool_math/main`.
    folder: the folder of the results.

  Raises:
    ValueError: the last part of a mark is not a suite.
  """

  def table(match: re.Match[str]) -> str:
    name = match[1].rpartition("/")[2]
    if name not in SUITES:
      raise ValueError(f"a table must be that of one of {', '.join(SUITES)}; received {name!r}.")
    path = folder / match[1] / f"{name}.csv"
    body = results.table(SUITES[name], results.read_csv(path)) if path.exists() else f"{NOTHING}\n"
    return f"<!-- {match[1]} -->\n\n{body}\n<!-- end -->"

  return re.sub(r"<!-- ([\w/]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)
