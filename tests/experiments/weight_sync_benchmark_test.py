"""The benchmark of weight updates runs, at a tiny size, and prints the keys that others read."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from experiments.benchmarks import weight_sync
from experiments.presets import tool_math_cpu
from sao_jax.learner import OptimizerConfig
from tests.child_environment import fast_compile

TINY = dataclasses.replace(tool_math_cpu.make_policy(), num_layers=1)


def test_a_delta_is_small_where_few_bfloat16_weights_change():
  model = dataclasses.replace(TINY, dtype="bfloat16", init_std=0.5)
  shares = weight_sync.delta_shares(model, OptimizerConfig(learning_rate=1e-6), updates=2)
  assert 0 < shares["bfloat16"] < 0.05 < shares["float32"] <= 1
  assert shares["bfloat16"] < shares["all"] < shares["float32"]


def test_rates(tmp_path: pathlib.Path):
  program = (
    "import dataclasses, json, sys, jax\n"
    "from experiments.benchmarks import weight_sync as w\n"
    "from experiments.presets import tool_math_cpu\n"
    "if __name__ == '__main__':\n"
    "  jax.config.update('jax_num_cpu_devices', 2)\n"
    "  w.smollm2_135m = tool_math_cpu.make_policy\n"
    "  print(json.dumps(w.run(layers=1, slots=2, seconds=1.0, repeats=2, updates=1, deltas=False)))\n"
  )
  run = subprocess.run(
    [sys.executable, "-c", program], env=fast_compile(), capture_output=True, text=True, timeout=500, check=False
  )
  assert run.returncode == 0, run.stderr
  result = json.loads(run.stdout.splitlines()[-1])
  for name in ("split_gb_per_s", "ray_gb_per_s", "copy_gb_per_s", "engine_rate_kept", "pause_in_copies"):
    assert result[name] > 0
  for name in ("split", "ray"):
    assert result[f"{name}_share_of_copy"] == pytest.approx(result[f"{name}_gb_per_s"] / result["copy_gb_per_s"])
