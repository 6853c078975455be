"""Rebuilds the tables and plots of committed results from their CSV files."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from experiments.ablations import results
from experiments.ablations.suites import SUITES, Suite

NOTHING = "Not run yet."


def rebuild(folder: pathlib.Path, own: Mapping[str, Suite] | None = None) -> list[str]:
  """Writes `SUITE/SUITE.md` and plots for every `SUITE/SUITE.csv` in a folder; returns the names of the suites.

  Args:
    folder: the folder of the results.
    own: suites besides `SUITES`, by the name of their folder.

  Raises:
    ValueError: the folder holds no results.
  """
  known = {**SUITES, **(own or {})}
  done = [name for name in known if (folder / name / f"{name}.csv").exists()]
  if not done:
    raise ValueError(f"{folder} must hold SUITE/SUITE.csv of one of {', '.join(known)}; it holds none.")
  for name in done:
    old = (folder / name / f"{name}.md").read_text(encoding="utf-8")
    results.draw_all(folder / name, name, known[name], old.partition(results.MADE)[2])
  return done


def fill(text: str, folder: pathlib.Path) -> str:
  """Returns the document with new tables from the CSV files between each `<!-- SUITE -->` and `<!-- end -->` line.

  Raises:
    ValueError: a name between the marks is not a suite.
  """

  def table(match: re.Match[str]) -> str:
    name = match[1]
    if name not in SUITES:
      raise ValueError(f"a table must be that of one of {', '.join(SUITES)}; received {name!r}.")
    path = folder / name / f"{name}.csv"
    body = results.table(SUITES[name], results.read_csv(path)) if path.exists() else f"{NOTHING}\n"
    return f"<!-- {name} -->\n\n{body}\n<!-- end -->"

  return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)
