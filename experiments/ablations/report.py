"""Tables and plots of committed results, made anew from their CSV files."""

from __future__ import annotations

import pathlib
import re

from experiments.ablations import results
from experiments.ablations.suites import SUITES


def remake(folder: pathlib.Path) -> list[str]:
  """Writes `SUITE/SUITE.md` and `SUITE/SUITE.png` for every `SUITE/SUITE.csv` in a folder; returns the suites.

  Raises:
    ValueError: the folder holds no results.
  """
  done = [name for name in SUITES if (folder / name / f"{name}.csv").exists()]
  if not done:
    raise ValueError(f"{folder} must hold SUITE/SUITE.csv of one of {', '.join(SUITES)}; it holds none.")
  for name in done:
    old = (folder / name / f"{name}.md").read_text(encoding="utf-8")
    results.draw_all(folder / name, name, SUITES[name], old.partition(results.MADE)[2])
  return done


def fill(text: str, folder: pathlib.Path) -> str:
  """A document whose tables, from a line `<!-- SUITE -->` to `<!-- end -->`, are made anew from the CSV files."""

  def table(match: re.Match[str]) -> str:
    name = match[1]
    rows = results.read_csv(folder / name / f"{name}.csv")
    return f"<!-- {name} -->\n\n{results.table(SUITES[name], rows)}\n<!-- end -->"

  return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)
