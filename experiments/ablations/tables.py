"""Markdown tables of suites: one row per arm, with its mean over seeds and the paired difference to SAO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.ablations.statistics import bootstrap_mean, paired_difference
from experiments.ablations.suites import Suite, reference_of

Row = Mapping[str, Any]
BySeed = Mapping[int, float]


def arms_table(
  suite: Suite,
  rows: Sequence[Row],
  *,
  success: Callable[[str], BySeed],
  title: str,
  more: Mapping[str, Callable[[str], str]],
) -> str:
  """Makes the table of a suite.

  Args:
    suite: its arms are the rows; an arm without results has empty cells.
    rows: rows of the suite's CSV file.
    success: maps the name of an arm to the figure by seed that the arms are compared by.
    title: title of the column of that figure.
    more: further columns: maps each title to a function from the name of an arm to a cell.
  """
  titles = ("arm", "lr", "updates per batch", "seeds", title, "minus SAO, paired", *more)
  lines: list[tuple[str, ...]] = []
  for arm in suite.arms:
    found = success(arm.name)
    if not found:
      lines.append((arm.name, "", str(arm.updates), "0", *[""] * (len(titles) - 4)))
      continue
    rate = next(row["learning_rate"] for row in rows if row["arm"] == arm.name)
    reference = reference_of(suite, arm)
    against = {} if reference is arm else success(reference.name)
    shared = set(found) & set(against)
    difference = str(paired_difference(found, against)) if shared else ""
    if shared and shared != set(found):
      difference += f", n = {len(shared)}"
    estimate = str(bootstrap_mean(list(found.values())))
    cells = (cell(arm.name) for cell in more.values())
    lines.append((arm.name, f"{rate:g}", str(arm.updates), str(len(found)), estimate, difference, *cells))
  return markdown(titles, lines)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Formats cells as a Markdown table."""
  head = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
  return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
