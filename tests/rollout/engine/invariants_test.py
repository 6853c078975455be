"""Invariants: counts and rewards balance for any environment; log-probs of a real model match a full forward pass."""

from __future__ import annotations

import collections
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import ModelConfig, cached_policy, init_policy, policy_logits
from sao_jax.rollout import Engine, EpisodeRequest
from sao_jax.types import Step
from tests.rollout.engine.engine_test import PARAMS, config, requests
from tests.rollout.fakes import MARK, POLICY, CharTokenizer, Echo, assert_logps_true

_TURN = st.sampled_from(["go", "end", "truncate", "raise", "nan", "flood"])


class Scripted:
  """Environment that follows the script of its task, and records its rewards."""

  def __init__(self, scripts, rewards):
    self.scripts, self.rewards = scripts, rewards

  def reset(self, task_index):
    self.task, self.turn = task_index, 0
    prompt, self.script = self.scripts[task_index]
    return "c" * prompt

  def step(self, action):
    assert self.turn < len(self.script)
    kind, observation, reward = self.script[self.turn]
    self.turn += 1
    if kind == "raise":
      raise RuntimeError
    self.rewards[self.task].append(reward)
    last = self.turn == len(self.script)
    return Step(
      observation="d" * (100 if kind == "flood" else observation),
      reward=float("nan") if kind == "nan" else reward,
      done=last or kind in ("end", "truncate"),
      truncated=kind == "truncate",
    )

  def close(self):
    pass


@hypothesis.given(
  scripts=st.lists(
    st.tuples(
      st.integers(0, 60),
      st.lists(st.tuples(_TURN, st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0, -2.0])), min_size=1, max_size=6),
    ),
    max_size=14,
  ),
  env_workers=st.sampled_from([0, 2]),
  recompute=st.booleans(),
  every=st.integers(1, 5),
  num_episodes=st.sampled_from([None, 9]),
  cache_tokens=st.sampled_from([None, 96, 150]),
  num_streams=st.sampled_from([1, 2]),
)
def test_counts_and_rewards_balance_for_any_environment(
  scripts, env_workers, recompute, every, num_episodes, cache_tokens, num_streams
):
  rewards = collections.defaultdict(list)
  failed = []
  engine = Engine(
    model=POLICY,
    make_env=lambda: Scripted(scripts, rewards),
    tokenizer=CharTokenizer(),
    config=config(
      env_workers=env_workers,
      recompute_cache_on_update=recompute,
      max_failed_share=1.0,
      num_episodes=num_episodes,
      cache_tokens=cache_tokens,
      num_streams=num_streams,
    ),
  )
  versions = lambda chunk: (PARAMS[min(chunk // every, 39)], min(chunk // every, 39))  # noqa: E731
  with engine:
    done = list(engine.generate(versions, requests(len(scripts)), on_failure=failed.append))
    counters = engine.counters
  assert sorted([x.episode_id for x in done] + [x.episode_id for x in failed]) == list(range(len(scripts)))
  assert counters["episodes_finished"] == len(done) and counters["failed_episodes"] == len(failed)
  for x in done:
    # Sum of rewards in = sum of rewards out, and one log-prob and version per action token (Trajectory's checks).
    assert x.total_reward == sum(rewards[x.task_index])
    assert x.num_turns <= 4 and len(x.tokens) <= 48
    assert (x.tokens[: scripts[x.task_index][0]] == 2).all()
    if recompute:
      assert not (x.tokens[x.action_mask] == MARK).any()  # sampled from a cache of other weights
      assert_logps_true(x, PARAMS)
  assert counters["swapped_in"] <= counters["swapped_out"]
  assert counters["swapped_out"] == 0 or num_episodes or cache_tokens


MODEL = ModelConfig(
  vocab_size=20, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24
)


@pytest.fixture(scope="module")
def real():
  """Returns a policy, weights of eight versions, and its full forward pass."""
  first = init_policy(MODEL, jax.random.key(0))
  params = [jax.tree.map(lambda x, i=i: x * (1.0 + 0.3 * i), first) for i in range(8)]
  return cached_policy(MODEL), params, jax.jit(policy_logits(MODEL))


class _Shared(Echo):
  """Prompts with a shared prefix, and slow responses."""

  def reset(self, task_index):
    return "cdefghijklmnopqr" + super().reset(task_index)

  def step(self, action):
    time.sleep(0.005)
    return super().step(action)


@pytest.mark.parametrize(("recompute", "streams"), [(False, 1), (True, 2)])
def test_log_probs_of_a_real_model_are_those_of_a_full_forward_pass(recompute, streams, real):
  policy, params, logits = real
  temperature = 0.8
  crowded = {"num_episodes": 9, "env_workers": 5, "num_streams": streams, "cache_tokens": 120} if recompute else {}
  engine = Engine(
    model=policy,
    make_env=lambda: (_Shared if crowded else Echo)(3),
    tokenizer=CharTokenizer(),
    config=config(temperature=temperature, recompute_cache_on_update=recompute, max_action_tokens=40, **crowded),
  )
  every = 2 if recompute else 1000
  with engine:
    done = list(engine.generate(lambda chunk: (params[chunk // every % 8], chunk // every), requests(16)))
    counters = engine.counters
  assert any(x.mixed_versions for x in done) == recompute
  assert (counters["swapped_out"] > 0) == (counters["prefix_tokens_saved"] > 0) == recompute
  assert max(x.num_turns for x in done) > 1
  assert max(len(x.tokens) for x in done) == 48  # the last chunk of one passed the end of the cache
  for x in done:
    padded = np.zeros(48, np.int32)
    padded[: len(x.tokens)] = x.tokens
    for version in np.unique(x.versions[x.action_mask]):
      logp = jax.nn.log_softmax(logits(params[version % 8], jnp.asarray(padded)[None])[0] / temperature)
      at = np.flatnonzero(x.versions == version)
      np.testing.assert_allclose(x.behavior_logp[at], np.asarray(logp)[at - 1, x.tokens[at]], atol=2e-4)


def test_requests_of_one_group_are_different_samples():
  engine = Engine(model=POLICY, make_env=lambda: Echo(3), tokenizer=CharTokenizer(), config=config())
  group = [EpisodeRequest(task_index=5, episode_id=i, group_id=0) for i in range(4)]
  with engine:
    done = list(engine.generate(lambda _: (PARAMS[0], 0), group))
  assert len({x.tokens.tobytes() for x in done}) == 4
  assert {x.group_id for x in done} == {0}
