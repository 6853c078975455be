"""Published weights are copies, which stay valid when the learner donates its own."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.rollout import WeightStore
from tests.waiting import LONG_S


def test_publish_survives_donation():
  # PITFALL 26: the learner's jitted update donates the parameters it just published.
  update = jax.jit(lambda p: jax.tree.map(lambda x: x + 1.0, p), donate_argnums=0)
  store = WeightStore()
  params = {"a": jnp.zeros((1000,)), "b": {"c": jnp.ones((3, 4))}}
  held = []
  for version in range(20):
    store.publish(params, version)
    held.append(store.latest())
    old = params
    params = update(params)
    assert old["a"].is_deleted()
  for version, (copy, seen) in enumerate(held):
    assert seen == version
    np.testing.assert_array_equal(copy["a"], np.full((1000,), float(version)))
    np.testing.assert_array_equal(copy["b"]["c"], np.full((3, 4), 1.0 + version))


def test_no_buffer_is_shared():
  params = {"a": jnp.zeros((8,))}
  store = WeightStore()
  store.publish(params, 0)
  assert store.latest()[0]["a"].unsafe_buffer_pointer() != params["a"].unsafe_buffer_pointer()


def test_versions_must_increase():
  store = WeightStore()
  with pytest.raises(RuntimeError, match="before the first publish"):
    store.latest()
  store.publish({"a": jnp.zeros(2)}, 3)
  with pytest.raises(ValueError, match="received 3 after 3"):
    store.publish({"a": jnp.zeros(2)}, 3)
  assert store.latest()[1] == 3


def test_wait_for():
  store = WeightStore()
  assert not store.wait_for(0, timeout=0.01)
  thread = threading.Timer(0.05, store.publish, ({"a": jnp.zeros(2)}, 2))
  thread.start()
  assert store.wait_for(1, timeout=LONG_S)
  thread.join()
