"""A process of a learner with two engines in Ray workers: `python -m tests.training.ray_program WORKDIR`.

Each engine is on two virtual devices. The last line holds what the process knows at the end.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax

from sao_jax.parallel import EngineMeshConfig
from sao_jax.parallel.distributed import initialize_from_environment
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.training import loop
from sao_jax.training.components import Components
from tests.parallel.loop_program import make_config, make_domain


def main(workdir: str, mesh: str) -> None:
  initialize_from_environment()
  config = dataclasses.replace(
    make_config(mesh, "async", 3),
    cluster=ClusterConfig(
      num_engines=2,
      num_cpus=0.5,
      address="local",
      mesh=EngineMeshConfig(tensor=2),
      env_vars={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    ),
  )
  made: list[Components] = []

  class Recorded(Components):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      made.append(self)

    def close(self) -> None:
      self.last_counters = self.rollout_counters()
      super().close()

  loop.Components = Recorded
  summary = loop.train(config, make_domain(), pathlib.Path(workdir), make_domain=make_domain)
  parts = made[0]
  print(json.dumps({
    "processes": jax.process_count(), "summary": summary, "embedded": "engine" in vars(parts),
    "counters": parts.last_counters,
  }))  # fmt: skip


if __name__ == "__main__":
  main(*sys.argv[1:])
