"""The memory that a run needs: against what JAX really allocates, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from experiments.support import chaos_run
from experiments.tasks import digits
from sao_jax.training import memory
from sao_jax.training.components import Components


def test_what_is_counted_is_what_is_allocated():
  config = chaos_run.make_config("sync", num_steps=1)
  config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, kl_coef=0.1))
  with Components(config, digits.make_domain()) as parts:
    policy = parts.init_policy()
    state = parts.init_state(policy, parts.init_critic(policy))
    found = memory.needs(config, parts.placement.mesh, parts.placement.engine_meshes[0])
    cache = parts.placement.cached_policy(memory.models.cached_policy(config.policy)).init_cache(
      config.engine.num_pages + 1, config.engine.page_size
    )

  def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

  assert found["policy"] == size((state.policy, state.policy_opt))
  assert found["critic"] == size((state.critic, state.critic_opt))
  assert found["reference policy"] == size(state.reference) == size(state.policy)
  assert found["gradients"] == size(state.policy)
  assert found["weights of the engine"] == 2 * size(state.policy)
  assert found["cache of the engine"] == size(cache)
  without = dataclasses.replace(config, learner=dataclasses.replace(config.learner, kl_coef=0.0))
  assert memory.needs(without, parts.placement.mesh, parts.placement.engine_meshes[0])["reference policy"] == 0
  sampling = memory.needs(config, parts.placement.mesh, parts.placement.engine_meshes[0], learning=False)
  assert sampling == {
    "policy": size(policy), "weights of the engine": size(policy), "cache of the engine": size(cache),
  }  # fmt: skip


def test_a_run_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch):
  config = chaos_run.make_config("sync", num_steps=1)
  sizes = {"hidden_size": 16_384, "intermediate_size": 65_536, "num_layers": 40, "num_experts": 0}
  large = dataclasses.replace(config, policy=dataclasses.replace(config.policy, **sizes))
  message = (
    r"this run does not fit: it needs at least [\d.]+ GB, and [\d.]+ GB of the host's memory is "
    r"free for it\. In detail: policy [\d.]+ GB, critic .*The largest part that a setting changes is the policy: use "
    r"more devices along mesh\.fsdp, low-rank adapters \(lora\.rank\), or a smaller model\."
  )
  with pytest.raises(ValueError, match=message):
    Components(large, digits.make_domain())
  # The rollout engine's cache alone is too large.
  engine = dataclasses.replace(config.engine, num_slots=2**16)
  monkeypatch.setattr(memory, "host_memory", lambda total: 100_000_000)
  with pytest.raises(ValueError, match=r"cache of the engine: use a smaller engine\.cache_tokens"):
    Components(dataclasses.replace(config, engine=engine), digits.make_domain())
  monkeypatch.setattr(memory, "host_memory", lambda total: None)  # unknown: nothing is refused
  memory.check(large, *[Components(config, digits.make_domain()).placement.mesh] * 2)


def test_the_memory_of_the_host_is_read():
  free, total = memory.host_memory(), memory.host_memory(total=True)
  assert (free is None) == (total is None)
  assert free is None or 10_000_000 < free <= total < 10**15
