"""One learner step on all devices of all processes; process 0 writes the new parameters. Last line: metrics as JSON."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.parallel import make_mesh, parse_mesh, place, place_batch, replicated
from sao_jax.parallel.distributed import initialize_from_environment, is_main_process
from tests.parallel import tiny
from tests.parallel.compare_program import sharded_step


def main(path: str) -> None:
  initialize_from_environment()
  mesh = make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))
  whole = tiny.make_batch()
  state = tiny.make_state()
  step = sharded_step(mesh, state, whole)
  new_state, metrics = step(place(state, mesh), place_batch(whole, mesh), jnp.asarray(tiny.MICROBATCHES, jnp.int32))
  trained = jax.jit(lambda x: x, out_shardings=replicated(mesh))((new_state.policy, new_state.critic))
  if is_main_process():
    np.savez(path, *(np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(trained)))
  metrics = {name: float(value.addressable_data(0)) for name, value in metrics.items()}
  print(json.dumps({"processes": jax.process_count(), "devices": jax.device_count(), "metrics": metrics}))


if __name__ == "__main__":
  main(sys.argv[1])
