"""Cost of recomputing a context against copying its cache row: `python -m experiments.benchmarks.kv_cache`.

`Sampler.copy_is_cheaper` uses constants of the machine: the FLOPs that prefill does in the time of a copy, per copy and
per byte. This benchmark measures copies of two sizes, to the host and back and within the device, and the prefill of
contexts of several lengths. It prints the length from which a copy is cheaper, as measured and by the rule.

The last line is a JSON object. `ms_to_prefill` has the time to prefill 16, 32, 64, ... tokens, up to `max_len`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.benchmarks import decoding
from experiments.support import command
from sao_jax.models import init_policy
from sao_jax.rollout import Sampler, SamplerSpec
from sao_jax.rollout.engine.sampler import PrefillRow
from sao_jax.types import Params

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)


def _best(work: Callable[[], Any], sampler: Sampler, repeats: int) -> float:
  """Returns the shortest time of `work` and the programs that it dispatches, in seconds."""
  best = float("inf")
  for _ in range(repeats + 1):  # the first one compiles
    jax.block_until_ready(sampler._streams[0].cache)
    began = time.perf_counter()
    work()
    jax.block_until_ready(sampler._streams[0].cache)
    best = min(best, time.perf_counter() - began)
  return best


def measure(params: Params, *, slots: int, max_len: int, repeats: int) -> dict[str, Any]:
  """Measures one size of the cache."""
  spec = SamplerSpec(model=decoding.POLICY, temperature=1.0, stop_ids=(0,), chunk_steps=4)
  sampler = Sampler(spec, num_slots=slots, max_len=max_len)
  lengths = [length for length in _LENGTHS if length <= max_len]
  row_bytes = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(sampler._streams[0].cache))
  parameters = sum(x.size for x in jax.tree.leaves(params))

  def prefill(length: int) -> None:
    tokens = np.ones(length, np.int32)
    sampler.prefill(params, [PrefillRow(0, 0, tokens, None)], num_rows=1, width=length, live_len=length)

  times = [_best(lambda length=length: prefill(length), sampler, repeats) for length in lengths]
  result: dict[str, Any] = {"max_len": max_len, "row_bytes": row_bytes, "ms_to_prefill": [1e3 * x for x in times]}
  for name, to_host in (("host", True), ("device", False)):
    copied = _best(lambda to_host=to_host: sampler.write_row(1, sampler.read_row(0, to_host=to_host)), sampler, repeats)
    result[name] = {
      "ms_to_copy": 1e3 * copied,
      "flops_per_copy": 2.0 * parameters * lengths[-1] / times[-1] * copied,
      "pays_from": next((n for n, seconds in zip(lengths, times, strict=True) if seconds > copied), None),
      "pays_from_by_rule": next((n for n in lengths if sampler.copy_is_cheaper(params, n, to_host=to_host)), None),
    }
  sampler.close()
  return result


def run(*, slots: int, max_lens: Sequence[int], repeats: int) -> dict[str, Any]:
  """Prints a row per size and kind of copy; returns the object for the last line."""
  params = init_policy(decoding.MODEL, jax.random.key(0))
  results = [measure(params, slots=slots, max_len=max_len, repeats=repeats) for max_len in max_lens]
  for result in results:
    for name in ("host", "device"):
      way = result[name]
      print(
        f"max_len {result['max_len']:5}, {name:>6}: copy {way['ms_to_copy']:6.2f} ms, prefill all "
        f"{result['ms_to_prefill'][-1]:7.2f} ms; a copy is cheaper from {way['pays_from']} tokens, by the rule from "
        f"{way['pays_from_by_rule']}"
      )
  return {"device": jax.devices()[0].device_kind, "sizes": results}


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_integer("slots", 8, "Slots of the cache.", lower_bound=2)
  flags.DEFINE_multi_integer("max_len", [256, 1024], "Cache entries per slot.", lower_bound=16)
  flags.DEFINE_integer("repeats", 10, "Number of measurements; the best one counts.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  flag = flags.FLAGS
  print(json.dumps(run(slots=flag.slots, max_lens=flag.max_len, repeats=flag.repeats)))


if __name__ == "__main__":
  define_flags()
  command.run(main)
