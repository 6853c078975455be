"""Skipped updates: their batches are kept and explained, too many end the run; a critic that diverges is reported."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import pathlib
import re
import types
from typing import Any

import jax
import numpy as np
import pytest

from sao_jax.io import bad_batches
from sao_jax.io.metrics import read_metrics
from sao_jax.learner import init_state, make_diagnosis
from sao_jax.rollout import TooManyFailuresError
from sao_jax.training import health, loop
from sao_jax.training.components import Components
from sao_jax.training.config import CheckpointConfig, WarmStartConfig
from sao_jax.training.health import HealthCheck, RunStoppedError
from sao_jax.types import Step
from tests.bare_run import BusyEnv, bare, busy_domain
from tests.learner import tiny
from tests.learner.update_test import make_config
from tests.training.loop_test import final_params, without_times
from tests.training.signals_test import pretraining


def poison(monkeypatch: Any, calls: set[int]) -> None:
  """Makes the advantages of the n-th packed batches overflow the gradient's norm."""
  original = Components.pack
  count = 0

  def pack(self: Components, trajectories: Any) -> Any:
    nonlocal count
    count += 1
    batch, stats = original(self, trajectories)
    if count in calls:
      batch = batch.replace(baseline_adv=np.full_like(batch.baseline_adv, 1e30))
    return batch, stats

  monkeypatch.setattr(Components, "pack", pack)


def test_skipped_batches_are_kept_and_many_in_a_row_end_the_run_saved(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  """In a workdir that is named from the working directory, which the environments change."""
  elsewhere, workdir = tmp_path / "elsewhere", tmp_path / "run"
  elsewhere.mkdir()

  class Wanders(BusyEnv):
    def reset(self, task_index: int) -> str:
      os.chdir(elsewhere)
      return super().reset(task_index)

  config = bare(num_steps=6, max_skipped_in_a_row=2)
  monkeypatch.chdir(tmp_path)
  with monkeypatch.context() as patch:
    poison(patch, {2, 4, 5})
    with pytest.raises(RunStoppedError, match=r"last 2 learner steps skipped .*bad_batches/5\.json"):
      loop.train(config, busy_domain(Wanders), "run")
  rows, _ = read_metrics(workdir)
  assert [row["skipped_in_a_row"] for row in rows] == [0, 1, 0, 1, 2]
  assert bad_batches.steps(workdir) == [2, 4, 5]
  report, trajectories = bad_batches.read(workdir, 4)
  assert len(trajectories) == 16 and report["step"] == 4 and report["metrics"]["policy_grad_norm"] == "inf"
  assert report["trajectories"] == [] and report["nonfinite"] == ["only sums over the whole batch"]
  # Saved at step 5; whoever resumes has seen the error, and the run goes on.
  monkeypatch.chdir(tmp_path)
  assert loop.train(config, busy_domain(Wanders), "run") is not None
  rows, _ = read_metrics(workdir)
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["skipped_in_a_row"] == 0
  assert (workdir / "summary.json").exists()
  assert pathlib.Path.cwd() == elsewhere and list(elsewhere.iterdir()) == []


def test_an_engine_with_other_log_probs_ends_the_run_saved(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  """From the third batch on, log-probs of another temperature, say: all are too low by 0.1."""
  original = Components.pack
  count = 0

  def pack(self: Components, trajectories: Any) -> Any:
    nonlocal count
    count += 1
    batch, stats = original(self, trajectories)
    return batch.replace(behavior_logp=batch.behavior_logp - np.float32(0.1 * (count >= 3))), stats

  monkeypatch.setattr(Components, "pack", pack)
  with pytest.raises(RunStoppedError, match=r"same weights: by 0\.1, 0\.1 on average .* 0\.005 \(max_logprob_error\)"):
    loop.train(bare(num_steps=6), busy_domain(), tmp_path)
  rows, _ = read_metrics(tmp_path)
  errors = [row["logprob_error"] for row in rows]
  np.testing.assert_allclose(errors, [0, 0, 0.1, 0.1], atol=1e-4)
  assert all(row["logprob_error_tokens"] == row["action_tokens"] for row in rows)  # a synchronous schedule
  assert (tmp_path / "checkpoints/4").is_dir()


@pytest.mark.parametrize(
  ("errors", "tokens", "settings", "stops"),
  [
    ([0.2, 0.2], 32, {}, True),
    ([0.2, 0.001, 0.2], 32, {}, False),
    ([0.2, 0.2, 0.2], 31, {}, False),
    ([0.2, 0.2], 32, {"schedule": "async"}, False),  # keys and values of older weights may be kept
    ([0.3, 0.3], 32, {"schedule": "async"}, True),
    ([0.2, 0.2], 32, {"max_logprob_error": 0.3}, False),
    ([9.0, 9.0], 32, {"max_logprob_error": 0.0}, False),
  ],
)
def test_two_steps_in_a_row_with_enough_tokens_decide(
  errors: list[float], tokens: int, settings: dict[str, Any], stops: bool
) -> None:
  guard = HealthCheck(types.SimpleNamespace(config=bare(**settings)), pathlib.Path())  # type: ignore[arg-type]
  report = {"skipped_policy_nonfinite": 0, "skipped_critic_nonfinite": 0, "returns_square_mean": 0, "value_loss": 0}
  for step, error in enumerate(errors, start=1):
    guard.record(step, None, [], {**report, "logprob_error": error, "logprob_error_tokens": tokens})  # type: ignore[arg-type]
  assert guard.must_stop == stops


def test_the_stages_before_rl_stop_too(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  """Parameters that are not finite from the start: no update of either stage can be done."""
  config = bare(max_skipped_in_a_row=3, warm_start=WarmStartConfig(num_steps=9, batch_size=4, log_every=2))
  original = Components.init_policy
  with monkeypatch.context() as patch:
    patch.setattr(Components, "init_policy", lambda self: jax.tree.map(lambda x: x * np.nan, original(self)))
    with pytest.raises(
      RunStoppedError, match=r"last 4 updates of the warm start were skipped.*max_skipped_in_a_row = 3"
    ):
      loop.train(config, busy_domain(), tmp_path / "warm")
  assert (tmp_path / "warm/stages/warm_start/partial/checkpoints/4").is_dir()

  config = pretraining(max_skipped_in_a_row=3)
  workdir = tmp_path / "values"
  original_critic = Components.init_critic
  with monkeypatch.context() as patch:
    patch.setattr(Components, "init_critic", lambda *args: jax.tree.map(lambda x: x * np.nan, original_critic(*args)))
    patch.setattr(
      health, "make_diagnosis", lambda *_: lambda state, batch: [["value"]] * len(batch)
    )  # has its own test
    with pytest.raises(RunStoppedError, match=r"last 3 learner steps .*/value_pretraining/bad_batches/3\.json"):
      loop.train(config, busy_domain(), workdir, run_stages=("warm_start", "value_pretraining"))
  folder = workdir / "stages/value_pretraining"
  assert bad_batches.steps(folder) == [1, 2, 3] and (folder / "partial/checkpoints/3").is_dir()
  report, trajectories = bad_batches.read(folder, 3)
  assert len(trajectories) == 16 and report["nonfinite"] == ["value"]


def test_too_many_failed_episodes_end_the_run_saved(tmp_path: pathlib.Path) -> None:
  left = [100]

  class Fails(BusyEnv):
    def reset(self, task_index: int) -> str:
      left[0] -= 1
      if left[0] < 0:
        raise ConnectionError("the tool server is down")
      return super().reset(task_index)

  config = bare(num_steps=8, checkpoint=CheckpointConfig(every_steps=5))
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  loop.train(config, busy_domain(), whole)
  with pytest.raises(TooManyFailuresError, match="the tool server is down"):
    loop.train(config, busy_domain(Fails), stopped)
  assert (stopped / "checkpoints/6").is_dir()  # 100 resets are 6 batches of 16 and a part
  loop.train(config, busy_domain(), stopped)
  rows = [[{**row, "failed_episodes": 0} for row in without_times(path)] for path in (stopped, whole)]
  assert rows[0] == rows[1]
  jax.tree.map(np.testing.assert_array_equal, final_params(config, stopped), final_params(config, whole))


class Broken(BusyEnv):
  def step(self, action: str) -> Step:
    raise NameError("a reward function that never works")


def test_a_short_run_in_which_every_step_fails_ends_with_an_error(tmp_path: pathlib.Path) -> None:
  """Too short for the engine, whose other episodes are cut in their first action: those are trained on."""
  config = bare(num_steps=1)
  told = r"^(\d+) of \1 episodes of RL .* failed\. The policy is saved.*step_error"
  with pytest.raises(TooManyFailuresError, match=told):
    loop.train(config, busy_domain(Broken), tmp_path)
  assert (tmp_path / "checkpoints/1").is_dir() and not (tmp_path / "summary.json").exists()
  assert loop.train(config, busy_domain(), tmp_path) is not None  # the failures of an earlier command are not counted


def test_value_pretraining_needs_most_of_its_episodes(tmp_path: pathlib.Path, capsys: Any) -> None:
  class Sometimes(BusyEnv):
    def reset(self, task_index: int) -> str:
      if task_index % 4 == 0:
        raise ConnectionError("the tool server is down")
      return super().reset(task_index)

  engine = dataclasses.replace(bare().engine, max_failed_share=0.1)
  config = pretraining(engine=engine)
  with pytest.raises(TooManyFailuresError, match=r"of \d+ episodes for value pretraining .*failed.*reset_error"):
    loop.train(config, busy_domain(Sometimes), tmp_path, run_stages=("warm_start", "value_pretraining"))
  assert re.search(r"initial trajectories  32/32 .* \d+ failed\n", capsys.readouterr().out)
  assert not list(tmp_path.glob("stages/value_pretraining/partial/initial_trajectories.safetensors"))


def test_value_pretraining_ends_when_every_step_fails(tmp_path: pathlib.Path) -> None:
  """Episodes that are cut in their first action, which are most, do not hide it."""
  config = pretraining()
  engine = dataclasses.replace(config.engine, max_action_tokens=1)
  critic = dataclasses.replace(config.critic, pretraining_trajectories=24)
  told = r"^(\d+) of \1 episodes for value pretraining .* failed\..*step_error"
  with pytest.raises(TooManyFailuresError, match=told):
    loop.train(
      dataclasses.replace(config, engine=engine, critic=critic), busy_domain(Broken), tmp_path,
      run_stages=("warm_start", "value_pretraining"),
    )  # fmt: skip


def test_what_is_not_finite_is_found_in_its_trajectories() -> None:
  config = make_config()
  policy, critic = tiny.init(1), tiny.init(2, value=True)
  batch = [tiny.trajectory([0, 0, 1, 1], index=i, seed=i, reward=0.5) for i in range(3)]
  tokens = [np.array([5, 5, 5, 6], np.int32), np.array([5, 5, 7, 5], np.int32), np.array([5, 5, 6, 6], np.int32)]
  batch = [dataclasses.replace(x, tokens=t) for x, t in zip(batch, tokens, strict=True)]
  state = init_state(config, policy, critic)
  find = make_diagnosis(config, tiny.policy_apply, tiny.value_apply)
  assert find(state, batch) == [[], [], []]

  broken = policy["embed"]["embedding"].at[7].set(np.nan)
  bad_policy = {**policy, "embed": {"embedding": broken}}
  found = find(state._replace(policy=bad_policy), batch)
  assert found == [[], ["logp", "policy_gradient", "policy_loss", "ratio"], []]

  bad_critic = {**critic, "embed": {"embedding": critic["embed"]["embedding"].at[7].set(np.inf)}}
  found = find(state._replace(critic=bad_critic), batch)
  assert found[0] == found[2] == [] and {"value", "advantage", "value_loss", "critic_gradient"} <= set(found[1])

  huge = dataclasses.replace(batch[2], rewards=np.array([0, 0, 0, 1e30], np.float32))
  found = find(state, [*batch[:2], huge])
  assert found[:2] == [[], []] and found[2] == ["critic_gradient", "policy_gradient", "value_loss"]


def guard_of(limit: int = 3) -> HealthCheck:
  parts = types.SimpleNamespace(config=types.SimpleNamespace(max_skipped_in_a_row=limit))
  return HealthCheck(parts, pathlib.Path())  # type: ignore[arg-type]


def feed(guard: HealthCheck, errors: list[float], square: float = 0.5, first: int = 1) -> list[float]:
  report = {"skipped_policy_nonfinite": 0, "skipped_critic_nonfinite": 0, "returns_square_mean": square}
  rows = [
    guard.record(first + i, None, [], {**report, "value_loss": error})  # type: ignore[arg-type]
    for i, error in enumerate(errors)
  ]
  return [row["critic_error_ratio"] for row in rows]


def test_a_critic_that_diverges_is_reported_once_and_again_after_it_recovered(caplog: Any) -> None:
  guard = guard_of()
  with caplog.at_level(logging.WARNING):
    ratios = feed(guard, [0.5] * 8)
    assert all(math.isnan(x) for x in ratios[:7]) and ratios[7] == 1.0
    # Solved tasks: returns vary little, errors are small; nothing diverges.
    assert feed(guard, [1e-3] * 16, square=1e-6)[-1] == pytest.approx(2e-3)
    assert not caplog.records
    ratios = feed(guard, [10.0] * 8, first=25)
    assert ratios[-1] == 20.0
    assert caplog.records[0].getMessage().startswith("The critic diverges: at step 26 ")
    assert len(caplog.records) == 1
    other = guard_of()
    other.restore(guard.state())
    assert feed(other, [0.5] * 16)[-1] == 1.0 and len(caplog.records) == 1
    feed(other, [10.0] * 16)
    assert len(caplog.records) == 2


def test_without_a_critic_or_without_rewards_there_is_nothing_to_judge() -> None:
  assert all(math.isnan(x) for x in feed(guard_of(), [math.nan] * 20))
  assert all(math.isnan(x) for x in feed(guard_of(), [0.1] * 20, square=0.0))


def test_one_process_of_several_keeps_the_batches(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  poison(monkeypatch, {2})
  monkeypatch.setattr(health, "is_main_process", lambda: False)
  loop.train(bare(num_steps=2), busy_domain(), tmp_path)
  assert read_metrics(tmp_path)[0][1]["skipped_in_a_row"] == 1 and bad_batches.steps(tmp_path) == []
