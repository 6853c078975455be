"""Where a run's first parameters come from."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import pytest

from experiments.support import chaos_run
from experiments.tasks import digits
from sao_jax import models
from sao_jax.io.metrics import read_metrics
from sao_jax.training import components, loop
from sao_jax.training.components import Components
from tests.bare_run import bare, busy_domain
from tests.tiny_domain import VOCABULARY


@pytest.fixture
def saved(tmp_path):
  """`(config of a run that starts from it, its parameters)`."""
  config = chaos_run.make_config("sync", num_steps=1)
  params = models.init_policy(config.policy, jax.random.key(3))
  models.save_hf(tmp_path, config.policy, params)
  return dataclasses.replace(config, policy_checkpoint=str(tmp_path)), params


def test_policy_starts_from_the_checkpoint_and_the_critic_from_the_policy(saved):
  config, params = saved
  with Components(config, digits.make_domain()) as parts:
    policy = parts.init_policy()
    chex.assert_trees_all_equal(policy, params)
    critic = parts.init_critic(policy)
  assert critic is not None
  trunk = {name: value for name, value in critic.items() if name != "value_head"}
  chex.assert_trees_all_equal(trunk, {name: policy[name] for name in trunk})


def test_config_decides_how_the_checkpoint_is_computed_and_stored(saved):
  config, params = saved
  policy = dataclasses.replace(config.policy, remat="full", dtype="bfloat16", param_dtype="bfloat16")
  with Components(dataclasses.replace(config, policy=policy), digits.make_domain()) as parts:
    loaded = parts.init_policy()
  chex.assert_trees_all_equal(loaded, jax.tree.map(lambda x: x.astype("bfloat16"), params))


def test_another_architecture_is_refused_before_the_engine_is_made(saved, monkeypatch):
  config, _ = saved
  monkeypatch.setattr(components, "embedded_engines", None)
  policy = dataclasses.replace(config.policy, rope_theta=5e5)
  with pytest.raises(ValueError, match=r"policy must be that of .*: rope_theta is 500000.0 here and 10000.0 there"):
    Components(dataclasses.replace(config, policy=policy), digits.make_domain())


def test_padding_ids_are_never_sampled_and_a_run_stays_on_policy(tmp_path):
  """A fresh policy with more ids than the tokenizer: without the exclusion, episodes fail or ratios leave 1."""
  config = bare(num_steps=2, policy=dataclasses.replace(bare().policy, vocab_size=2 * len(VOCABULARY)))
  summary = loop.train(config, busy_domain(), tmp_path)
  assert summary is not None and summary["failed_episodes"] == 0
  for row in read_metrics(tmp_path)[0]:
    assert abs(row["ratio_mean"] - 1) < 1e-5 and row["approx_kl"] < 1e-6
    assert row["entropy"] < np.log(len(VOCABULARY)) + 1e-5
