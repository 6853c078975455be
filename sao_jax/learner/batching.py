"""Packs whole trajectories into rows of one fixed length, first-fit decreasing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Real

from sao_jax.learner.config import LearnerConfig
from sao_jax.types import TokenBatch, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackStats:
  """Statistics of a packed batch."""

  num_trajectories: int
  num_rows: int
  """Rows that hold a trajectory."""
  num_microbatches: int
  """Microbatches that hold a trajectory: the trip count of the learner's loops. The rest of `M` is padding, and
  skipped."""
  num_padded_microbatches: int
  """`M`, for which the program is compiled."""
  tokens: int
  action_tokens: int
  row_fill: float
  """tokens / (num_rows x row length)."""
  fill: float
  """tokens / tokens that are computed, including the empty rows of the used microbatches."""


class PackedBatch(NamedTuple):
  """A batch for the learner, and its statistics."""

  tokens: TokenBatch
  """NumPy leaves, `[M, B, T]`."""
  stats: PackStats


def first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Assigns trajectories to rows of at most `row_length` tokens: longest first, each to the first row with room.

  >>> first_fit_decreasing([3, 6, 5, 4], row_length=9)
  [[1, 0], [2, 3]]
  """
  order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
  room = np.full(len(lengths), row_length, dtype=np.int64)  # in the worst case, one row each
  rows: list[list[int]] = []
  for index in order:
    row = int(np.argmax(room >= lengths[index]))
    if row == len(rows):
      rows.append([])
    rows[row].append(int(index))
    room[row] -= lengths[index]
  return rows


def bucket_microbatches(used: int, *, minimum: int, multiple: int | None) -> int:
  """Number of microbatches to compile for: a power of two or a multiple of `multiple`, at least `minimum`.

  >>> bucket_microbatches(5, minimum=1, multiple=None), bucket_microbatches(5, minimum=1, multiple=3)
  (8, 6)
  """
  wanted = max(used, minimum, 1)
  if multiple is not None:
    return -(-wanted // multiple) * multiple
  return 1 << (wanted - 1).bit_length()


def pack(
  trajectories: Sequence[Trajectory],
  *,
  row_length: int,
  rows_per_microbatch: int,
  alpha: float,
  baseline_adv: Sequence[float] | Real[np.ndarray, "N"] | None = None,
  lambda_length: Literal["tokens", "turns"] = "tokens",
  min_microbatches: int = 1,
  microbatch_multiple: int | None = None,
) -> PackedBatch:
  """Packs whole trajectories into `[M, B, T]` arrays on the host.

  Each trajectory gets λ = max(0, 1 − 1 / (α l)), l = its number of action tokens or turns (arXiv 2607.07508, Section
  3.2). Masks come from lengths and from the trajectories' own masks, never from token ids. Rows are dealt to the used
  microbatches in turn, so that each holds both long and short trajectories.

  Args:
    trajectories: at least one, none longer than `row_length`.
    row_length: `T`.
    rows_per_microbatch: `B`.
    alpha: α > 0.
    baseline_adv: `[N]`, each trajectory's advantage from rewards alone. None: 0.
    lambda_length: whether l counts action tokens or turns (step-level variants).
    min_microbatches: lower bound of `M`.
    microbatch_multiple: `M` is a multiple of this; None: a power of two.

  Returns:
    The batch, with NumPy leaves, and its statistics.

  Raises:
    ValueError: there is no trajectory, one is longer than a row, or the number of baselines is wrong.

  >>> from sao_jax.learner import demonstration_trajectory
  >>> made = demonstration_trajectory(np.array([5, 7, 2]), np.array([False, True, True]))
  >>> batch, stats = pack([made, made], row_length=8, rows_per_microbatch=1, alpha=1.5)
  >>> batch.segment_ids.tolist(), batch.positions.tolist(), stats.fill
  ([[[1, 1, 1, 2, 2, 2, 0, 0]]], [[[0, 1, 2, 0, 1, 2, 0, 0]]], 0.75)
  """
  _check_lengths(trajectories, row_length)
  baselines = np.zeros(len(trajectories), np.float32) if baseline_adv is None else np.asarray(baseline_adv, np.float32)
  if baselines.shape != (len(trajectories),):
    raise ValueError(
      f"baseline_adv must hold one number per trajectory ({len(trajectories)}); received shape {baselines.shape}."
    )
  rows = first_fit_decreasing([len(t.tokens) for t in trajectories], row_length)
  used = -(-len(rows) // rows_per_microbatch)
  padded = bucket_microbatches(used, minimum=min_microbatches, multiple=microbatch_multiple)
  arrays = _empty((padded, rows_per_microbatch, row_length))
  for index, row in enumerate(rows):
    start = 0
    for segment, member in enumerate(row, start=1):
      trajectory = trajectories[member]
      length = num_turns(trajectory) if lambda_length == "turns" else trajectory.num_actions
      where = (index % used, index // used, slice(start, start + len(trajectory.tokens)))
      _write(arrays, where, trajectory, segment, max(0.0, 1.0 - 1.0 / (alpha * length)), baselines[member])
      start += len(trajectory.tokens)
  tokens = sum(len(t.tokens) for t in trajectories)
  stats = PackStats(
    num_trajectories=len(trajectories),
    num_rows=len(rows),
    num_microbatches=used,
    num_padded_microbatches=padded,
    tokens=tokens,
    action_tokens=sum(t.num_actions for t in trajectories),
    row_fill=tokens / (len(rows) * row_length),
    fill=tokens / (used * rows_per_microbatch * row_length),
  )
  return PackedBatch(TokenBatch(**arrays), stats)


def pack_batch(
  config: LearnerConfig,
  trajectories: Sequence[Trajectory],
  baseline_adv: Sequence[float] | Real[np.ndarray, "N"] | None = None,
) -> PackedBatch:
  """`pack` with the settings of a learner's config."""
  return pack(
    trajectories,
    row_length=config.row_length,
    rows_per_microbatch=config.rows_per_microbatch,
    alpha=config.alpha,
    baseline_adv=baseline_adv,
    lambda_length="turns" if config.per_step else "tokens",
    min_microbatches=config.min_microbatches,
    microbatch_multiple=config.microbatch_multiple,
  )


def turn_ids(action_mask: Bool[np.ndarray, "T"]) -> Int32[np.ndarray, "T"]:
  """Numbers the runs of action tokens from 1; 0 off actions.

  >>> turn_ids(np.array([False, True, True, False, True]))
  array([0, 1, 1, 0, 2], dtype=int32)
  """
  starts = action_mask & ~np.concatenate(([False], action_mask[:-1]))
  return np.where(action_mask, np.cumsum(starts), 0).astype(np.int32)


def num_turns(trajectory: Trajectory) -> int:
  """Number of runs of action tokens, which are the steps of step-level advantages."""
  return int(turn_ids(trajectory.action_mask).max())


def _check_lengths(trajectories: Sequence[Trajectory], row_length: int) -> None:
  if not trajectories:
    raise ValueError("pack needs at least one trajectory; received none.")
  for trajectory in trajectories:
    if len(trajectory.tokens) > row_length:
      raise ValueError(
        f"Trajectory {trajectory.episode_id} has {len(trajectory.tokens)} tokens, more than row_length = {row_length}. "
        "Trajectories are never split: raise row_length, or lower the engine's max_len."
      )


def _empty(shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
  dtypes = {
    "tokens": np.int32, "positions": np.int32, "segment_ids": np.int32, "action_mask": np.bool_,
    "behavior_logp": np.float32, "rewards": np.float32, "lambda_policy": np.float32, "turn_ids": np.int32,
    "truncated": np.bool_, "baseline_adv": np.float32,
  }  # fmt: skip
  arrays: dict[str, np.ndarray] = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
  return {**arrays, "version": np.full(shape, -1, np.int32)}


def _write(
  arrays: dict[str, np.ndarray],
  where: tuple[int, int, slice],
  trajectory: Trajectory,
  segment: int,
  lambda_policy: float,
  baseline_adv: np.float32,
) -> None:
  mask = trajectory.action_mask
  arrays["tokens"][where] = trajectory.tokens
  arrays["positions"][where] = np.arange(len(mask))
  arrays["segment_ids"][where] = segment
  arrays["action_mask"][where] = mask
  arrays["behavior_logp"][where] = np.where(mask, trajectory.behavior_logp, 0.0)
  arrays["rewards"][where] = trajectory.rewards
  arrays["lambda_policy"][where] = lambda_policy
  arrays["turn_ids"][where] = turn_ids(mask)
  arrays["truncated"][where] = trajectory.ended == "truncated"
  arrays["baseline_adv"][where] = baseline_adv
  if not trajectory.mixed_versions:
    arrays["version"][where] = trajectory.versions
