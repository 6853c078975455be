"""Configs refuse invalid values, and say what was received and what is allowed."""

from __future__ import annotations

import dataclasses

import pytest

from sao_jax.learner import algorithms
from sao_jax.learner.config import LearnerConfig, OptimizerConfig

BAD = [
  ({"eps_low": 1.0}, "eps_low must be given, and in \\[0, 1\\); received 1.0"),
  ({"eps_low": -0.1}, "eps_low"),
  ({"eps_high": 0.0}, "eps_high must be given, and > 0"),
  ({"critic_updates": 0}, "critic_updates must be >= 1; received 0"),
  ({"policy_minibatches": 0}, "policy_minibatches"),
  ({"policy_loss": "ppo"}, "policy_loss must be one of dis, .*, gspo, uncorrected; received 'ppo'"),
  ({"advantage": "gea"}, "advantage must be one of"),
  ({"truncation": "cut"}, "truncation must be one of terminal, bootstrap"),
  ({"values_from": "old"}, "values_from must be one of"),
  ({"temperature": 0.0}, "temperature must be > 0"),
  ({"discount": 1.1}, "discount must be in"),
  ({"alpha": 0.0}, "alpha must be > 0"),
  ({"lambda_policy": 1.5}, "lambda_policy must be in"),
  ({"lambda_critic": -1.0}, "lambda_critic must be in"),
  ({"baseline": "group"}, "baseline must be \"none\" with advantage='gae'"),
  ({"advantage": "baseline"}, "baseline must be other than"),
  ({"advantage": "step_mean", "lambda_critic": 0.9}, "lambda_critic must be 1 with"),
  ({"advantage": "baseline", "baseline": "group", "truncation": "bootstrap"}, "truncation must be"),
  ({"icepop_low": 3.0, "icepop_high": 2.0}, "icepop"),
  ({"is_cap": 0.0}, "is_cap"),
  ({"old_policy": "newest"}, "old_policy must be one of learner, rollout; received 'newest'"),
  ({"positive_weight": -0.1}, "positive_weight must be >= 0"),
  ({"kl_coef": -0.1}, r"kl_coef must be >= 0 and < 1e\+37; received -0\.1"),
  ({"entropy_coef": float("nan")}, "entropy_coef must be >= 0"),
  ({"clip_low": 1.0}, "clip_low"),
  ({"row_length": 1}, "row_length"),
  ({"hold_policy_steps": -1}, "hold_policy_steps"),
  ({"microbatch_multiple": 0}, "microbatch_multiple"),
  ({"baseline_window": 0}, "baseline_window"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_values_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    LearnerConfig(**{"eps_low": 0.3, "eps_high": 5.0, **fields})


@pytest.mark.parametrize("given", [{"eps_low": 0.3}, {"eps_high": 5.0}, {}])
def test_pitfall_2_both_bounds_are_required(given):
  with pytest.raises(ValueError, match="must be given"):
    LearnerConfig(**given)
  if given:
    with pytest.raises(ValueError, match="must be given"):
      algorithms.learner_config("sao", **given)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"learning_rate": 0.0}, "learning_rate must be > 0"),
    ({"warmup_steps": -1}, "warmup_steps"),
    ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"b1": 1.0}, "b1"),
    ({"b2": -0.1}, "b2"),
    ({"eps": 0.0}, "eps"),
    ({"eps": 1e-50}, "eps must be >= 1e-37 and < 1e\\+37; received 1e-50"),  # 0 in float32
    ({"learning_rate": float("inf")}, "learning_rate"),
    ({"learning_rate": float("nan")}, "learning_rate"),
    ({"weight_decay": 1e39}, "weight_decay"),
  ],
)
def test_bad_optimizer_values_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    OptimizerConfig(**{"learning_rate": 1e-3, **fields})


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_name_gives_a_config(name):
  config = algorithms.learner_config(name)
  assert isinstance(config, LearnerConfig)
  assert config.needs_groups == name.startswith("grpo")


def test_sao_has_the_papers_settings():
  config = algorithms.learner_config("sao")
  assert (config.eps_low, config.eps_high, config.critic_updates, config.lambda_critic) == (0.3, 5.0, 2, 1.0)
  assert (config.alpha, config.lambda_policy, config.discount) == (1.5, None, 1.0)
  assert config.frozen_critic == ("attention", "embeddings", "norms", "routers")
  assert config.policy_optimizer.learning_rate == 1e-6
  assert (config.critic_optimizer.learning_rate, config.critic_optimizer.warmup_steps) == (5e-6, 10)
  assert not config.whiten_advantages and config.truncation == "terminal" and config.values_from == "updated"


def test_names_differ_from_sao_only_where_they_say():
  sao = dataclasses.asdict(algorithms.learner_config("sao"))
  for name, fields in algorithms.ALGORITHMS.items():
    other = dataclasses.asdict(algorithms.learner_config(name))
    assert {key for key in sao if sao[key] != other[key]} == set(fields), name


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match=r"algorithm must be one of sao, .*; received 'soa'"):
    algorithms.learner_config("soa")
  with pytest.raises(ValueError, match="unknown fields of LearnerConfig: eps_hihg"):
    algorithms.learner_config("sao", eps_hihg=5.0)
