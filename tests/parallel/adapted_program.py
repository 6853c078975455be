"""Runs with low-rank adapters on meshes of 4 virtual devices: `python -m tests.parallel.adapted_program`.

The last line holds, for each mesh, the largest difference of its adapters from those of one device, and the metrics of
its last step.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

from sao_jax.io.console import Console
from sao_jax.io.metrics import read_metrics
from sao_jax.parallel import MeshConfig, RolloutMeshConfig
from sao_jax.training import Trainer
from sao_jax.training.config import CriticConfig, WarmStartConfig
from tests.bare_run import busy_domain
from tests.training.adapted_run_test import make_config

PLACEMENTS: dict[str, dict[str, Any]] = {
  "one": {},
  "sharded": {"mesh": MeshConfig(data=1, fsdp=2, tensor=2)},
  "split": {"mesh": MeshConfig(data=1, fsdp=2), "rollout_mesh": RolloutMeshConfig(placement="split", data=1, tensor=2)},
}


def train(placement: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """Trains one step after a short warm start; returns the adapters and the metrics of the step."""
  policy = dataclasses.replace(make_config().policy, vocab_size=16)  # even; ids without a token have no probability
  config = make_config(
    num_steps=1, eval_episodes=0, critic=CriticConfig(), warm_start=WarmStartConfig(num_steps=2, batch_size=8),
    policy=policy, **placement,
  )  # fmt: skip
  with tempfile.TemporaryDirectory() as workdir:
    with Trainer(config, busy_domain(), workdir, console=Console(file=io.StringIO())) as trainer:
      trainer.train()
      adapters = jax.device_get(trainer._trained())
    rows, _ = read_metrics(pathlib.Path(workdir))
  return adapters, {name: rows[-1][name] for name in ("ratio_mean", "logprob_error", "policy_loss", "value_loss")}


def main() -> None:
  found = {name: train(placement) for name, placement in PLACEMENTS.items()}
  wanted = found["one"][0]
  reports = {}
  for name, (adapters, metrics) in found.items():
    differences = jax.tree.map(lambda x, y: float(np.max(np.abs(x - y))), adapters, wanted)
    reports[name] = {"difference": max(jax.tree.leaves(differences)), **metrics}
  print(json.dumps(reports))


if __name__ == "__main__":
  main()
