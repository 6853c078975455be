"""The Markdown tables of suites: a row per arm, with its mean over seeds and the paired difference to SAO's."""

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
  """A suite's table.

  Args:
    suite: its arms are the rows; one without results has empty cells.
    rows: of the suite's CSV file.
    success: by an arm's name, what arms are compared by, by seed.
    title: of that column.
    more: further columns: titles, and what makes a cell from an arm's name.
  """
  titles = ("arm", "lr", "seeds", title, "minus SAO, paired", *more)
  lines: list[tuple[str, ...]] = []
  for arm in suite.arms:
    found = success(arm.name)
    if not found:
      lines.append((arm.name, "", "0", *[""] * (len(titles) - 3)))
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
    lines.append((arm.name, f"{rate:g}", str(len(found)), estimate, difference, *cells))
  return markdown(titles, lines)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table of cells."""
  head = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
  return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
