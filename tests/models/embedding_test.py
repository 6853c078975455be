"""Embeddings off a mesh; on one, `tests/parallel/split_program.py` compares whole engines."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from sao_jax.models.embedding import look_up


def test_ids_are_looked_up_and_clipped():
  table = jnp.arange(12.0).reshape(4, 3)
  x = look_up(table, jnp.array([[2, 0], [9, 3]]), jnp.bfloat16)
  assert x.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(table)[[[2, 0], [3, 3]]])
