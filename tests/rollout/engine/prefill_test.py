"""Prefill planning: every token is prefilled once, in order, in allowed shapes, at the lowest cost."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st

from sao_jax.rollout.engine.prefill import Piece, PrefillCall, plan_calls

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(lambda x: tuple(sorted(x)))
CONTEXTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 90)), max_size=12)


@hypothesis.given(contexts=CONTEXTS, rows=SIZES, widths=SIZES)
def test_every_token_is_prefilled_once_in_order(contexts, rows, widths):
  starts, lengths = [x[0] for x in contexts], [x[1] for x in contexts]
  prefilled = [0] * len(contexts)
  ended = [False] * len(contexts)
  for call in plan_calls(starts, lengths, rows=rows, widths=widths):
    assert call.num_rows in rows and call.width in widths
    assert 0 < len(call.pieces) <= call.num_rows
    for piece in call.pieces:
      assert piece.size <= call.width and piece.offset == prefilled[piece.context] and not ended[piece.context]
      prefilled[piece.context] += piece.size
      ended[piece.context] = piece.last
  assert prefilled == lengths
  assert all(ended)  # also contexts without tokens to prefill


@hypothesis.given(contexts=CONTEXTS.filter(bool), rows=SIZES, widths=SIZES)
def test_no_single_width_costs_less(contexts, rows, widths):
  starts, lengths = [x[0] for x in contexts], [x[1] for x in contexts]

  def cost(calls: list[PrefillCall]) -> float:
    return sum(call.num_rows * (call.width + widths[0] / 2) for call in calls)

  best = cost(plan_calls(starts, lengths, rows=rows, widths=widths))
  for width in widths:
    # Row counts of a single width, by hand.
    pieces = sum(max(-(-n // width), 1) for n in lengths)
    counts = [rows[-1]] * (pieces // rows[-1])
    if rest := pieces % rows[-1]:
      counts.append(min(x for x in rows if x >= rest))
    assert best <= sum(counts) * (width + widths[0] / 2)


def test_short_observations_share_a_call_of_narrow_rows():
  (call,) = plan_calls([50, 20, 90], [20, 9, 4], rows=(4, 8), widths=(16, 64))
  assert (call.num_rows, call.width) == (4, 16)
  assert call.pieces == [
    Piece(1, 0, 9, last=True),
    Piece(0, 0, 16, last=False),
    Piece(0, 16, 4, last=True),
    Piece(2, 0, 4, last=True),
  ]


def test_a_long_prompt_gets_wide_rows():
  (call,) = plan_calls([0], [64], rows=(1, 4), widths=(16, 64))
  assert call == PrefillCall(1, 64, [Piece(0, 0, 64, last=True)])
