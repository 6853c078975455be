"""GAE on packed rows, with masks and segments, against google-tunix's unmasked one.

Run `python -m experiments.benchmarks.gae`; human-readable rows, then one JSON object on the last line.

Ours does more: observation tokens are skipped, rows hold several segments with their own lambda, and nothing crosses a
segment's end. Tunix's `compute_gae_advantages` gets an all-ones mask and one lambda, and also whitens its result. Both
are jitted, fed the same random rows, and take turns; the best of each is reported (ms per call). Where google-tunix
is not installed its figures and the ratios are null.

Also reported: the log-depth scan that accelerators get, and on an accelerator the sequential one (what the choice by
platform saves).

Expected before the first measurement (2 CPU cores; noted down after it): Tunix takes 4.9 ms at 4 x 131,072, 37 ns a
step, so the loop's cost per step rules, not memory. A plain scan with two more arrays a step costs about what Tunix's
does; a blocked scan (blocks of the row side by side, vectorised) needs 1 to 2 ms and wins.

Found at 4 x 131,072, best of 20, one quiet process: the plain scan 2.7 to 3.1 ms, Tunix's loop without its whitening
2.3 to 2.6; unrolled 4, 8, 16 times 4.5, 11, 35 ms; blocked, with 64 to 1,024 tokens a block, 3.5 to 14.5 ms; log-depth
15.6 ms. The expectation about blocks was wrong (their transposes and second output are traffic that the plain scan does
not have; not profiled further), so the plain scan stayed. With all CPUs busy the ratio to Tunix was 0.9 at 4 x 131,072
and 1.2 at 8 x 1,024.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.ops import _recurrences, advantages
from sao_jax.utils.extras import require_extra

SHAPES = ((8, 1_024), (8, 16_384), (4, 131_072))
Rows = tuple[jax.Array, ...]


def make_rows(rows: int, length: int, seed: int) -> Rows:
  """Rewards, values, action mask, segment ids and lambda, all `[rows, length]`: segments of 200 to 4,000 tokens."""
  rng = np.random.default_rng(seed)
  ids = np.zeros((rows, length), np.int32)
  for row in ids:
    start = segment = 0
    while start < length:
      end = start + int(rng.integers(200, 4_000))
      segment += 1
      row[start:end] = segment
      start = end
  mask = rng.random((rows, length)) < 0.6
  v, r = rng.normal(size=(2, rows, length)).astype(np.float32)
  lambda_ = 1.0 - 1.0 / (1.5 * (100.0 + 50.0 * (ids % 7)))
  return tuple(jnp.asarray(x) for x in (r, v, mask, ids, lambda_.astype(np.float32)))


def ours(r: jax.Array, v: jax.Array, mask: jax.Array, ids: jax.Array, lambda_: jax.Array) -> jax.Array:
  """The library's function as the learner uses it: vmapped over packed rows."""
  row = functools.partial(advantages.skip_observation_gae, discount=1.0)
  return jax.vmap(lambda r, v, m, s, l: row(r, v, m, lambda_=l, segment_ids=s))(r, v, mask, ids, lambda_)


def one_scan(scan: Callable[[_recurrences.GaeInputs], jax.Array]) -> Callable[..., jax.Array]:
  """One of the two scans, whatever the platform would choose."""

  def row(r: jax.Array, v: jax.Array, mask: jax.Array, ids: jax.Array, lambda_: jax.Array) -> jax.Array:
    end = jnp.concatenate([ids[1:] != ids[:-1], jnp.ones_like(mask[:1])])
    value = jnp.where(mask, v, 0.0)
    one = jnp.float32(1.0)
    inputs = _recurrences.GaeInputs(mask, end, jnp.where(mask, r, 0.0) - value, value, one, lambda_, jnp.float32(0.0))
    return jnp.where(mask, scan(inputs), 0.0)

  return jax.vmap(row)


def tunix_gae() -> Callable[..., jax.Array] | None:
  """Tunix's function on the same rows, unmasked, or None where it is not installed."""
  try:
    with require_extra("bench"):
      from tunix.rl import algo_core
  except ImportError as error:
    print(f"google-tunix is not compared: {error}")
    return None
  gae: Callable[..., jax.Array] = lambda r, v, mask, ids, lambda_: algo_core.compute_gae_advantages(  # noqa: E731
    r, v, jnp.ones_like(r), 1.0, 0.95
  )
  return gae


def best_times(functions: dict[str, Callable[..., jax.Array]], rows: Rows, repeats: int) -> dict[str, float]:
  """Milliseconds of the fastest call; the functions take turns, so that other load on the machine hits all alike."""
  compiled = {name: jax.jit(f) for name, f in functions.items()}
  for f in compiled.values():
    jax.block_until_ready(f(*rows))
  times: dict[str, list[float]] = {name: [] for name in compiled}
  for _ in range(repeats):
    for name, f in compiled.items():
      start = time.perf_counter()
      jax.block_until_ready(f(*rows))
      times[name].append(time.perf_counter() - start)
  return {name: 1e3 * min(x) for name, x in times.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description="Times skip-observation GAE; one JSON object on the last line.")
  parser.add_argument("--repeats", type=int, default=30)
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  functions: dict[str, Callable[..., jax.Array]] = {"ours": ours, "associative": one_scan(_recurrences.gae_associative)}
  if (tunix := tunix_gae()) is not None:
    functions["tunix"] = tunix
  on_cpu = jax.default_backend() == "cpu"
  if not on_cpu:
    functions["sequential"] = one_scan(_recurrences.gae_sequential)
  result: dict[str, object] = {"device": jax.devices()[0].device_kind, "ms": {}, "tunix_ms": {}, "ratio_to_tunix": {}}
  result |= {"associative_ms": {}, "sequential_ms": {}, "speedup_over_sequential": {}}
  print(f"{'rows':>12} {'ours ms':>9} {'tunix ms':>9} {'ratio':>6} {'log-depth ms':>13} {'sequential ms':>14}")
  for shape in SHAPES:
    key = f"{shape[0]}x{shape[1]}"
    ms = best_times(functions, make_rows(*shape, arguments.seed), arguments.repeats)
    sequential = ms["ours"] if on_cpu else ms["sequential"]
    row = {
      "ms": ms["ours"],
      "tunix_ms": ms.get("tunix"),
      "ratio_to_tunix": ms["ours"] / ms["tunix"] if "tunix" in ms else None,
      "associative_ms": ms["associative"],
      "sequential_ms": sequential,
      "speedup_over_sequential": sequential / ms["ours"],
    }
    for name, value in row.items():
      values = result[name]
      assert isinstance(values, dict)
      values[key] = value
    peer = f"{ms['tunix']:9.2f} {ms['ours'] / ms['tunix']:6.2f}" if "tunix" in ms else f"{'-':>9} {'-':>6}"
    print(f"{key:>12} {ms['ours']:9.2f} {peer} {ms['associative']:13.2f} {sequential:14.2f}")
  print(json.dumps(result))


if __name__ == "__main__":
  main()
