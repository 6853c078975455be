"""The whole loop on a tiny task: schedules, resume, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import threading
from typing import Any

import jax
import numpy as np
import pytest

from sao_jax.io import metric_table
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.metrics import read_metrics
from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig
from sao_jax.training import evaluation, loop, run_state, stages
from sao_jax.training.components import Components
from sao_jax.training.config import MAY_DIFFER, CheckpointConfig, CriticConfig, RunConfig, WarmStartConfig, to_json
from tests.bare_run import bare, busy_domain
from tests.models.tiny import indexed
from tests.tiny_domain import VOCABULARY, tiny_domain

TIMES = ("time_s", "rollout_tokens_per_s", "learner_busy_fraction", "engine_busy_fraction", "eval_seconds")
LEARNER: dict[str, Any] = {
  "policy_optimizer": OptimizerConfig(learning_rate=1e-3),
  "critic_optimizer": OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
  "row_length": 32,
  "rows_per_microbatch": 4,
  "min_microbatches": 4,
}
# For tests of the last stage alone: its first policy is random, its first critic the policy's copy.
NO_STAGES: dict[str, Any] = {"warm_start": WarmStartConfig(), "critic": CriticConfig()}


def tiny_config(**changes: Any) -> RunConfig:
  base: dict[str, Any] = {
    "schedule": "sync",
    "num_steps": 4,
    "batch_size": 16,
    "eval_episodes": 20,
    "policy": ModelConfig(
      model_type="qwen3_moe",
      vocab_size=len(VOCABULARY),
      hidden_size=16,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      intermediate_size=32,
      num_experts=2,
      num_experts_per_tok=1,
      moe_intermediate_size=16,
      init_std=0.25,
    ),
    "warm_start": WarmStartConfig(num_steps=30, batch_size=32, optimizer=OptimizerConfig(learning_rate=1e-2)),
    "critic": CriticConfig(pretraining_trajectories=32, pretraining_epochs=1),
    "learner": learner_config("sao", eps_low=0.3, eps_high=5.0, **LEARNER),
    "engine": EngineConfig(
      num_slots=8,
      max_len=32,
      max_action_tokens=6,
      max_turns=4,
      chunk_steps=4,
      token_budget=32,
      env_workers=0,
      env_timeout_s=None,
    ),
    "checkpoint": CheckpointConfig(every_steps=2),
  }
  return RunConfig(**{**base, **changes})


@pytest.fixture(scope="module")
def stages_done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A workdir in which the first two stages have been run; tests copy what they need of it."""
  workdir = tmp_path_factory.mktemp("stages")
  assert loop.train(tiny_config(), tiny_domain(), workdir, run_stages=("warm_start", "value_pretraining")) is None
  return workdir


def without_times(workdir: pathlib.Path) -> list[dict[str, Any]]:
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def final_params(config: RunConfig, workdir: pathlib.Path) -> Any:
  with (
    Components(config, tiny_domain()) as parts,
    Checkpointer(workdir, config=to_json(config), read_only=True, may_differ=MAY_DIFFER) as checkpointer,
  ):
    restored = checkpointer.restore(run_state.checkpoint_template(parts))
  assert restored is not None and restored.step == config.num_steps
  return jax.tree.map(np.asarray, restored.state["learner"])


def test_sync_is_on_policy(tmp_path: pathlib.Path) -> None:
  summary = loop.train(tiny_config(), tiny_domain(), tmp_path)
  assert summary is not None and summary["num_steps"] == 4 and summary["n"] == 20
  rows, evaluations = read_metrics(tmp_path)
  assert [row["step"] for row in rows] == [1, 2, 3, 4] and [row["step"] for row in evaluations] == [0, 4]
  for row in rows:
    assert row["trajectories"] == 16 and row["staleness_max"] == 0 and row["mixed_version_fraction"] == 0
    assert row["dis_masked_fraction"] == 0
    assert abs(row["ratio_mean"] - 1) < 1e-5
  assert any(row["policy_grad_norm"] > 0 for row in rows)
  assert json.loads((tmp_path / "summary.json").read_text()) == summary
  assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 16


def test_a_model_of_sparse_latent_attention_trains_and_resumes(tmp_path: pathlib.Path) -> None:
  """All stages of a GLM-5-like policy, whose engine attends to chosen tokens over a cache of latents."""
  policy = indexed(vocab_size=len(VOCABULARY), num_layers=2, indexer_types=("full", "shared"), init_std=0.25)
  config = tiny_config(policy=policy, num_steps=2, checkpoint=CheckpointConfig(every_steps=1))
  loop.train(config, tiny_domain(), tmp_path)
  summary = loop.train(dataclasses.replace(config, num_steps=3), tiny_domain(), tmp_path)
  assert summary is not None and summary["failed_episodes"] == 0
  rows, _ = read_metrics(tmp_path)
  assert [row["step"] for row in rows] == [1, 2, 3]
  for row in rows:
    assert row["dis_masked_fraction"] == 0 and abs(row["ratio_mean"] - 1) < 1e-5 and row["logprob_error"] < 1e-5
  assert any(row["policy_grad_norm"] > 0 for row in rows)


def test_value_pretraining_keeps_what_it_reached(stages_done: pathlib.Path) -> None:
  with Components(tiny_config(), tiny_domain()) as parts:
    facts = stages.stage_facts(parts, stages_done)["value_pretraining"]
  # One in eight of 32 trajectories is held out; the others make one batch of 16.
  assert (facts["held_out_trajectories"], facts["updates"]) == (4, 1)
  assert facts["explained_variance"] is None or facts["explained_variance"] < 1.0


@pytest.mark.parametrize("schedule", ["lagged", "async"])
def test_evaluations_during_rl_are_of_the_newest_weights(
  schedule: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  seen: list[set[int]] = []
  result_of = evaluation.result_of

  def noted(trajectories: Any, *arguments: Any) -> evaluation.Evaluation:
    done = list(trajectories)
    seen.append({int(v) for x in done for v in x.versions[x.action_mask]})
    assert sorted(x.task_index for x in done) == sorted(50 + i % 20 for i in range(24))
    return result_of(done, *arguments)

  monkeypatch.setattr(evaluation, "result_of", noted)
  changes: dict[str, Any] = {"schedule": schedule, "eval_episodes": 24}
  if schedule == "lagged":
    changes |= {"lag": 2, "lag_switch_chunks": 1}
  loop.train(bare(**changes, eval_every_steps=2), busy_domain(), tmp_path / "with")
  rows, evaluations = read_metrics(tmp_path / "with")
  assert [row["step"] for row in evaluations] == [0, 2, 4, 6] and seen == [{0}, {2}, {4}, {6}]
  assert all(row["eval_low"] <= row["eval_success_rate"] <= row["eval_high"] for row in evaluations)
  assert all(0.0 < row["observation_fraction"] < 1.0 for row in rows)
  if schedule == "lagged":  # where training is repeatable, evaluations change nothing in it
    loop.train(bare(**changes), busy_domain(), tmp_path / "without")
    assert [row for row in without_times(tmp_path / "without") if "eval_n" not in row] == [
      row for row in without_times(tmp_path / "with") if "eval_n" not in row
    ]


@pytest.mark.parametrize("schedule", ["sync", "lagged"])
def test_a_resumed_run_ends_like_one_that_was_never_stopped(schedule: str, tmp_path: pathlib.Path) -> None:
  changes: dict[str, Any] = {"schedule": schedule}
  if schedule == "lagged":
    regularized = dataclasses.replace(tiny_config().learner, kl_coef=0.1, entropy_coef=0.01)
    changes |= {"lag": 2, "lag_switch_chunks": 1, "learner": regularized}
  whole, stopped = tmp_path / "whole", tmp_path / "stopped"
  config = tiny_config(**changes)
  loop.train(config, tiny_domain(), whole)
  loop.train(dataclasses.replace(config, num_steps=2, eval_episodes=0), tiny_domain(), stopped)
  loop.train(dataclasses.replace(config, eval_episodes=0), tiny_domain(), stopped)
  learner_rows = [row for row in without_times(whole) if "eval_n" not in row]
  assert learner_rows == without_times(stopped)
  jax.tree.map(np.testing.assert_array_equal, final_params(config, whole), final_params(config, stopped))
  if schedule == "lagged":
    kl = [row["reference_kl"] for row in learner_rows]
    assert kl[0] < 1e-9 and min(kl[1:]) > 1e-6 and metric_table.find("reference_kl") is not None
    with (  # the reference is the result of the warm start
      Components(config, tiny_domain()) as parts,
      stages.stage_checkpointer(parts, whole, "warm_start", read_only=True) as checkpointer,
    ):
      warm = checkpointer.restore(parts.state_shapes().policy)
    assert warm is not None
    jax.tree.map(np.testing.assert_array_equal, final_params(config, whole).reference, warm.state)
  else:
    assert final_params(config, whole).reference is None and "reference_kl" not in learner_rows[0]
  if schedule == "lagged":
    assert [row["staleness_max"] for row in learner_rows] == [0, 1, 2, 2]
    assert learner_rows[-1]["mixed_version_fraction"] > 0
  with pytest.raises(ValueError, match=r"num_steps must be at least 4, the step .* received 3"):
    loop.train(dataclasses.replace(config, num_steps=3, eval_episodes=0), tiny_domain(), stopped)


def test_lagged_runs_repeat_bit_for_bit(tmp_path: pathlib.Path) -> None:
  config = tiny_config(schedule="lagged", lag=1, num_steps=3, eval_episodes=0)
  for name in ("a", "b"):
    loop.train(config, tiny_domain(), tmp_path / name)
  assert without_times(tmp_path / "a") == without_times(tmp_path / "b")


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_async_bounds_staleness_and_counts(max_staleness: int, tmp_path: pathlib.Path) -> None:
  engine = dataclasses.replace(tiny_config().engine, env_workers=4, env_timeout_s=30.0)
  config = tiny_config(schedule="async", max_staleness=max_staleness, engine=engine, num_steps=5, **NO_STAGES)
  summary = loop.train(config, tiny_domain(sleep_s=0.002), tmp_path)
  rows, _ = read_metrics(tmp_path)
  assert summary is not None and summary["failed_episodes"] == 0
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
  assert all(row["trajectories"] == 16 and row["staleness_max"] <= max_staleness for row in rows)


def test_async_overlaps_engine_and_learner(tmp_path: pathlib.Path) -> None:
  engine = dataclasses.replace(tiny_config().engine, env_workers=8, env_timeout_s=30.0, chunk_steps=1)
  config = tiny_config(
    schedule="async", max_staleness=8, queue_capacity=1_000, engine=engine, num_steps=12, eval_episodes=0, **NO_STAGES
  )
  loop.train(config, tiny_domain(sleep_s=0.02), tmp_path)
  rows, _ = read_metrics(tmp_path)
  assert max(row["mixed_version_fraction"] for row in rows) > 0
  assert max(row["staleness_mean"] for row in rows) > 0


def test_group_methods_get_whole_groups(tmp_path: pathlib.Path) -> None:
  config = tiny_config(
    algorithm="grpo_dis", group_size=4, learner=learner_config("grpo_dis", **LEARNER), num_steps=2, eval_episodes=0
  )
  loop.train(config, tiny_domain(), tmp_path)
  rows, _ = read_metrics(tmp_path)
  assert [row["trajectories"] for row in rows] == [16, 16]
  assert np.isnan(rows[0]["value_loss"])


def test_a_stage_with_a_result_is_not_run_again(stages_done: pathlib.Path) -> None:
  result = stages_done / "stages" / "warm_start" / "checkpoints" / "30"
  before = result.stat().st_mtime_ns
  loop.train(tiny_config(), tiny_domain(), stages_done, run_stages=("value_pretraining",))
  assert result.stat().st_mtime_ns == before


def test_a_later_stage_needs_the_earlier_ones(tmp_path: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="stage 'warm_start' has no result"):
    loop.train(tiny_config(), tiny_domain(), tmp_path, run_stages=("rl",))
  without = tiny_config(warm_start=WarmStartConfig())  # a stage of no steps needs no run
  with pytest.raises(ValueError, match="stage 'value_pretraining' has no result"):
    loop.train(without, tiny_domain(), tmp_path / "without", run_stages=("rl",))


def test_a_workdir_of_another_config_is_refused(stages_done: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="batch_size: recorded 16, now 32"):
    loop.train(tiny_config(batch_size=32), tiny_domain(), stages_done)


def test_a_signal_saves_and_ends_and_the_next_run_goes_on(tmp_path: pathlib.Path) -> None:
  checkpoint = CheckpointConfig(every_steps=1_000)
  config = tiny_config(num_steps=1_000, eval_episodes=0, checkpoint=checkpoint, **NO_STAGES)
  path = tmp_path / "metrics.jsonl"

  def send_when_running() -> None:
    while not path.exists() or path.read_text().count("\n") < 2:
      if done.wait(0.01):
        return
    os.kill(os.getpid(), signal.SIGTERM)

  done = threading.Event()
  thread = threading.Thread(target=send_when_running)
  thread.start()
  try:
    assert loop.train(config, tiny_domain(), tmp_path) is None
  finally:
    done.set()
    thread.join()
  stopped_at = len(read_metrics(tmp_path)[0])
  assert 2 <= stopped_at < 1_000
  summary = loop.train(dataclasses.replace(config, num_steps=stopped_at + 1), tiny_domain(), tmp_path)
  assert summary is not None and len(read_metrics(tmp_path)[0]) == stopped_at + 1


def test_one_task_is_enough_and_none_is_refused(tmp_path: pathlib.Path) -> None:
  one = dataclasses.replace(busy_domain(), num_train_tasks=1, num_eval_tasks=1)
  assert loop.train(bare(num_steps=2, eval_episodes=4), one, tmp_path) is not None
  rows, evaluations = read_metrics(tmp_path)
  assert [row["trajectories"] for row in rows] == [16, 16] and [row["eval_n"] for row in evaluations] == [4, 4]
  for name in ("num_train_tasks", "num_eval_tasks"):
    with pytest.raises(ValueError, match=f"Domain.{name} must be >= 1; received 0"):
      loop.train(bare(eval_episodes=4), dataclasses.replace(busy_domain(), **{name: 0}), tmp_path / name)


def test_an_engine_that_breaks_surfaces_in_the_loop(tmp_path: pathlib.Path) -> None:
  domain = tiny_domain()

  def broken(split: Any) -> Any:
    raise OSError("no environment to be had")

  engine = dataclasses.replace(tiny_config().engine, env_workers=2, env_timeout_s=5.0)
  config = tiny_config(schedule="async", engine=engine, eval_episodes=0, **NO_STAGES)
  with pytest.raises((OSError, RuntimeError)):
    loop.train(config, dataclasses.replace(domain, make_env=broken), tmp_path)
