"""Packing: every trajectory once and whole, masks from lengths, few shapes, little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.learner import algorithms, batching
from tests.learner import tiny

FIELDS = (
  "tokens", "positions", "segment_ids", "action_mask", "behavior_logp", "rewards", "lambda_policy", "turn_ids",
  "truncated", "baseline_adv",
)  # fmt: skip


def unpack(batch):
  """All segments of a batch, as dicts of their slices."""
  shape = batch.tokens.shape
  rows = {name: np.asarray(getattr(batch, name)).reshape(-1, shape[-1]) for name in FIELDS}
  for r in range(shape[0] * shape[1]):
    for segment in range(1, rows["segment_ids"][r].max(initial=0) + 1):
      where = np.flatnonzero(rows["segment_ids"][r] == segment)
      assert (np.diff(where) == 1).all()
      yield {name: value[r][where] for name, value in rows.items()}


@given(st.integers(1, 40), st.integers(0, 2**16), st.integers(1, 5), st.integers(14, 40))
def test_every_trajectory_is_packed_once_and_whole(count, seed, rows_per_microbatch, row_length):
  made = tiny.trajectories(count, seed=seed, truncated_share=0.3)
  baselines = np.arange(count, dtype=np.float32)
  batch, stats = batching.pack(
    made, row_length=row_length, rows_per_microbatch=rows_per_microbatch, alpha=1.5, baseline_adv=baselines
  )
  assert batch.tokens.shape == (stats.num_padded_microbatches, rows_per_microbatch, row_length)
  found = sorted(unpack(batch), key=lambda s: s["baseline_adv"][0])
  assert len(found) == count
  for index, (segment, original) in enumerate(zip(found, made, strict=True)):
    mask = original.action_mask
    np.testing.assert_array_equal(segment["tokens"], original.tokens)
    np.testing.assert_array_equal(segment["action_mask"], mask)
    np.testing.assert_array_equal(segment["positions"], np.arange(len(mask)))
    np.testing.assert_array_equal(segment["rewards"], original.rewards)
    np.testing.assert_array_equal(segment["behavior_logp"], np.where(mask, original.behavior_logp, 0.0))
    np.testing.assert_array_equal(segment["truncated"], original.ended == "truncated")
    np.testing.assert_array_equal(segment["baseline_adv"], baselines[index])
    np.testing.assert_allclose(segment["lambda_policy"], max(0.0, 1.0 - 1.0 / (1.5 * mask.sum())), rtol=1e-6)
    assert segment["turn_ids"].max() == original.num_turns
  padding = batch.segment_ids == 0
  for name in FIELDS:
    assert not getattr(batch, name)[padding].any(), name
  used = (batch.segment_ids > 0).any(axis=(1, 2))
  assert used[: stats.num_microbatches].all() and not used[stats.num_microbatches :].any()
  assert stats.tokens == (~padding).sum() and stats.action_tokens == batch.action_mask.sum()
  assert stats.row_fill == stats.tokens / ((batch.segment_ids > 0).any(axis=2).sum() * row_length)


def test_long_tailed_lengths_fill_long_rows():
  rng = np.random.default_rng(0)
  lengths = np.clip(rng.lognormal(4.5, 1.0, 256), 8, 2048).astype(int)
  rows = batching.first_fit_decreasing(lengths.tolist(), 2048)
  assert sorted(i for row in rows for i in row) == list(range(256))
  assert lengths.sum() / (len(rows) * 2048) >= 0.95


def test_first_fit_takes_the_first_row_with_room():
  assert batching.first_fit_decreasing([4, 7, 3, 6, 2], row_length=10) == [[1, 2], [3, 0], [4]]


def test_a_trajectory_longer_than_a_row_is_refused():
  long = tiny.trajectory([False] + [True] * 20, index=7)
  with pytest.raises(ValueError, match=r"Trajectory 7 has 21 tokens, more than row_length = 20"):
    batching.pack([long], row_length=20, rows_per_microbatch=1, alpha=1.5)


def test_a_trajectory_as_long_as_a_row_fits():
  exact = tiny.trajectory([False] + [True] * 19)
  batch, stats = batching.pack([exact], row_length=20, rows_per_microbatch=1, alpha=1.5)
  assert stats.fill == 1.0 and batch.tokens.shape == (1, 1, 20)


@pytest.mark.parametrize(
  ("used", "minimum", "multiple", "expected"),
  [(1, 1, None, 1), (3, 1, None, 4), (4, 1, None, 4), (5, 1, None, 8), (2, 8, None, 8), (9, 8, None, 16), (7, 1, 3, 9)],
)
def test_microbatches_are_bucketed(used, minimum, multiple, expected):
  assert batching.bucket_microbatches(used, minimum=minimum, multiple=multiple) == expected


def test_few_shapes_over_many_batches():
  shapes = set()
  for seed in range(20):
    batch, _ = batching.pack(
      tiny.trajectories(32, seed=seed), row_length=16, rows_per_microbatch=4, alpha=1.5, min_microbatches=4
    )
    shapes.add(batch.tokens.shape)
  assert len(shapes) <= 2


def test_nothing_to_pack_and_wrong_baselines_are_refused():
  with pytest.raises(ValueError, match="at least one trajectory"):
    batching.pack([], row_length=20, rows_per_microbatch=1, alpha=1.5)
  with pytest.raises(ValueError, match=r"one number per trajectory \(2\); received shape \(3,\)"):
    batching.pack(tiny.trajectories(2), row_length=20, rows_per_microbatch=1, alpha=1.5, baseline_adv=[1.0, 2.0, 3.0])


def test_pitfall_14_lambda_counts_action_tokens_and_is_never_negative():
  mask = np.zeros(100, bool)
  mask[50:54] = True
  batch, _ = batching.pack([tiny.trajectory(mask)], row_length=100, rows_per_microbatch=1, alpha=1.5)
  np.testing.assert_allclose(batch.lambda_policy, 0.8333333, rtol=1e-6)
  batch, _ = batching.pack([tiny.trajectory([False, True])], row_length=2, rows_per_microbatch=1, alpha=0.5)
  np.testing.assert_array_equal(batch.lambda_policy, 0.0)


def test_lambda_of_step_level_variants_counts_turns():
  made = [tiny.trajectory([False, True, True, False, True, True, True])]
  config = algorithms.learner_config("sao_step_mean", row_length=8)
  batch, _ = batching.pack_batch(config, made)
  np.testing.assert_allclose(batch.lambda_policy[0, 0, :7], 1.0 - 1.0 / (1.5 * 2), rtol=1e-6)


def test_pitfall_24_masks_come_from_lengths_not_from_token_ids():
  """Token 0 is padding in the arrays, and may be sampled: it stays an action."""
  sampled = tiny.trajectory([False, True, True, False, True])
  zeros = np.zeros(5, np.int32)
  same = tiny.trajectory([False, True, True, False, True])
  object.__setattr__(same, "tokens", zeros)
  one, _ = batching.pack([sampled], row_length=8, rows_per_microbatch=1, alpha=1.5)
  other, _ = batching.pack([same], row_length=8, rows_per_microbatch=1, alpha=1.5)
  for name in FIELDS[1:]:
    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_pitfall_27_fractional_rewards_stay_float32():
  batch, _ = batching.pack([tiny.trajectory([False, True], reward=0.5)], row_length=2, rows_per_microbatch=1, alpha=1.5)
  assert batch.rewards.dtype == np.float32 and batch.rewards.sum() == 0.5


def test_the_version_is_that_of_trajectories_of_one_version():
  one, two = tiny.trajectory([0, 1, 0, 1]), tiny.trajectory([0, 1, 0, 1], index=1)
  one.versions[[1, 3]], two.versions[[1, 3]] = 5, (4, 5)
  batch, _ = batching.pack([one, two], row_length=9, rows_per_microbatch=1, alpha=1.5)
  assert sorted(batch.version[0, 0].tolist()) == [-1] * 7 + [5, 5]
  assert batch.action_mask[batch.version == 5].all()


def test_rows_are_dealt_out_evenly():
  made = [tiny.trajectory([False] + [True] * 9, seed=i, index=i) for i in range(9)]
  batch, stats = batching.pack(made, row_length=10, rows_per_microbatch=4, alpha=1.5)
  assert stats.num_microbatches == 3
  assert (batch.segment_ids[:3] > 0).any(axis=2).sum(axis=1).tolist() == [3, 3, 3]
