"""The whole loop with two engines in Ray actors, on a Ray that the run starts and ends by itself."""

from __future__ import annotations

import dataclasses
import pathlib
import signal

import psutil
import pytest

from sao_jax.io.metrics import read_metrics
from sao_jax.learner import learner_config
from sao_jax.models import ModelConfig
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.training import loop
from sao_jax.training.components import Components
from sao_jax.training.config import CriticConfig, WarmStartConfig
from tests.parallel.processes import finish, launches, start
from tests.tiny_domain import VOCABULARY, tiny_domain
from tests.training.loop_test import LEARNER, tiny_config


def test_a_run_with_two_engines(tmp_path: pathlib.Path) -> None:
  before = {process.pid for process in psutil.Process().children(recursive=True)}
  handler = signal.getsignal(signal.SIGTERM)
  config = tiny_config(
    schedule="async",
    num_steps=3,
    eval_episodes=0,
    warm_start=WarmStartConfig(),
    critic=CriticConfig(),
    algorithm="reinforce",  # no critic: the quickest to compile
    learner=learner_config("reinforce", eps_low=0.3, eps_high=5.0, **LEARNER),
    policy=ModelConfig(
      model_type="llama",
      vocab_size=len(VOCABULARY),
      hidden_size=16,
      num_layers=1,
      num_heads=1,
      num_kv_heads=1,
      head_dim=16,
      intermediate_size=16,
    ),
    engine=dataclasses.replace(tiny_config().engine, env_workers=4, env_timeout_s=30.0),
    cluster=ClusterConfig(num_engines=2, num_cpus=0.5, address="local"),
  )
  summary = loop.train(config, tiny_domain(), tmp_path, make_domain=tiny_domain)
  assert summary is not None and summary["failed_episodes"] == 0
  rows, _ = read_metrics(tmp_path)
  assert [row["step"] for row in rows] == [1, 2, 3]
  for row in rows:
    assert row["trajectories"] == 16 and row["staleness_max"] <= config.max_staleness
    assert row["rollout_tokens_per_s"] >= 0 and row["engine_busy_fraction"] >= 0
  assert sum(row["rollout_tokens_per_s"] for row in rows) > 0 and sum(row["engine_busy_fraction"] for row in rows) > 0
  # At version 0 the two sides agree on every log-prob: what came back is what the policy gives.
  assert abs(rows[0]["ratio_mean"] - 1) < 1e-5
  # Ray is gone, and so is its handler of signals.
  left = [x for x in psutil.Process().children(recursive=True) if x.pid not in before]
  assert not psutil.wait_procs(left, timeout=120)[1]
  assert signal.getsignal(signal.SIGTERM) == handler


def test_a_learner_of_two_processes_with_two_engines_on_meshes(tmp_path: pathlib.Path) -> None:
  """Each process has two of the four devices, and sends the shards on them; each engine has two devices."""
  with launches() as both:
    running = [
      start("tests.training.ray_program", str(tmp_path), "data=2,fsdp=2", devices=2, **environment)
      for environment in both
    ]
    results = [finish(process, 500.0) for process in running]
  rows, _ = read_metrics(tmp_path)
  assert [row["step"] for row in rows] == [1, 2, 3] and all(row["trajectories"] == 16 for row in rows)
  # At version 0 every log-prob of the engines is that of the learner: they have all shards, each in its place.
  assert abs(rows[0]["ratio_mean"] - 1) < 1e-5 and rows[0]["dis_masked_fraction"] == 0
  for result in results:
    assert result["processes"] == 2 and not result["embedded"]
    assert result["summary"] == results[0]["summary"] and result["summary"]["failed_episodes"] == 0
    counters = result["counters"]
    assert counters["weight_checksum_mismatches"] == 0 and counters["engine_restarts"] == 0
    assert counters["weight_transfers"] >= 1 and counters["tokens_generated"] > 0


def test_a_cluster_needs_a_way_to_make_domains() -> None:
  config = tiny_config(
    schedule="async", warm_start=WarmStartConfig(), critic=CriticConfig(), cluster=ClusterConfig(num_engines=1)
  )
  with pytest.raises(ValueError, match="needs make_domain"):
    Components(config, tiny_domain())


def test_a_cluster_is_for_the_async_schedule_and_for_embedded_engines() -> None:
  with pytest.raises(ValueError, match=r"cluster.num_engines must be 0 unless async; received 2"):
    tiny_config(schedule="sync", cluster=ClusterConfig(num_engines=2))
  remote = RemoteConfig(url="http://127.0.0.1:1", weights_dir="/tmp")
  with pytest.raises(ValueError, match=r"cluster.num_engines must be 0 with a remote.url; received 2"):
    tiny_config(schedule="async", remote=remote, cluster=ClusterConfig(num_engines=2))
