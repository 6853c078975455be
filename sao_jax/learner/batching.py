"""Trajectories to packed rows: whole trajectories, first-fit decreasing, rows of one fixed length."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from sao_jax.learner.config import LearnerConfig
from sao_jax.types import TokenBatch, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackStats:
  """Statistics of a packed batch."""

  num_trajectories: int
  num_rows: int
  """Rows that hold something."""
  num_microbatches: int
  """Microbatches that hold something: the trip count of the learner's loops. The rest of `M` is padding, and
  skipped."""
  num_padded_microbatches: int
  """`M`: what the program was compiled for."""
  tokens: int
  action_tokens: int
  row_fill: float
  """Tokens / (rows that hold something x row length)."""
  fill: float
  """Tokens / tokens computed, i.e. with the empty rows of the used microbatches."""


class PackedBatch(NamedTuple):
  """A batch for the learner, and how well it is filled."""

  tokens: TokenBatch
  """`[M, B, T]` NumPy arrays."""
  stats: PackStats


def first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Splits `range(len(lengths))` into rows of at most `row_length`, longest first, each into the first row with room.

  >>> first_fit_decreasing([3, 6, 5, 4], row_length=9)
  [[1, 0], [2, 3]]
  """
  order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
  room = np.full(len(lengths), row_length, dtype=np.int64)  # A row each would do in the worst case.
  rows: list[list[int]] = []
  for index in order:
    row = int(np.argmax(room >= lengths[index]))
    if row == len(rows):
      rows.append([])
    rows[row].append(int(index))
    room[row] -= lengths[index]
  return rows


def bucket_microbatches(used: int, *, minimum: int, multiple: int | None) -> int:
  """The number of microbatches to compile for: a power of two, or a multiple of `multiple`, at least `minimum`.

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
  baseline_adv: Sequence[float] | np.ndarray | None = None,
  lambda_length: Literal["tokens", "turns"] = "tokens",
  min_microbatches: int = 1,
  microbatch_multiple: int | None = None,
) -> PackedBatch:
  """Packs whole trajectories into `[M, B, T]` arrays on the host.

  lambda_policy = max(0, 1 - 1 / (alpha l)) per trajectory (METHOD, length-adaptive lambda), l = action tokens or turns.
  Masks come from lengths and from the trajectories' own masks, never from token ids. Rows are dealt out to the used
  microbatches in turn, so that each of them holds long and short trajectories alike.

  Args:
    trajectories: at least one; none longer than `row_length`.
    row_length: `T`.
    rows_per_microbatch: `B`.
    alpha: > 0.
    baseline_adv: one float per trajectory: its advantage from rewards alone. None: 0.
    lambda_length: whether l counts action tokens or turns (step-level variants).
    min_microbatches: `M` is at least this.
    microbatch_multiple: `M` is a multiple of this; None: a power of two.

  Returns:
    The batch, with NumPy leaves, and its statistics.

  Raises:
    ValueError: no trajectory, one that is longer than a row, or a wrong number of baselines.
  """
  if not trajectories:
    raise ValueError("pack needs at least one trajectory; received none.")
  for trajectory in trajectories:
    if len(trajectory.tokens) > row_length:
      raise ValueError(
        f"Trajectory {trajectory.episode_id} has {len(trajectory.tokens)} tokens, more than row_length = {row_length}: "
        "trajectories are never split or cut; raise row_length, or lower the engine's max_len."
      )
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
      turns = lambda_length == "turns"
      length = num_turns(trajectory) if turns else trajectory.num_actions
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
  config: LearnerConfig, trajectories: Sequence[Trajectory], baseline_adv: Sequence[float] | np.ndarray | None = None
) -> PackedBatch:
  """`pack` with everything a learner's config says about it."""
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


def turn_ids(action_mask: np.ndarray) -> np.ndarray:
  """`[T]` int32: number of the run of action tokens that a token belongs to, from 1; 0 off actions.

  >>> turn_ids(np.array([False, True, True, False, True]))
  array([0, 1, 1, 0, 2], dtype=int32)
  """
  starts = action_mask & ~np.concatenate(([False], action_mask[:-1]))
  return np.where(action_mask, np.cumsum(starts), 0).astype(np.int32)


def num_turns(trajectory: Trajectory) -> int:
  """Number of runs of action tokens, which is what the step-level advantages see."""
  return int(turn_ids(trajectory.action_mask).max())


def _empty(shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
  dtypes = {
    "tokens": np.int32, "positions": np.int32, "segment_ids": np.int32, "action_mask": np.bool_,
    "behavior_logp": np.float32, "rewards": np.float32, "lambda_policy": np.float32, "turn_ids": np.int32,
    "truncated": np.bool_, "baseline_adv": np.float32,
  }  # fmt: skip
  return {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}


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
