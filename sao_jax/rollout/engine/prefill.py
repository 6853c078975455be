"""How contexts that must be fed are cut into the rows of few, well-filled prefill calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sao_jax.rollout.engine.config import bucket


class Piece(NamedTuple):
  """A part of one context: a row of a prefill call."""

  context: int
  """Which context."""
  offset: int
  """Its first token, counted from the first one that the context must be fed."""
  size: int
  """Its tokens; 0 for a context of which nothing must be fed."""
  last: bool
  """No piece of the same context comes after it."""


class PrefillCall(NamedTuple):
  """One call's shape and rows."""

  num_rows: int
  width: int
  pieces: list[Piece]


def plan_calls(
  starts: Sequence[int], lengths: Sequence[int], *, rows: tuple[int, ...], widths: tuple[int, ...]
) -> list[PrefillCall]:
  """Cuts contexts into pieces of one width, the one that costs least.

  cost = sum over calls of num_rows * (width + w_0 / 2), w_0 the smallest width: tokens, padding included, and what a
  row costs by itself (it reads its slot's keys and values).

  Args:
    starts: position of the first token to feed, of each context.
    lengths: how many tokens to feed, >= 0.
    rows: row counts that a call may have, ascending.
    widths: tokens per row that a call may have, ascending.

  Returns:
    Calls, to be made in this order: short contexts first, so that few calls read far back; the pieces of a context in
    the order of their tokens. A call may hold several pieces of a context: all rows are written before any is read.
  """
  if not lengths:
    return []

  def cost(width: int) -> tuple[float, int]:
    shapes = _row_counts(sum(max(-(-n // width), 1) for n in lengths), rows)
    return sum(shapes) * (width + widths[0] / 2), -width

  width = min(widths, key=cost)
  pieces = [
    Piece(i, offset, min(width, n - offset), offset + width >= n)
    for i, n in enumerate(lengths)
    for offset in range(0, max(n, 1), width)
  ]
  pieces.sort(key=lambda piece: (starts[piece.context] + piece.offset + piece.size, piece.context))
  calls = []
  for num_rows in _row_counts(len(pieces), rows):
    calls.append(PrefillCall(num_rows, width, pieces[:num_rows]))
    pieces = pieces[num_rows:]
  return calls


def _row_counts(num_pieces: int, rows: tuple[int, ...]) -> list[int]:
  """Row counts of the calls that hold `num_pieces`: full ones of the largest count, then the smallest that does."""
  full, rest = divmod(num_pieces, rows[-1])
  return [rows[-1]] * full + ([bucket(rows, rest)] if rest else [])
