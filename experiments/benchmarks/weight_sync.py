"""Speed and size of weight updates: `python -m experiments.benchmarks.weight_sync`.

Rates: the bytes of a version, divided by the seconds from `publish` until the engine has the version. All values of a
version differ from those before, so a delta saves nothing.

- copy: NumPy copies of the same arrays, into new memory.
- split: learner and engine on two devices of one process (virtual ones on a CPU): cast, layout and transfer.
- Ray: an engine in a Ray worker decodes meanwhile. Its tokens per second are counted while one version follows the
  other without a break, and before and after that; a run has such a transfer once per learner step.
- Pause: the time of `publish`, for which the learner waits, next to that of a copy of its weights on its device.

Deltas: supervised Adam updates on random tokens, in float32; then what the sender would put for a version, in percent.
The model of the main preset has its own learning rate. That of SmolLM2's shape computes in bfloat16 at 1e-6. The
output head stays float32, as the engine needs it: the head's share is given apart from that of the bfloat16 weights.

Expected: at 1e-6 a weight w moves by up to 1e-6, and the distance between bfloat16 numbers at w is w / 256 to w / 128.
With |w| about 0.02, one weight in 80 to 150 changes. A value and its position take 4 bytes, twice those of the value:
1.5 to 3 %. Measured: 6.3 % after two updates (4 layers), since many weights are closer to zero, and Adam's first
updates are as large as the learning rate.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.presets import tool_math_cpu
from experiments.presets.model_configs import smollm2_135m
from experiments.support import command
from sao_jax.learner import LearnerConfig, OptimizerConfig, pack_batch
from sao_jax.learner.supervised import init_sft_state, make_sft_step
from sao_jax.models import ModelConfig, cached_policy, init_policy, policy_apply
from sao_jax.parallel.copies import owned_copy
from sao_jax.parallel.engine_weights import cast_for_engine, jit_layout, send
from sao_jax.parallel.mesh import EngineMeshConfig, make_mesh
from sao_jax.rollout import Engine, EngineConfig, EngineThread, EpisodeRequest
from sao_jax.rollout.ray import weight_transfer as transfer
from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Params, Step, Trajectory

_CLUSTER = ClusterConfig(num_engines=1, num_cpus=1.0, address="local")
_ROW = 64
_LIMIT_S = 600.0


class _Tokenizer:
  """A token per character."""

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.stop_ids = (0,)

  def encode(self, text: str) -> list[int]:
    return [ord(c) % self.vocab_size for c in text]

  def decode(self, ids: Sequence[int]) -> str:
    return "x" * len(ids)


class _OneTurn:
  """Environment of one action."""

  def reset(self, task_index: int) -> str:
    return "prompt"

  def step(self, action: str) -> Step:
    return Step(reward=1.0, done=True)

  def close(self) -> None:
    pass


def _make_engine(model: ModelConfig, config: EngineConfig) -> Engine:
  return Engine(
    model=cached_policy(model), make_env=_OneTurn, tokenizer=_Tokenizer(model.vocab_size), config=config, seed=0
  )


def _seconds(call: Callable[[], Any], repeats: int) -> float:
  """Median time of a call, after a first one."""
  call()
  times = []
  for _ in range(repeats):
    began = time.perf_counter()
    call()
    times.append(time.perf_counter() - began)
  return statistics.median(times)


def _copy_gb_per_s(params: Params, repeats: int) -> float:
  arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
  return _gb(params) / _seconds(lambda: [array.copy() for array in arrays], repeats)


def _gb(params: Params) -> float:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e9


def split_rate(params: Params, model: ModelConfig, repeats: int) -> dict[str, float]:
  """Measures transfers from one device of this process to another."""
  learner, engine = (make_mesh(EngineMeshConfig(), [device]) for device in jax.devices()[:2])
  lay_out = jit_layout(params, learner, model.compute_dtype)
  size = _gb(lay_out(params))
  seconds = _seconds(lambda: jax.block_until_ready(send(lay_out(params), engine)), repeats)
  return {"split_gb_per_s": size / seconds}


class _Ray:
  """A cluster of one engine that always has episodes to run, and the versions that it is sent.

  Args:
    versions: two versions of the weights, sent in turns.
    model: their model.
    config: of the engine.
  """

  def __init__(self, versions: Sequence[Params], model: ModelConfig, config: EngineConfig):
    self._versions = versions
    self._number = itertools.count()
    self.store = WeightStore(_waits(jax.jit(functools.partial(cast_for_engine, dtype=model.compute_dtype))))
    make_engine = functools.partial(_make_engine, model, config)
    self.cluster = EngineCluster(make_engine, _CLUSTER, slots_per_engine=2 * config.num_slots)
    requests = (EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in itertools.count())
    self.thread = EngineThread(
      self.cluster, weights=self.store, next_request=lambda: next(requests), emit=lambda trajectory: None
    )

  def publish(self) -> float:
    """Publishes the next version; returns the time for which the learner waits."""
    version = next(self._number)
    began = time.perf_counter()
    self.store.publish(self._versions[version % 2], version)
    return time.perf_counter() - began

  def transfer(self) -> tuple[float, float]:
    """Publishes the next version; returns the times until `publish` returns, and until the engine has the version."""
    before = self.cluster.counters["weight_transfers"]
    began = time.perf_counter()
    pause = self.publish()
    self._wait(lambda: self.cluster.counters["weight_transfers"] > before)
    return pause, time.perf_counter() - began

  def decode(self, seconds: float) -> float:
    """Waits for some seconds; returns the tokens per second."""
    return self.rate(lambda: time.sleep(seconds))

  def rate(self, call: Callable[[], Any]) -> float:
    """Returns the tokens per second during a call, between two reports of the engine."""
    before, began = self._report()
    call()
    after, ended = self._report()
    return (after - before) / (ended - began)

  def _report(self) -> tuple[int, float]:
    """Waits for a change of the number of tokens; returns it, and the time."""
    last = self.cluster.counters["tokens_generated"]
    self._wait(lambda: self.cluster.counters["tokens_generated"] > last)
    return self.cluster.counters["tokens_generated"], time.perf_counter()

  def _wait(self, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
      self.thread.check()
      if time.monotonic() > deadline:
        raise TimeoutError(f"the engine did not respond within {_LIMIT_S} s: {self.cluster.counters}")
      time.sleep(0.001)

  def __enter__(self) -> _Ray:
    self.thread.start()
    self.transfer()
    self._report()  # compiles
    return self

  def __exit__(self, *_: object) -> None:
    try:
      self.thread.stop()
    finally:
      self.cluster.close()


def _waits(copy: Callable[[Params], Params]) -> Callable[[Params], Params]:
  return lambda params: jax.block_until_ready(copy(params))


def ray_rates(params: Params, model: ModelConfig, *, slots: int, seconds: float, repeats: int) -> dict[str, float]:
  """Measures transfers to an engine in a Ray worker, and the engine's tokens per second."""
  config = EngineConfig(num_slots=slots, max_len=256, max_action_tokens=192, max_turns=1, chunk_steps=2, env_workers=2)
  other = jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: 1.5 * x, tree))(params))
  with _Ray((params, other), model, config) as ray:
    size = _gb(ray.store.latest()[0])
    ray.decode(seconds)  # warms up
    alone = [ray.decode(seconds)]
    transfers: list[tuple[float, float]] = []

    def follow() -> None:
      until = time.perf_counter() + seconds
      while time.perf_counter() < until or len(transfers) < repeats:
        transfers.append(ray.transfer())

    during = ray.rate(follow)
    alone.append(ray.decode(seconds))
    counters = ray.cluster.counters
  pause, taken = (statistics.median(times) for times in zip(*transfers, strict=True))
  copied = _seconds(lambda: owned_copy(params), repeats)
  assert counters["weight_checksum_mismatches"] == 0
  return {
    "version_gb": size, "ray_gb_per_s": size / taken, "transfer_s": taken, "num_transfers": float(len(transfers)),
    "engine_tokens_per_s": statistics.mean(alone), "engine_tokens_per_s_during": during,
    "engine_rate_kept": during / statistics.mean(alone), "learner_pause_s": pause, "device_copy_s": copied,
    "pause_in_copies": pause / copied,
  }  # fmt: skip


def _versions(model: ModelConfig, optimizer: OptimizerConfig, updates: int) -> Iterator[Params]:
  """Yields the weights for an engine before and after each Adam update."""
  step = make_sft_step(optimizer, policy_apply(model))
  state = init_sft_state(optimizer, init_policy(model, jax.random.key(0)))
  cast = jax.jit(functools.partial(cast_for_engine, dtype=model.compute_dtype))
  rng = np.random.default_rng(0)
  yield cast(state.params)
  for _ in range(updates):
    batch, stats = pack_batch(_PACKING, [_random_trajectory(rng, model.vocab_size) for _ in range(8)])
    state, _ = step(state, batch, np.int32(stats.num_microbatches))
    yield cast(state.params)


_PACKING = LearnerConfig(eps_low=0.3, eps_high=5.0, row_length=_ROW, rows_per_microbatch=2)


def _random_trajectory(rng: np.random.Generator, vocab_size: int) -> Trajectory:
  mask = np.arange(_ROW) > 0
  return Trajectory(
    tokens=rng.integers(vocab_size, size=_ROW).astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, 0.0, np.nan).astype(np.float32),
    versions=np.where(mask, 0, -1).astype(np.int32),
    rewards=np.zeros(_ROW, np.float32),
    ended="terminal",
    task_index=0,
    episode_id=0,
    group_id=0,
    num_turns=1,
    success=False,
    text="",
  )


def delta_shares(model: ModelConfig, optimizer: OptimizerConfig, updates: int) -> dict[str, float]:
  """Returns the bytes that an update sends, as shares of all bytes, over all updates; also for each dtype."""
  sent, whole = collections.Counter[str](), collections.Counter[str]()
  for before, after in itertools.pairwise(_versions(model, optimizer, updates)):
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
      delta = transfer.encode(*(transfer.bits(np.asarray(leaf)) for leaf in (new, old)))
      sent[str(new.dtype)] += new.nbytes if delta is None else delta.nbytes
      whole[str(new.dtype)] += new.nbytes
  shares = {name: sent[name] / whole[name] for name in sorted(whole)}
  return {"all": sent.total() / whole.total(), **shares}


def run(*, layers: int, slots: int, seconds: float, repeats: int, updates: int, deltas: bool = True) -> dict[str, Any]:
  """Measures everything, prints rows and returns the object for the last line."""
  model = dataclasses.replace(smollm2_135m(), num_layers=layers, dtype="bfloat16")
  params = init_policy(model, jax.random.key(0))
  cast = jax.jit(functools.partial(cast_for_engine, dtype=model.compute_dtype))(params)
  copy = _copy_gb_per_s(cast, repeats)
  result: dict[str, Any] = {"copy_gb_per_s": copy, "layers": layers}
  print(f"a version is {_gb(cast):.3f} GB; copied at {copy:.2f} GB/s", flush=True)
  result |= split_rate(params, model, repeats)
  result["split_share_of_copy"] = result["split_gb_per_s"] / copy
  print(
    f"split devices: {result['split_gb_per_s']:.2f} GB/s, {result['split_share_of_copy']:.0%} of a copy", flush=True
  )
  result |= ray_rates(params, model, slots=slots, seconds=seconds, repeats=repeats)
  result["ray_share_of_copy"] = result["ray_gb_per_s"] / copy
  print(f"Ray: {result['ray_gb_per_s']:.2f} GB/s, {result['ray_share_of_copy']:.0%} of a copy")
  kept, rate = result["engine_rate_kept"], result["engine_tokens_per_s"]
  print(f"the engine keeps {kept:.0%} of its {rate:.0f} tokens/s while weights arrive")
  pause, copies = result["learner_pause_s"], result["pause_in_copies"]
  print(f"the learner pauses for {pause:.3f} s, {copies:.2f} copies of its weights on the device", flush=True)
  if deltas:
    main_preset = tool_math_cpu.make_config()
    small = OptimizerConfig(learning_rate=1e-6)
    result["delta_share"] = {
      "tool_math_cpu": delta_shares(main_preset.policy, main_preset.learner.policy_optimizer, updates),
      "smollm2_135m": delta_shares(model, small, updates),
    }
    for name, shares in result["delta_share"].items():
      print(f"a delta of {name}: " + ", ".join(f"{share:.1%} of {kind}" for kind, share in shares.items()))
  return result


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_integer("layers", 30, "Layers of the model of SmolLM2-135M's shape.", lower_bound=1)
  flags.DEFINE_integer("slots", 16, "Sequences that the engine decodes at once.", lower_bound=1)
  flags.DEFINE_float("seconds", 10.0, "Length of each measurement of the engine.", lower_bound=0.0)
  flags.DEFINE_integer("repeats", 5, "Copies and transfers at least; medians count.", lower_bound=1)
  flags.DEFINE_integer("updates", 3, "Adam updates before which deltas are measured.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  jax.config.update("jax_num_cpu_devices", 2)  # the split needs two; other platforms ignore it
  names = ("layers", "slots", "seconds", "repeats", "updates")
  print(json.dumps(run(**{name: flags.FLAGS[name].value for name in names})))


if __name__ == "__main__":
  define_flags()
  command.run(main)
