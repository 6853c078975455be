"""Engines in Ray workers, on a real Ray cluster of this machine: workers die and hang, driver and head are killed."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray

from sao_jax.rollout import EngineThread, EpisodeRequest, TrajectoryQueue, WeightStore
from sao_jax.rollout.ray import weight_transfer
from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.types import Trajectory
from tests.rollout import cluster_engines
from tests.rollout.fakes import assert_logps_true, make_params
from tests.waiting import LONG_S

ROOT = pathlib.Path(__file__).parents[3]
BALLAST = 8 * 2**20
PARAMS = {v: {**make_params(v), "ballast": jnp.full(BALLAST // 4, v, jnp.float32)} for v in range(12)}
ENOUGH = 50_000
"""More episodes than engines finish while another engine starts."""
WAITS = 3_000
"""Number of waits of 0.1 s."""


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
  os.environ.setdefault("RAY_worker_niceness", "0")  # 15 else: a busy machine would leave them nothing
  handler = signal.getsignal(signal.SIGTERM)
  for attempt in range(3):
    try:
      ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        logging_level="error",
      )
      break
    except Exception:  # Ray gives its processes 30 s to start, which a busy machine may need
      ray.shutdown()
      if attempt == 2:
        raise
  yield
  ray.shutdown()
  signal.signal(signal.SIGTERM, handler)  # Ray's ends the process


class Run:
  """A cluster on a thread, `n` episodes, and a queue that raises if one of them ends twice."""

  def __init__(self, make_engine, n: int, **changes):
    self.waiting = [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(n)]
    self.queue = TrajectoryQueue(batch_size=1, group_size=1, max_staleness=100, capacity=n)
    self.weights = WeightStore()
    self.failed: list[int] = []
    config = ClusterConfig(**{"num_engines": 2, "num_cpus": 0.5, "start_timeout_s": 500.0} | changes)
    self.cluster = EngineCluster(make_engine, config, slots_per_engine=cluster_engines.CONFIG.num_slots)
    self.thread = EngineThread(
      self.cluster, weights=self.weights, next_request=self.next_request, emit=self.queue.put, on_failure=self.fail
    )

  def next_request(self) -> EpisodeRequest | None:
    if not self.waiting:
      return None
    self.queue.start(self.waiting[0])
    return self.waiting.pop(0)

  def fail(self, request: EpisodeRequest) -> None:
    self.queue.fail(request)
    self.failed.append(request.episode_id)

  def take(self, n: int) -> list[Trajectory]:
    taken: list[Trajectory] = []
    waits = 0
    while len(taken) < n:
      self.thread.check()
      batch = self.queue.get_batch(0, timeout=0.1)
      taken += batch or []
      waits = 0 if batch else waits + 1
      assert waits < WAITS, f"{len(taken)} of {n} episodes came; {self.cluster.counters}"
    return taken


@contextlib.contextmanager
def running(*arguments, start: bool = True, **changes) -> Iterator[Run]:
  run = Run(*arguments, **changes)
  if start:
    run.weights.publish(PARAMS[0], 0)
    run.thread.start()
  try:
    yield run
  finally:
    run.thread.stop()
    run.cluster.close()


def wait_until(condition: Callable[[], bool]) -> None:
  for _ in range(WAITS):
    if condition():
      return
    time.sleep(0.1)
  raise AssertionError("the condition did not become true")


def process_of(trajectory: Trajectory) -> int | None:
  """Returns the process id of the engine that ran it, from its reward; None if it was truncated."""
  return round(trajectory.total_reward * 4096) or None


def by_id(trajectories: list[Trajectory]) -> list[Trajectory]:
  return sorted(trajectories, key=lambda x: x.episode_id)


def assert_gone(pids: set[int]) -> None:
  found = []
  for pid in pids:
    with contextlib.suppress(psutil.NoSuchProcess):
      found.append(psutil.Process(pid))
  _, alive = psutil.wait_procs(found, timeout=LONG_S)
  assert not alive


def bytes_in_store() -> float:
  """Bytes in the object store as Ray's scheduler sees it, about a second late."""
  return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]


def test_two_engines_sample_what_the_embedded_one_does():
  with running(cluster_engines.make_engine, 32) as run:
    todo, run.waiting = run.waiting, []
    wait_until(lambda: run.thread.check() or sum(bool(x.location) for x in run.cluster._engines) == 2)
    run.waiting = todo  # before, the first one up could have taken all
    done = by_id(run.take(32))
    counters = run.cluster.counters
    pids = {pid for x in done if (pid := process_of(x))}
  assert len(pids) == 2 and os.getpid() not in pids
  assert_gone(pids)
  assert counters["episodes_finished"] == 32 and counters["engine_restarts"] == 0
  assert counters["tokens_generated"] == sum(x.num_actions for x in done)
  assert counters["busy_seconds"] > 0

  # The same seed, the same episodes, the same weights: the same tokens, wherever an episode ran. Since noise belongs to
  # (seed, episode, position), no two episodes of the two engines can have shared any.
  expected = TrajectoryQueue(batch_size=1, group_size=1, max_staleness=0, capacity=32)
  requests = iter([EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(32)])
  store, here = WeightStore(), []
  store.publish(PARAMS[0], 0)

  def next_request():
    request = next(requests, None)
    if request is not None:
      expected.start(request)
    return request

  with cluster_engines.make_engine() as engine:
    thread = EngineThread(engine, weights=store, next_request=next_request, emit=expected.put)
    thread.start()
    while len(here) < 32:
      thread.check()
      here += expected.get_batch(0, timeout=0.1) or []
    thread.stop()
  for a, b in zip(done, by_id(here), strict=True):
    assert a.episode_id == b.episode_id and a.ended == b.ended
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.behavior_logp, b.behavior_logp, atol=1e-5)
    np.testing.assert_array_equal(a.rewards != 0, b.rewards != 0)


def test_weights_in_flight_and_a_killed_engine():
  with running(functools.partial(cluster_engines.make_engine, sleep_s=0.05), ENOUGH) as run:
    done = run.take(8)
    for version in range(1, 6):
      run.weights.publish(PARAMS[version], version)
      done += run.take(4)
    victim = next(pid for x in reversed(done) if (pid := process_of(x)))
    os.kill(victim, signal.SIGKILL)
    for version in range(6, 12):
      run.weights.publish(PARAMS[version], version)
      done += run.take(6)
    while len({process_of(x) for x in done} - {None}) < 3:  # until the new engine has finished an episode
      done += run.take(1)
    n = ENOUGH - len(run.waiting)
    run.waiting = run.waiting[:8]
    n += 8
    done += run.take(n - len(done))
    wait_until(lambda: BALLAST <= bytes_in_store() < 3 * BALLAST)  # the newest version, and perhaps the one before
    # Both have nothing to do now. One dies; what comes next goes to the other, and then to its replacement too.
    idle = next(pid for x in reversed(done) if (pid := process_of(x)))
    os.kill(idle, signal.SIGKILL)
    run.waiting = [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(n, n + 8)]
    n += 8
    done += run.take(8)
    wait_until(lambda: run.cluster.counters["engine_restarts"] == 2)
    counts = run.queue.counters
    counters = run.cluster.counters
    pids = {pid for x in done if (pid := process_of(x))}
  assert sorted(x.episode_id for x in done) == list(range(n))
  assert counts["started"] == counts["finished"] == counts["used"] == n and counts["failed"] == 0
  assert run.queue.running() == [] and run.failed == []
  assert counters["engine_restarts"] == 2 and len(pids) >= 3
  for x in done:
    assert_logps_true(x, PARAMS)
  assert any(x.mixed_versions for x in done)
  assert max(x.versions.max() for x in done) == 11
  assert_gone(pids)


def test_faults_while_weights_are_on_their_way(tmp_path: pathlib.Path, monkeypatch, caplog):
  """Deltas in several groups. An engine dies between two of them; later, one has other weights than it should."""
  monkeypatch.setattr(weight_transfer, "GROUP_BYTES", 2**16)
  ballast = {str(i): jnp.zeros(2**14, jnp.bfloat16) for i in range(6)}
  params = {
    v: {**make_params(v), "ballast": {k: x.at[: 50 * v].set(-0.0) for k, x in ballast.items()}} for v in range(5)
  }
  with running(functools.partial(cluster_engines.make_engine, sleep_s=0.02), ENOUGH, start=False) as run:
    run.cluster._worker_class = ray.remote(cluster_engines.FaultyWorker)
    run.cluster._worker_arguments += (tmp_path,)
    run.weights.publish(params[0], 0)
    run.thread.start()
    engines = run.cluster._engines
    done: list[Trajectory] = []

    def reach(version: int) -> None:
      """Waits until both engines have the version and an episode has tokens of it."""
      while (
        len(engines) < 2
        or not all(x.weights.version == version for x in engines)
        or not any((x.versions == version).any() for x in done)
      ):
        done.extend(run.take(1))

    reach(0)
    for version, fault in ((1, "none"), (2, "die"), (3, "corrupt"), (4, "none")):
      (tmp_path / fault).touch()
      run.weights.publish(params[version], version)
      reach(version)
      counters = run.cluster.counters
      assert counters["engine_restarts"] == int(version >= 2)
      assert counters["weight_checksum_mismatches"] == int(version >= 3)
      # Both engines at first, the restarted one, and the one with wrong weights.
      assert counters["full_weight_transfers"] == 2 + (version >= 2) + (version >= 3)
    n = ENOUGH - len(run.waiting)
    run.waiting = []
    done += run.take(n - len(done))
  assert "the checksum of the weights of version 3 does not match in rollout engine" in caplog.text
  assert sorted(x.episode_id for x in done) == list(range(n)) and not run.failed
  for x in done:
    assert_logps_true(x, params)
  assert {0, 1, 2, 3, 4} == {version for x in done for version in x.versions[x.action_mask].tolist()}
  assert counters["weight_bytes_sent"] < counters["weight_bytes"]


def test_an_engine_that_hangs_is_replaced_and_an_episode_that_kills_its_engines_fails_alone(tmp_path: pathlib.Path):
  make_engine = functools.partial(cluster_engines.make_engine, deadly_task=2, hung=tmp_path / "hung")
  with running(make_engine, 12, num_engines=1, max_restarts=3, silence_timeout_s=20.0) as run:
    done = run.take(11)
    wait_until(lambda: run.failed)
  assert_gone({int((tmp_path / "hung").read_text())})
  assert run.failed == [2]
  assert sorted(x.episode_id for x in done) == [0, 1, *range(3, 12)]
  counters = run.cluster.counters
  assert counters["failed_by_kind"] == {"engine_died": 1} and counters["failed_episodes"] == 1
  assert counters["engine_restarts"] == 3


def error_of(run: Run, kind: type[BaseException]) -> str:
  run.weights.publish(PARAMS[0], 0)
  with pytest.raises(kind) as caught:
    run.cluster.run(run.weights, run.next_request, run.queue.put, threading.Event(), on_failure=run.fail)
  return str(caught.value)


def test_an_exception_in_an_engine_comes_with_its_traceback():
  text = error_of(Run(cluster_engines.raise_on_creation, 5, num_engines=1), OSError)
  assert "no accelerator in this machine" in text and "in raise_on_creation" in text


def test_an_exception_while_generating_comes_with_its_traceback():
  run = Run(cluster_engines.make_engine, 5, num_engines=1)
  run.weights.publish({"no": jnp.zeros(3)}, 0)
  with pytest.raises(KeyError, match="'id'") as caught:
    run.cluster.run(run.weights, run.next_request, run.queue.put, threading.Event())
  assert "in extend" in str(caught.value)


def test_engines_that_keep_dying_end_the_run():
  text = error_of(Run(cluster_engines.die_on_creation, 5, num_engines=1, max_restarts=0), RuntimeError)
  assert "died 1 times in a row" in text and "max_restarts = 0" in text


def test_a_cluster_without_room_says_so():
  run = Run(cluster_engines.make_engine, 5, num_engines=1, num_cpus=64.0, start_timeout_s=0.5)
  text = error_of(run, TimeoutError)
  assert "engine 0 of 1 did not start" in text and "num_cpus = 64.0" in text and "'CPU': 2.0" in text


DRIVER = """
import sys, threading
import psutil
from sao_jax.rollout import EpisodeRequest, WeightStore
from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.ray.config import ClusterConfig
from tests.rollout import cluster_engines
from tests.rollout.fakes import make_params
requests = [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(100_000)]
config = ClusterConfig(address=sys.argv[1], num_engines=1, num_cpus=0.5, head_timeout_s=1.0)
cluster = EngineCluster(cluster_engines.make_engine, config, slots_per_engine=4)
weights = WeightStore()
weights.publish(make_params(0), 0)
heads = [x for x in psutil.Process().children(recursive=True) if "gcs_server" in x.name()]

def emit(trajectory):
  pid = round(trajectory.total_reward * 4096)
  if pid:
    print(pid, flush=True)
    while heads:
      heads.pop().kill()

try:
  cluster.run(weights, lambda: requests.pop() if requests else None, emit, threading.Event())
except ConnectionError as error:
  print(error)
  cluster.close()
"""


def driver(address: str) -> subprocess.Popen[str]:
  """A process with a cluster of one engine; prints the process of the engine once per episode."""
  return subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_the_engines_of_a_killed_driver_end_by_themselves_and_the_cluster_goes_on():
  with driver(ray.get_runtime_context().gcs_address) as process:
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.kill()
  assert_gone({pid})
  wait_until(lambda: ray.available_resources().get("CPU") == 2.0)


def test_a_head_that_is_killed_ends_the_run_before_ray_ends_the_process():
  """The driver starts a Ray of its own, and kills its head when the first episode is there."""
  with driver("local") as process:
    output, _ = process.communicate(timeout=500)
  *pids, message = output.splitlines()
  assert re.fullmatch(r"the head of the Ray cluster, .* was unreachable for 1\.0 s .*: .*", message)
  assert process.returncode == 0
  assert_gone(set(map(int, pids)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_engines": -1}, "num_engines must be >= 0; received -1"),
    ({"resources": {"TPU": -4.0}}, "TPU must be finite and >= 0; received -4"),
    ({"start_timeout_s": 0.0}, "start_timeout_s must be > 0; received 0"),
    ({"silence_timeout_s": -1.0}, "silence_timeout_s must be > 0; received -1"),
    ({"num_engines": 0}, "num_engines must be >= 1 for a cluster; received 0"),
  ],
)
def test_bad_settings(changes, message):
  with pytest.raises(ValueError, match=message):
    Run(cluster_engines.make_engine, 1, **changes)
