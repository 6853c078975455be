"""What a run's configuration refuses, before anything runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from absl import flags

from experiments import train
from experiments.presets import small_cpu, tool_math_cpu
from experiments.support import config_flags
from sao_jax.io.workdir import config_differences
from sao_jax.learner import learner_config
from sao_jax.learner.algorithms import ALGORITHMS
from sao_jax.learner.partition import PROJECTIONS_AND_HEAD
from sao_jax.rollout import EngineConfig
from sao_jax.training.config import CriticConfig, EnvConfig, RunConfig, comparison, pretraining_learner, to_json

BOUNDS = {"eps_low": 0.3, "eps_high": 5.0, "row_length": 512}


def config(**changes: Any) -> RunConfig:
  base = {"num_steps": 1, "policy": tool_math_cpu.make_policy(), "learner": learner_config("sao", **BOUNDS)}
  return RunConfig(**{**base, **changes})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"algorithm": "ppo"}, "algorithm must be one of .*; received 'ppo'"),
    ({"schedule": "batch"}, "schedule must be one of async, sync, lagged; received 'batch'"),
    ({"group_size": 8}, "group_size must be 1 with algorithm='sao': single rollouts; received 8"),
    ({"group_size": 3, "batch_size": 16}, "group_size must be a divisor of batch_size = 16; received 3"),
    ({"learner": learner_config("grpo_dis", **BOUNDS), "algorithm": "grpo_dis"}, "group_size must be greater than 1"),
    ({"learner": learner_config("sao", critic_updates=3, **BOUNDS), "algorithm": "vapo"}, "with algorithm='vapo'"),
    ({"lag": 2}, "lag must be 0 with schedule='async'; received 2"),
    ({"lag": 9, "schedule": "lagged"}, "lag must be at most max_staleness = 8; received 9"),
    ({"lag_switch_chunks": 0, "schedule": "lagged"}, "lag_switch_chunks must be >= 1 or None; received 0"),
    ({"queue_capacity": 5}, "queue_capacity must be >= batch_size = 128; received 5"),
    ({"engine": EngineConfig(max_len=1024)}, "learner.row_length must be at least engine.max_len = 1024"),
    ({"engine": EngineConfig(temperature=0.7)}, "learner.temperature must be engine.temperature = 0.7"),
    ({"engine": EngineConfig(top_p=0.9)}, "engine.top_p must be 1.0 with num_steps > 0: .*received 0.9"),
    ({"seed": -1}, "seed must be in"),
  ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    config(**changes)


def test_an_evaluation_may_truncate() -> None:
  assert config(engine=EngineConfig(top_p=0.9), num_steps=0).engine.top_p == 0.9


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"eps_low": 1.0, "eps_high": 5.0}, "eps_low must be given, and in"),
    ({"eps_low": 0.3}, "eps_high must be given, and > 0 .it is not copied from eps_low.; received None"),
    ({"critic_updates": 0}, "critic_updates must be >= 1; received 0"),
  ],
)
def test_the_learner_refuses(changes: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    learner_config("sao", **changes)


def test_a_record_may_lack_what_has_its_default_and_nothing_else() -> None:
  full = tool_math_cpu.make_config()
  now, compared = to_json(full), comparison(full)
  old = json.loads(json.dumps(now))
  del old["max_skipped_in_a_row"], old["mesh"], old["engine"]["reset_retries"], old["learner"]["alpha"]
  assert config_differences(old, now, **compared) == []
  del old["engine"]["num_slots"], old["learner"]["eps_low"]  # the preset sets these
  lines = config_differences(old, now, **compared)
  assert [line.split(":")[0] for line in lines] == ["engine.num_slots", "learner.eps_low"]


def test_env_factory_has_a_form() -> None:
  with pytest.raises(ValueError, match=r"env.factory must be of the form 'module:function'; received 'module'"):
    EnvConfig(factory="module")


@pytest.mark.parametrize("preset", [tool_math_cpu, small_cpu])
def test_presets_make_a_run_config_and_survive_json(preset: Any) -> None:
  made = config_flags.from_config_dict(RunConfig, preset.get_config())
  assert made == config_flags.from_config_dict(RunConfig, to_json(made))
  assert (made.batch_size, made.group_size) == (128, 1)  # single rollout is not batch 1
  assert made.learner.critic_updates == 2 and made.learner.frozen_critic == PROJECTIONS_AND_HEAD


def test_the_quick_preset_is_the_same_run_but_shorter() -> None:
  quick = config_flags.from_config_dict(RunConfig, tool_math_cpu.get_config("quick"))
  full = tool_math_cpu.make_config()
  differing = {name for name in to_json(full) if getattr(full, name) != getattr(quick, name)}
  assert differing == {"num_steps", "eval_episodes", "warm_start", "critic"}
  assert dataclasses.replace(quick.warm_start, num_steps=full.warm_start.num_steps) == full.warm_start
  with pytest.raises(ValueError, match="budget must be 'full' or 'quick'; received 'tiny'"):
    tool_math_cpu.get_config("tiny")


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--config.nonsense=1", "nonsense"),
    ("--config.learner.eps_low=1.5", "eps_low must be given, and in"),
    ("--config.learner.eps_high=None", "eps_high must be given, and > 0"),
    ("--config.learner.critic_updates=0", "critic_updates must be >= 1; received 0"),
    ("--config.num_steps=many", "num_steps"),
    ("--config.group_size=4", "group_size must be 1"),
  ],
)
def test_the_command_line_is_refused_in_one_line(flag: str, message: str) -> None:
  values = flags.FlagValues()
  parse = config_flags.parser(RunConfig, default=train.DEFAULT_PRESET, flag_values=values)
  with pytest.raises(SystemExit) as ended:
    parse(["train", flag])
    config_flags.read(RunConfig, flag_values=values)
  assert message in str(ended.value)


def test_the_command_refuses_before_anything_runs(tmp_path: pathlib.Path) -> None:
  command = [sys.executable, "-m", "experiments.train", f"--workdir={tmp_path / 'run'}", "--config.group_size=4"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=500)
  assert done.returncode != 0
  assert "group_size must be 1 with algorithm='sao'" in done.stderr and "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_chosen_by_its_name_alone(name: str) -> None:
  group = 8 if "grpo" in name else 1
  chosen = config(algorithm=name, group_size=group)
  assert chosen.learner == dataclasses.replace(config().learner, **ALGORITHMS[name])
  assert config(algorithm=name, group_size=group, learner=chosen.learner) == chosen  # as a resumed run reads it


def test_all_algorithms_with_a_critic_share_one_pretrained_critic() -> None:
  base = config()
  fits = {}
  for name, fields in ALGORITHMS.items():
    made = config(algorithm=name, group_size=8 if "grpo" in name else 1, learner=base.learner)
    if made.learner.uses_critic:
      fits[name] = pretraining_learner(made)
      # What RL does with the critic, or with the policy, has no part in the fit.
      ignored = {field: getattr(base.learner, field) for field in fields if field not in ("advantage", "frozen_critic")}
      assert dataclasses.replace(fits[name], **ignored) == pretraining_learner(base), name
  assert len(fits) > 10 and all(fit.frozen_critic == () for fit in fits.values())
  regularized = config(learner=dataclasses.replace(base.learner, kl_coef=0.1))
  assert pretraining_learner(regularized) == pretraining_learner(base)  # no reference is held
  assert pretraining_learner(config(critic=CriticConfig(pretraining_frozen=("attention",)))).frozen_critic == (
    "attention",
  )
