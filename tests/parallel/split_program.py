"""Engines on meshes of virtual devices against one device: `python -m tests.parallel.split_program PLACEMENT ...`.

A PLACEMENT is `LEARNER MESH:ROLLOUT SETTINGS`, such as `data=4:placement=split,num_engines=2,tensor=2`. The last line
holds, for each, the trajectories of one `generate`, whether the weights arrived as they were, where they lie, and
whether engines decode while the learner's lock is held; with 8 devices, also what the loop reports on the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax import models
from sao_jax.io.metrics import read_metrics
from sao_jax.models import ModelConfig
from sao_jax.parallel import (
  MeshConfig,
  RolloutMeshConfig,
  cached_on_mesh,
  make_mesh,
  parse_engine_mesh,
  parse_mesh,
  place,
  shardings_for,
)
from sao_jax.parallel.engine_weights import cast_for_engine, jit_layout, layout_mesh, send
from sao_jax.parallel.rules import ENGINE_RULES
from sao_jax.rollout.engine import ModelRunner, Row, StepSpec
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.training import loop
from sao_jax.training.components import Components
from sao_jax.types import Params
from tests.parallel import loop_program

MODEL = ModelConfig(
  model_type="qwen3_moe", vocab_size=16, hidden_size=24, num_layers=2, num_heads=12, num_kv_heads=6, head_dim=4,
  intermediate_size=24, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=8, init_std=0.25,
  mlp_only_layers=(0,), tie_word_embeddings=False,
)  # fmt: skip
REQUESTS = [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(20)]


def parse(placement: str) -> dict[str, Any]:
  mesh, _, rollout = placement.partition(":")
  pairs = dict(part.split("=") for part in filter(None, rollout.split(",")))
  kind: Any = pairs.pop("placement", "colocated")
  sizes = {name: int(size) for name, size in pairs.items()}
  return {"mesh": parse_mesh(mesh), "rollout_mesh": RolloutMeshConfig(placement=kind, **sizes)}


def arrived(weights: Params, sent: Params) -> bool:
  """Whether an engine's weights are the learner's, cast where the model casts them."""
  wanted = cast_for_engine(sent, MODEL.compute_dtype)
  same = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(np.array_equal(x, y)), weights, wanted)
  return all(jax.tree.leaves(same))


def sent_as_bfloat16(params: Params, learner: int, engine: str) -> bool:
  """Sends weights from a mesh of `learner` devices to one of the next devices, in the compute dtype bfloat16."""
  config, devices = parse_engine_mesh(engine), jax.devices()
  target = make_mesh(config, devices[learner : learner + (config.num_devices() or 0)])
  source = make_mesh(MeshConfig(data=learner), devices[:learner])
  layout = layout_mesh(source, tuple(target.shape.values()))
  got = send(jit_layout(params, layout, jnp.bfloat16)(place(params, source)), target)
  wanted = cast_for_engine(params, jnp.bfloat16)
  same = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(np.array_equal(x, y)), got, wanted)
  kernel = got["layers_1"]["attention"]["q_proj"]["kernel"]
  assert kernel.dtype == jnp.bfloat16 and set(kernel.devices()) == set(target.devices.flat)
  return all(jax.tree.leaves(same))


def generate(parts: Components, weights: Params) -> dict[int, tuple[list[int], list[float]]]:
  done = {x.episode_id: x for x in parts.engine.generate(lambda _: (weights, 0), REQUESTS, seed=1)}
  return {i: (done[i].tokens.tolist(), np.nan_to_num(done[i].behavior_logp).tolist()) for i in sorted(done)}


def samples_over_pages(params: Params, tensor: int) -> dict[str, Any]:
  """Runs two steps over pages on `tensor` devices: a prompt in pieces beside a row that decodes."""
  mesh = make_mesh(parse_engine_mesh(f"tensor={tensor}"), jax.devices()[:tensor])
  policy = cached_on_mesh(models.cached_policy(MODEL), mesh, contextlib.nullcontext)
  spec = StepSpec(model=policy, chunk_steps=4, temperature=1.0, stop_ids=(), use_pages=True)
  runner = ModelRunner(spec, num_slots=3, num_pages=12, page_size=8, max_pages=4, token_budget=20)
  weights = jax.device_put(params, shardings_for(params, mesh, ENGINE_RULES))
  prompt, pages, key = np.arange(3, 15, dtype=np.int32), ([3, 1, 5], [2, 9, 4]), jax.random.key(0)
  steps = (
    [Row(0, 0, prompt[:7], 0, pages[0]), Row(1, 0, prompt[2:5], 4, pages[1])], [Row(0, 7, prompt[7:], 4, pages[0])]
  )  # fmt: skip
  outputs = [runner.fetch(runner.step(weights, rows, key)) for rows in steps]
  kv = runner._cache["layers_1"]["kv"]
  return {
    "tokens": [x.tokens.tolist() for x in outputs],
    "logp": [x.logp.tolist() for x in outputs],
    "num_sampled": [x.num_sampled.tolist() for x in outputs],
    "heads_per_device": kv.sharding.shard_shape(kv.shape)[2] // 2,
  }


def generates_while_learner_dispatches(parts: Components, weights: Params, limit_s: float) -> bool:
  """Holds the learner's lock until the engines have finished the episodes, which are compiled, or time is up."""
  finished = threading.Event()

  def call() -> None:
    with contextlib.closing(parts.engine.generate(lambda _: (weights, 0), REQUESTS, seed=1)) as episodes:
      list(episodes)
    finished.set()

  thread = threading.Thread(target=call)
  with parts.placement.dispatching():
    thread.start()
    alone = finished.wait(limit_s)
  thread.join()
  return alone


def train(placement: str) -> dict[str, Any]:
  """Runs two steps of the asynchronous loop; returns its last row of metrics."""
  config = dataclasses.replace(loop_program.make_config("data=1", "async", 2), **parse(placement))
  with tempfile.TemporaryDirectory() as workdir:
    loop.train(config, loop_program.make_domain(), workdir)
    rows, _ = read_metrics(pathlib.Path(workdir))
  names = ("step", "trajectories", "failed_episodes", "learner_busy_fraction")
  return {name: rows[-1][name] for name in names}


def main(*placements: str) -> None:
  base = dataclasses.replace(loop_program.make_config("data=1", "sync", 1), policy=MODEL)
  base = dataclasses.replace(
    base,
    engine=dataclasses.replace(base.engine, num_slots=12),
    learner=dataclasses.replace(base.learner, rows_per_microbatch=12),
  )
  reports = {}
  for placement in placements:
    config = dataclasses.replace(base, **parse(placement))
    with Components(config, loop_program.make_domain()) as parts:
      params = models.init_policy(MODEL, jax.random.key(0))
      weights = parts.placement.for_engine(parts.placement.put(params))
      split = config.rollout_mesh.placement == "split"
      each = weights if split else [weights]
      reports[placement] = {
        "episodes": generate(parts, weights),
        "overlaps": generates_while_learner_dispatches(parts, weights, 60.0 if split else 2.0),
        "arrived": all(arrived(one, params) for one in each),
        "devices": [sorted(d.id for d in one["embed"]["embedding"].devices()) for one in each],
        "engines": len(parts.placement.engine_meshes),
        "counted": parts.engine.counters["episodes_finished"],
      }
  if jax.device_count() == 8:
    reports["loop"] = train(placements[0])
  if jax.device_count() == 12:
    params = models.init_policy(MODEL, jax.random.key(0))
    reports["pages"] = {tensor: samples_over_pages(params, tensor) for tensor in (1, 3, 4)}
    for engine in ("tensor=2,expert=3", "tensor=4", "data=5"):  # in as many shards, in more, and in fewer
      assert sent_as_bfloat16(params, 6, engine), engine
  print(json.dumps(reports))


if __name__ == "__main__":
  main(*sys.argv[1:])
