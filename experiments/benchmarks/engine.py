"""Speed of the whole engine against the raw sampler: `python -m experiments.benchmarks.engine`.

Uses the model and slots of `experiments.benchmarks.sampler`. Episodes have 1 to 4 turns, prompts of 16 to 64 tokens,
actions of 64 tokens on average (geometric: random weights sample one of 16 stop ids of 1,024), and observations of 4 to
40 tokens. A free slot starts the next episode at once, and environments respond immediately, on threads. Only action
tokens are counted, over a window in the steady state. The raw sampler decodes as many slots to a similar mean length,
without stopping.

Prediction before tuning: there is about 0.5 prompt or observation token per action token, and its prefill costs a third
of a decoded token (15 %). Slots are idle for half a chunk of 16 steps per action of 64 (12 %). The host takes 3 %. So
the ratio is 0.7. Result (2 cores): decoding takes two thirds of a stream's cycle, prefill a fifth, and the host an
eighth, during which the stream's core waits. Slots are occupied 87 % of the time. A chunk reads windows as long as the
longest contexts (400 tokens), while the mean is 170. So it costs a third more than a chunk of the raw sampler, although
windows have two lengths. Decoding is bound by the bandwidth at which a core reads keys and values.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import flags

from experiments.benchmarks import decoding
from experiments.support import command
from sao_jax.models import init_policy
from sao_jax.rollout import Engine, EngineConfig, EpisodeRequest
from sao_jax.types import Params, Step

_NUM_STOP_IDS = 16
_SAMPLER_TOKENS = 288


class _LetterTokenizer:
  """Tokenizer with one token per character; every id has a character."""

  vocab_size = decoding.MODEL.vocab_size
  stop_ids = tuple(range(_NUM_STOP_IDS))

  def encode(self, text: str) -> list[int]:
    return [ord(c) % self.vocab_size for c in text]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class _Turns:
  """Environment whose episodes have random sizes, seeded by the index of the task."""

  def reset(self, task_index: int) -> str:
    self._rng = np.random.default_rng(task_index)
    self._turns = int(self._rng.integers(1, 5))
    return "p" * int(self._rng.integers(16, 65))

  def step(self, action: str) -> Step:
    self._turns -= 1
    return Step(observation="o" * int(self._rng.integers(4, 41)), reward=1.0, done=self._turns == 0)

  def close(self) -> None:
    pass


def _requests() -> Iterator[EpisodeRequest]:
  for i in itertools.count():
    yield EpisodeRequest(task_index=i, episode_id=i, group_id=i)


def engine_rates(
  params: Params, config: EngineConfig, *, seconds: float, repeats: int, warmup: int
) -> Iterator[tuple[float, float]]:
  """Yields (action tokens per second, mean trajectory length) of successive windows of a compiled, full engine."""
  with Engine(model=decoding.POLICY, make_env=_Turns, tokenizer=_LetterTokenizer(), config=config) as engine:
    trajectories = engine.generate(lambda _: (params, 0), _requests())
    for _ in range(warmup * config.num_slots):
      next(trajectories)  # compiles all shapes, and desynchronizes the slots
    for _ in range(repeats):
      tokens, began, lengths = engine.counters["tokens_generated"], time.perf_counter(), []
      while not lengths or time.perf_counter() - began < seconds:
        lengths.append(len(next(trajectories).tokens))
      elapsed = time.perf_counter() - began
      yield (engine.counters["tokens_generated"] - tokens) / elapsed, float(np.mean(lengths))
    trajectories.close()


def run(
  *,
  slots: int,
  max_len: int,
  chunk_steps: int,
  streams: int,
  env_workers: int,
  seconds: float,
  repeats: int,
  warmup: int,
) -> dict[str, float]:
  """Measures engine and sampler in turns, prints rows and returns the object for the last line."""
  params = init_policy(decoding.MODEL, jax.random.key(0))
  config = EngineConfig(
    num_slots=slots,
    max_len=max_len,
    max_action_tokens=256,
    max_turns=4,
    chunk_steps=chunk_steps,
    env_workers=env_workers,
    num_streams=streams,
  )
  raw = decoding.raw_decoder(
    params,
    slots=slots,
    new_tokens=_SAMPLER_TOKENS,
    chunk_steps=chunk_steps,
    bucket_tokens=128,
    streams=config.num_streams,
  )
  raw(0)  # compiles
  best, best_raw = 0.0, 0.0
  for rate, length in engine_rates(params, config, seconds=seconds, repeats=repeats, warmup=warmup):
    best = max(best, rate)
    began = time.perf_counter()
    best_raw = max(best_raw, raw(1)[0].size / (time.perf_counter() - began))
    print(f"  engine {rate:>9,.0f} tokens/s   sampler {best_raw:>9,.0f} tokens/s   trajectories of {length:.0f}")
  result = {"tokens_per_s": best, "sampler_tokens_per_s": best_raw, "ratio": best / best_raw}
  print(f"{slots} slots on {jax.devices()[0].device_kind}: the engine has {result['ratio']:.0%} of the sampler's rate")
  return result


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_integer("slots", 32, "Sequences decoded at once.", lower_bound=1)
  flags.DEFINE_integer("max_len", 512, "Tokens per trajectory at most.", lower_bound=256)
  flags.DEFINE_integer("chunk_steps", 16, "Decode steps per jitted chunk.", lower_bound=1)
  streams = decoding.num_streams()
  flags.DEFINE_integer("streams", streams, "Decode streams of the sampler, a thread each.", lower_bound=1)
  flags.DEFINE_integer("env_workers", 4, "Environment threads; 0 runs them inline.", lower_bound=0)
  flags.DEFINE_float("seconds", 5.0, "Length of each measurement.", lower_bound=0.0)
  flags.DEFINE_integer(
    "warmup", 25, "Trajectories per slot before the measurement, to compile all shapes.", lower_bound=1
  )
  flags.DEFINE_integer("repeats", 3, "Rounds; the best of each contender counts.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  names = ("slots", "max_len", "chunk_steps", "streams", "env_workers", "seconds", "repeats", "warmup")
  print(json.dumps(run(**{name: flags.FLAGS[name].value for name in names})))


if __name__ == "__main__":
  define_flags()
  command.run(main)
