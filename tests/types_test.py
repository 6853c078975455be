"""A trajectory's checks of its log-probs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sao_jax.types import LOGP_ROUNDING
from tests.rollout.trajectory_queue_test import trajectory


def with_logp(*values):
  return dataclasses.replace(trajectory(3), behavior_logp=np.array([np.nan, *values], np.float32))


@pytest.mark.parametrize("positive", [1e-7, 1e-5, LOGP_ROUNDING])
def test_a_log_prob_that_rounding_made_positive_is_0(positive):
  given = np.array([np.nan, positive, -0.25], np.float32)
  made = dataclasses.replace(trajectory(3), behavior_logp=given)
  np.testing.assert_array_equal(made.behavior_logp, np.array([np.nan, 0.0, -0.25], np.float32))
  assert made.behavior_logp.dtype == np.float32
  assert given[1] == np.float32(positive)  # the caller's array stays as it is


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ((2 * LOGP_ROUNDING, -0.25), "1 are positive by more than rounding, 0.0001"),
    ((0.5, 1e-7), "1 are positive"),
    ((np.inf, -0.25), "1 of 2 are missing or not finite"),
    ((-np.inf, 1e-7), "1 of 2 are missing or not finite"),
    ((np.nan, np.nan), "2 of 2 are missing or not finite, 0 are positive"),
  ],
)
def test_other_log_probs_are_refused(values, message):
  with pytest.raises(ValueError, match=message):
    with_logp(*values)
