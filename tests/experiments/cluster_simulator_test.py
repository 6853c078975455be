"""The simulator agrees with closed forms for constant episodes and keeps its invariants for random ones."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.simulator import simulator, workload

DECODE_S, TOOL_S, TRAIN_S, TRANSFER_S = 8.0, 2.0, 4.0, 1.0


@dataclasses.dataclass
class Constant:
  """Makes episodes with 8 s of decoding and 2 s of waiting."""

  def draw(self, rng: np.random.Generator) -> workload.Episode:
    return workload.Episode(tokens=80, turns=4, waits_s=(TOOL_S,))


@dataclasses.dataclass
class Alternating:
  """Every fourth episode takes 50 s, the others 10 s."""

  count: int = 0

  def draw(self, rng: np.random.Generator) -> workload.Episode:
    self.count += 1
    return workload.Episode(tokens=80, turns=4, waits_s=(42.0 if self.count % 4 == 1 else TOOL_S,))


def make(**changes) -> simulator.ClusterConfig:
  fields = {
    "schedule": "async", "num_engines": 4, "slots": 2, "token_s": 0.05, "turn_s": 1.0, "batch_size": 8, "group_size": 4,
    "train_s": TRAIN_S, "max_staleness": 100,
  }  # fmt: skip
  return simulator.ClusterConfig(**fields | changes)


def run(config, episodes=None, **options):
  return simulator.simulate(config, episodes or Constant(), **{"num_steps": 20, "warmup_steps": 10} | options)


@pytest.mark.parametrize(("slots", "rounds"), [(2, 1), (1, 2)])
def test_sync_is_rounds_of_generation_then_training_then_transfer(slots, rounds):
  result = run(make(schedule="sync", slots=slots, transfer_s=TRANSFER_S))
  step = rounds * (DECODE_S + TOOL_S) + TRAIN_S + TRANSFER_S
  assert result.steps_per_s == pytest.approx(1 / step)
  assert result.trajectories_per_s == pytest.approx(8 / step)
  assert result.tokens_per_s == pytest.approx(8 * 80 / step)
  assert result.trainer_utilisation == pytest.approx(TRAIN_S / step)
  assert result.slot_utilisation == pytest.approx(8 * DECODE_S / (4 * slots * step))
  assert result.staleness == {0: 160} and result.dropped == 0


def test_async_is_as_fast_as_its_slower_side():
  rollout_bound = run(make())
  assert rollout_bound.steps_per_s == pytest.approx(1 / 10)
  assert rollout_bound.slot_utilisation == pytest.approx(0.8)
  assert rollout_bound.trainer_utilisation == pytest.approx(0.4)
  trainer_bound = run(make(train_s=25.0, max_staleness=2))
  assert trainer_bound.steps_per_s == pytest.approx(1 / 25)
  assert trainer_bound.trainer_utilisation == pytest.approx(1.0)
  assert max(trainer_bound.staleness) == 2 and trainer_bound.dropped == 0


def test_trainer_time_can_depend_on_tokens():
  assert run(make(train_s=1.0, train_token_s=0.03)).steps_per_s == pytest.approx(1 / (1.0 + 0.03 * 640))


@pytest.mark.parametrize(("train_s", "delay"), [(3.0, 1.0), (4.5, 0.0), (5.5, 0.5)])
def test_a_pause_for_weights_delays_what_decodes_and_no_tool(train_s, delay):
  # Each batch of 8 episodes fills all slots for 10 s: 4 s of decoding, a tool of 2 s, 4 s of decoding. One publication
  # pauses them for 1 s, `train_s` after their start.
  result = run(make(transfer_s=TRANSFER_S, train_s=train_s), num_steps=40)
  assert result.steps_per_s == pytest.approx(1 / (10 + delay), rel=0.01)
  assert result.slot_utilisation == pytest.approx(8 / (10 + delay), rel=0.01)


def test_delays_by_pauses_are_those_of_walking_through_an_episode_second_by_second():
  rng = np.random.default_rng(0)
  for _ in range(100):
    waits, decode, began, length = rng.integers(0, 9, rng.integers(0, 5)), rng.integers(0, 5) * 60, 50, 7
    pauses = sorted(rng.choice(np.arange(5, 800, 8), rng.integers(0, 12), replace=False).tolist())
    piece = int(decode) // (len(waits) + 1)
    phases = [phase for wait in waits for phase in ("decode",) * piece + ("wait",) * int(wait)] + ["decode"] * piece
    at, second = 0, began
    while at < len(phases):
      paused = any(pause <= second < pause + length for pause in pauses)
      at += phases[at] == "wait" or not paused
      second += 1
    progress = simulator._Progress(float(decode), waits.tolist(), began)
    assert progress.total == len(phases)
    end = began + progress.total
    while delay := progress.delay_by([pause for pause in pauses if pause < end], length):
      end += delay
    assert end == second


def test_no_staleness_allowed_means_sync():
  sync, fresh = run(make(schedule="sync")), run(make(max_staleness=0))
  assert fresh.steps_per_s == pytest.approx(sync.steps_per_s)
  assert fresh.staleness == {0: 160}


def test_groups_wait_for_their_slowest_and_single_rollouts_do_not():
  config = make(num_engines=8, slots=4, train_s=0.1, max_staleness=4)
  single = run(config, Alternating())
  group = run(dataclasses.replace(config, schedule="group_async"), Alternating())
  sync = run(dataclasses.replace(config, schedule="sync"), Alternating())
  assert sync.steps_per_s == pytest.approx(1 / 50.1)
  assert single.trajectories_per_s > 1.3 * group.trajectories_per_s > 2 * sync.trajectories_per_s
  # Slots are the limit where staleness is not: an episode takes 20 s on average.
  unbounded = run(dataclasses.replace(config, slots=1, max_staleness=1000), Alternating(), num_steps=200)
  assert unbounded.trajectories_per_s == pytest.approx(8 / 20, rel=0.02)


def test_without_in_flight_updates_engines_drain():
  config = make(num_engines=1, slots=8, batch_size=4, group_size=4, train_s=0.5, transfer_s=TRANSFER_S)
  swapped = run(config, Alternating())
  drained = run(dataclasses.replace(config, in_flight=False), Alternating())
  assert drained.trajectories_per_s < 0.8 * swapped.trajectories_per_s


def test_drained_engines_with_constant_episodes():
  # All 8 episodes end together; the engine then loads for 1 s the version that exists then, and starts 8 new ones.
  result = run(make(num_engines=1, slots=8, in_flight=False, transfer_s=TRANSFER_S, train_s=0.0))
  assert result.steps_per_s == pytest.approx(1 / 11, rel=0.1)


@settings(max_examples=25)
@given(
  st.sampled_from(["sync", "group_async", "async"]), st.booleans(), st.integers(1, 5), st.integers(1, 5),
  st.integers(0, 3), st.floats(0.0, 30.0), st.floats(0.0, 5.0), st.integers(0, 2**31),
)  # fmt: skip
def test_any_cluster_finishes_within_its_bounds(schedule, in_flight, engines, slots, staleness, train, transfer, seed):
  config = make(
    schedule=schedule, in_flight=in_flight, num_engines=engines, slots=slots, max_staleness=staleness, train_s=train,
    transfer_s=transfer,
  )  # fmt: skip
  episodes = workload.Distributions(
    turns=workload.LogNormal(median=3, sigma=0.7), tokens=workload.LogNormal(median=40, sigma=0.5),
    tool_s=workload.LogNormal(median=1, sigma=1.2), max_turns=8, max_tokens=200,
  )  # fmt: skip
  result = simulator.simulate(config, episodes, num_steps=10, warmup_steps=2, seed=seed)
  assert sum(result.staleness.values()) == 10 * 8
  assert max(result.staleness) <= (0 if schedule == "sync" else staleness)
  assert 0 < result.slot_utilisation <= 1 + 1e-9
  assert 0 <= result.trainer_utilisation <= 1 + 1e-9
  again = simulator.simulate(config, episodes, num_steps=10, warmup_steps=2, seed=seed)
  assert again == result


def test_distributions_respect_their_limits():
  rng = np.random.default_rng(0)
  episodes = workload.Distributions(
    turns=workload.LogNormal(median=100, sigma=1.0), tokens=workload.LogNormal(median=10),
    tool_s=workload.LogNormal(median=0.5), max_turns=30, max_tokens=205,
  )  # fmt: skip
  drawn = [episodes.draw(rng) for _ in range(200)]
  assert max(e.tokens for e in drawn) == 205 and max(e.turns for e in drawn) == 21
  for episode in drawn:
    assert episode.tokens == min(205, 10 * episode.turns)
    assert episode.tool_s == pytest.approx(0.5 * (episode.turns - 1))
  latencies = workload.LogNormal(median=2.0, sigma=0.8)
  assert latencies.draw(rng, 100_000).mean() == pytest.approx(latencies.mean, rel=0.02)
  assert latencies.mean == pytest.approx(2 * math.exp(0.32))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"schedule": "never"}, "schedule must be one of sync, group_async, async; received 'never'"),
    ({"slots": 0}, "slots must be >= 1; received 0"),
    ({"token_s": -1.0}, "token_s must be >= 0 and finite; received -1"),
    ({"train_s": math.nan}, "train_s must be >= 0 and finite; received nan"),
    ({"transfer_s": math.inf}, "transfer_s must be >= 0 and finite; received inf"),
    ({"schedule": "group_async", "group_size": 3}, "group_size must divide batch_size = 8; received 3"),
  ],
)
def test_bad_clusters_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    make(**change)


@pytest.mark.parametrize(("median", "sigma"), [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 0.0), (1.0, -1.0), (1.0, 1e9)])
def test_distributions_whose_sums_overflow_are_refused(median, sigma):
  with pytest.raises(ValueError, match=r"median in \[0, 1e\+12\] and a sigma in \[0, 10\]; received"):
    workload.LogNormal(median=median, sigma=sigma)


@pytest.mark.parametrize(("capacity", "older"), [(8, 2), (16, 3), (64, 9)])
def test_full_queue_stops_new_episodes_and_takes_in_those_that_run(capacity, older):
  """With a trainer that cannot keep up, trajectories wait for room in the queue, not for all that admission allows."""
  result = run(make(train_s=100.0, num_engines=1, slots=8, max_staleness=64, capacity=capacity), num_steps=40)
  # One short of full, all eight slots start an episode: `capacity + 7` wait then, and eight of them are taken per step.
  assert result.staleness == {older - 1: 40, older: 7 * 40}


def test_capacity_below_a_batch_is_refused():
  with pytest.raises(ValueError, match="capacity must be >= batch_size = 8; received 7"):
    make(capacity=7)


def test_a_simulation_that_takes_no_time_is_refused():
  class Nothing:
    def draw(self, rng: np.random.Generator) -> workload.Episode:
      return workload.Episode(tokens=1, turns=1)

  with pytest.raises(ValueError, match="took no time"):
    simulator.simulate(make(token_s=0.0, turn_s=0.0, train_s=0.0, transfer_s=0.0), Nothing(), num_steps=2)
