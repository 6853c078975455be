"""Means over seeds with bootstrap intervals, and differences between arms that share their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sao_jax.training.intervals import bootstrap_interval


class Estimate(NamedTuple):
  """A mean over seeds and its 95 % interval."""

  mean: float
  low: float
  high: float
  n: int

  def __str__(self) -> str:
    if self.n < 2:
      return f"{self.mean:.3f}"
    return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def bootstrap_mean(values: Sequence[float]) -> Estimate:
  """Returns the mean and its `bootstrap_interval`.

  A single value has no interval: both bounds are NaN.

  >>> bootstrap_mean([0.5, 0.5, 0.5])
  Estimate(mean=0.5, low=0.5, high=0.5, n=3)
  """
  x = np.asarray(values, np.float64)
  if x.ndim != 1 or not x.size or not np.isfinite(x).all():
    raise ValueError(f"values must be one or more finite numbers; received {list(values)}.")
  if x.size == 1:
    return Estimate(float(x[0]), float("nan"), float("nan"), 1)
  return Estimate(float(x.mean()), *bootstrap_interval(x), x.size)


def paired_difference(arm: Mapping[int, float], reference: Mapping[int, float]) -> Estimate:
  """Returns `bootstrap_mean` of the differences arm - reference over the seeds that both have.

  Raises:
    ValueError: the arms share no seed.
  """
  shared = sorted(set(arm) & set(reference))
  if not shared:
    raise ValueError(f"arms must share a seed; received {sorted(arm)} and {sorted(reference)}.")
  return bootstrap_mean([arm[seed] - reference[seed] for seed in shared])
