"""Baselines from rewards alone, against their definitions and across a restart."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from sao_jax.learner import algorithms, baselines
from tests.learner import tiny


def made(rewards, *, prompts=None, groups=None):
  prompts = range(len(rewards)) if prompts is None else prompts
  groups = range(len(rewards)) if groups is None else groups
  return [
    dataclasses.replace(tiny.trajectory([False, True], reward=r, index=p), group_id=g)
    for r, p, g in zip(rewards, prompts, groups, strict=True)
  ]


def make(name, **fields):
  return baselines.make_baselines(algorithms.learner_config(name, **fields))


def test_algorithms_with_a_critic_need_none():
  assert make("sao") is None and make("vapo") is None


def test_group_is_relative_to_its_own_group_in_any_order():
  adv = make("grpo").advantages(made([1, 0, 0, 5, 1, 5], groups=[7, 9, 7, 3, 9, 3]))
  np.testing.assert_allclose(adv, [1, -1, -1, 0, 1, 0], atol=1e-4)
  plain = make("grpo", normalize_group_std=False).advantages(made([1, 0, 0, 5, 1, 5], groups=[7, 9, 7, 3, 9, 3]))
  np.testing.assert_allclose(plain, [0.5, -0.5, -0.5, 0, 0.5, 0])


def test_batch_mean():
  np.testing.assert_allclose(make("reinforce").advantages(made([1, 0, 0, 1])), [0.5, -0.5, -0.5, 0.5])


def test_running_mean_is_per_prompt_over_the_last_eight_and_excludes_the_reward_itself():
  tracker = make("running_mean")
  np.testing.assert_array_equal(tracker.advantages(made([1, 1], prompts=[0, 1])), [0, 0])
  np.testing.assert_array_equal(tracker.advantages(made([0, 1], prompts=[0, 0])), [-1, 0.5])
  tracker.advantages(made([0] * 8, prompts=[0] * 8))
  np.testing.assert_array_equal(tracker.advantages(made([1, 0], prompts=[0, 1])), [1, -1])


def test_global_running_mean_remembers_128_rewards_of_any_prompt():
  tracker = make("global_running_mean")
  tracker.advantages(made([1] * 128))
  assert tracker.advantages(made([0]))[0] == -1.0
  np.testing.assert_allclose(tracker.advantages(made([0]))[0], -127 / 128)
  short = make("global_running_mean", baseline_window=2)
  short.advantages(made([1, 0, 0]))
  assert short.advantages(made([1]))[0] == 1.0


def test_spo_tracks_each_prompt_and_normalises_the_batch():
  tracker = make("spo")
  adv = tracker.advantages(made([1, 0, 1, 0]))
  np.testing.assert_allclose(adv, [1, -1, 1, -1], atol=1e-6)
  # v of prompt 0: 8 rewards' worth of 0.5, decayed by 0.875, and one success.
  assert tracker.state()[0] == (0.875 * 4 + 1.0, 0.875 * 4)
  np.testing.assert_array_equal(make("spo").advantages(made([1, 1])), [0, 0])
  with pytest.raises(ValueError, match=r"SPO needs rewards in \[0, 1\]; received values from -1.0 to 2.0"):
    tracker.advantages(made([-1, 2]))


@pytest.mark.parametrize("name", ["grpo", "reinforce", "running_mean", "global_running_mean", "spo"])
def test_a_restored_baseline_goes_on_as_if_nothing_had_happened(name):
  rng = np.random.default_rng(0)
  batches = [made(rng.integers(0, 2, 16), prompts=rng.integers(0, 4, 16)) for _ in range(4)]
  whole = make(name)
  expected = [whole.advantages(batch) for batch in batches]
  first = make(name)
  for batch in batches[:2]:
    first.advantages(batch)
  second, state = make(name), first.state()
  first.advantages(batches[2])  # which `state` does not see
  second.restore(json.loads(json.dumps(state)))
  for batch, adv in zip(batches[2:], expected[2:], strict=True):
    result = second.advantages(batch)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, adv)


def test_a_state_of_another_baseline_is_refused():
  with pytest.raises(ValueError, match="has no state to restore"):
    make("reinforce").restore({"0": [1.0]})
