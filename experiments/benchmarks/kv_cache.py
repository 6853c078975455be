"""Cost of recomputing a context against swapping its pages out and in: `python -m experiments.benchmarks.kv_cache`.

`ModelRunner.swap_is_cheaper` uses constants of the machine: the FLOPs that prefill does in the time of a swap, per swap
and per byte. This benchmark measures swaps and prefill of contexts of several lengths. It prints the length from which
a swap is cheaper, as measured and by the rule.

The last line is a JSON object. `ms_to_prefill` and `ms_to_swap` have the times for 16, 32, 64, ... tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.benchmarks import decoding
from experiments.support import command
from sao_jax.models import init_policy
from sao_jax.rollout import ModelRunner, Row, StepSpec

_LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
_PAGE_SIZE = 16


def _best(work: Callable[[], Any], runner: ModelRunner, repeats: int) -> float:
  """Returns the shortest time of `work` and the programs that it dispatches, in seconds."""
  best = float("inf")
  for _ in range(repeats + 1):  # the first one compiles
    jax.block_until_ready(runner._cache)
    began = time.perf_counter()
    work()
    jax.block_until_ready(runner._cache)
    best = min(best, time.perf_counter() - began)
  return best


def run(*, max_len: int, repeats: int) -> dict[str, Any]:
  """Prints a row per length; returns the object for the last line."""
  params = init_policy(decoding.MODEL, jax.random.key(0))
  spec = StepSpec(model=decoding.POLICY, temperature=1.0, stop_ids=(0,), chunk_steps=4)
  num_pages = -(-max_len // _PAGE_SIZE)
  runner = ModelRunner(
    spec, num_slots=2, num_pages=2 * num_pages, page_size=_PAGE_SIZE, max_pages=num_pages, token_budget=max_len
  )
  parameters = sum(x.size for x in jax.tree.leaves(params))
  result: dict[str, Any] = {name: [] for name in ("lengths", "ms_to_prefill", "ms_to_swap")}
  result["device"] = jax.devices()[0].device_kind
  key = jax.random.key(0)
  swaps, by_rule = [], []
  for length in (x for x in _LENGTHS if x <= max_len):
    used = -(-length // _PAGE_SIZE)
    pages = list(range(1, used + 1))
    row = Row(0, 0, np.ones(length, np.int32), 0, pages)
    prefill = _best(lambda row=row: runner.step(params, [row], key), runner, repeats)
    to = [page + num_pages for page in pages]
    swap = _best(lambda pages=pages, to=to: runner.write_pages(to, runner.read_pages(pages)), runner, repeats)
    for name, value in (("lengths", length), ("ms_to_prefill", 1e3 * prefill), ("ms_to_swap", 1e3 * swap)):
      result[name].append(value)
    swaps += [length] if swap < prefill else []
    by_rule += [length] if runner.swap_is_cheaper(params, length) else []
    print(
      f"{length:5} tokens: prefill {1e3 * prefill:7.2f} ms, swap {1e3 * swap:6.2f} ms, as much as "
      f"{2e-6 * parameters * length / prefill * swap:6.0f} MFLOP of prefill"
    )
  result["swap_from"], result["swap_from_by_rule"] = min(swaps, default=None), min(by_rule, default=None)
  print(f"a swap is cheaper from {result['swap_from']} tokens, by the rule from {result['swap_from_by_rule']}")
  runner.close()
  return result


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_integer("max_len", 1024, "Longest context.", lower_bound=16)
  flags.DEFINE_integer("repeats", 10, "Number of measurements; the best one counts.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  print(json.dumps(run(max_len=flags.FLAGS.max_len, repeats=flags.FLAGS.repeats)))


if __name__ == "__main__":
  define_flags()
  command.run(main)
