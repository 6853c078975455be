"""Prefill planning: contexts are split into pieces, and the pieces packed into few, well-filled prefill calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sao_jax.rollout.engine.config import bucket


class Piece(NamedTuple):
  """A part of one context: a row of a prefill call."""

  context: int
  """Index of the context."""
  offset: int
  """Index of the piece's first token among those of the context that need prefill."""
  size: int
  """Number of tokens; 0 for a context without tokens to prefill."""
  last: bool
  """Whether this is the last piece of its context."""


class PrefillCall(NamedTuple):
  """Shape and rows of one prefill call."""

  num_rows: int
  width: int
  """Tokens per row, padding included."""
  pieces: list[Piece]
  """At most `num_rows`, one per row."""


def plan_calls(
  starts: Sequence[int], lengths: Sequence[int], *, rows: tuple[int, ...], widths: tuple[int, ...]
) -> list[PrefillCall]:
  """Splits contexts into pieces of one width and packs them into calls. The width is the one with the lowest cost.

    cost = Σ over calls of num_rows · (width + w₀ / 2),   w₀ = the smallest width

  The first term counts tokens, padding included. The second is the fixed cost of a row, which reads its slot's keys and
  values.

  Args:
    starts: per context, the position of the first token to prefill.
    lengths: per context, the number of tokens to prefill, >= 0.
    rows: row counts that a call may have, ascending.
    widths: tokens per row that a call may have, ascending.

  Returns:
    Calls in the order in which they must be made. Short contexts come first, so that few calls read far back. The
    pieces of a context keep the order of their tokens. A call may hold several pieces of a context: a call writes all
    its rows before it reads any.
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
  """Row counts of the calls for `num_pieces`: full calls of the largest count, then the smallest count that fits."""
  full, rest = divmod(num_pieces, rows[-1])
  return [rows[-1]] * full + ([bucket(rows, rest)] if rest else [])
