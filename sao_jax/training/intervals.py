"""Confidence intervals (95 %) of success rates and of means."""

from __future__ import annotations

import math

import numpy as np


def wilson_interval(successes: float, n: int, *, z: float = 1.959964) -> tuple[float, float]:
  """Wilson score interval of a success rate. Its ends stay in [0, 1], and 0 of n does not count as certainty.

  (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = successes / n (Wilson 1927).

  Written out because `scipy.stats.binomtest` takes whole numbers of successes only; n problems that are each solved in
  a third of the attempts have n / 3.

  Args:
    successes: number of successes, in [0, n]; may be fractional.
    n: number of trials, at least 1.
    z: quantile of the normal distribution.

  Returns:
    `(low, high)`.

  Raises:
    ValueError: `successes` or `n` is out of range.

  >>> low, high = wilson_interval(50, 100)
  >>> round(low, 4), round(high, 4)
  (0.4038, 0.5962)
  """
  if n < 1 or not 0 <= successes <= n:
    raise ValueError(f"successes must be in [0, n] with n >= 1; received {successes} of {n}.")
  p = successes / n
  middle = p + z * z / (2 * n)
  spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  scale = 1 + z * z / n
  return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
  """Percentile bootstrap interval of a mean, from 10,000 resamples with a fixed seed, so that tables repeat.

  Args:
    values: `[n]`, n >= 2.

  Returns:
    `(low, high)`, the 2.5 and 97.5 percentiles of the resampled means.

  Raises:
    ValueError: `values` is not a vector of at least two numbers.

  >>> bootstrap_interval(np.array([0.5, 0.5, 0.5]))
  (0.5, 0.5)
  """
  import scipy.stats  # here, as it takes longer to import than jax, and most commands need no interval

  if values.ndim != 1 or values.size < 2:
    raise ValueError(f"values must be a vector of two or more numbers; received shape {values.shape}.")
  found = scipy.stats.bootstrap(
    (values,), np.mean, n_resamples=10_000, batch=100, vectorized=True, method="percentile", rng=0
  ).confidence_interval
  return float(found.low), float(found.high)
