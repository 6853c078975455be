"""A tiny policy and critic, and a packed batch whose shards hold very unequal numbers of action tokens."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.learner.config import LearnerConfig, OptimizerConfig
from sao_jax.learner.state import LearnerState, init_state
from sao_jax.models import ModelConfig, init_critic, init_policy
from sao_jax.types import TokenBatch

MODEL = ModelConfig(
  vocab_size=64, hidden_size=32, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=8, intermediate_size=32,
  num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, num_shared_experts=1, router="sigmoid",
  tie_word_embeddings=False,
)  # fmt: skip
"""One layer, since compiling takes most of the time: experts, and a shared expert, which is split like a dense one."""
MICROBATCHES, ROWS, LENGTH = 2, 8, 32
# A large eps makes Adam's first step smooth in the gradient: its noise is compared, not the noise's sign.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2, max_grad_norm=None)
LEARNER = LearnerConfig(
  policy_optimizer=OPTIMIZER, critic_optimizer=OPTIMIZER, eps_low=0.8, eps_high=3.0, critic_updates=2,
  kl_coef=0.1, entropy_coef=0.01,
  row_length=LENGTH, rows_per_microbatch=ROWS, logprob_chunk_size=64,
)  # fmt: skip


def fill(model: ModelConfig, init: Any, rng: np.random.Generator) -> Any:
  """Random parameters, the value head included (a zero one would hide the critic's trunk from the comparison)."""

  def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    norm = "norm" in jax.tree_util.keystr(path)
    return (rng.normal(size=leaf.shape) * (0.2 if norm or leaf.ndim > 1 else 0.05) + norm).astype(leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: init(model, jax.random.key(0))))


def make_state() -> LearnerState:
  rng = np.random.default_rng(1)
  state = init_state(LEARNER, fill(MODEL, init_policy, rng), fill(MODEL, init_critic, rng))
  return state._replace(reference=jax.tree.map(jnp.asarray, fill(MODEL, init_policy, rng)))


def make_batch(seed: int = 0) -> TokenBatch:
  """`[M, B, T]` NumPy arrays: rows from nearly empty to full, one or two segments each; the last rows are padding."""
  rng = np.random.default_rng(seed)
  shape = (MICROBATCHES, ROWS, LENGTH)
  segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  mask = np.zeros(shape, bool)
  for m in range(MICROBATCHES):
    for b in range(ROWS - 1 - m):
      cuts = [0, 4 + 4 * b] if b < 4 else [0, 6 + b, LENGTH]
      for number, (start, stop) in enumerate(itertools.pairwise(cuts), start=1):
        segments[m, b, start:stop] = number
        positions[m, b, start:stop] = np.arange(stop - start)
        mask[m, b, start + 2 : stop] = rng.random(stop - start - 2) < (0.1 if b % 2 else 0.9)
        mask[m, b, stop - 1] = True
  per_token = rng.random(shape).astype(np.float32)
  return TokenBatch(
    tokens=rng.integers(0, MODEL.vocab_size, shape, dtype=np.int32), positions=positions, segment_ids=segments,
    action_mask=mask, behavior_logp=np.where(mask, -3.5 - 1.5 * per_token, 0.0).astype(np.float32),
    rewards=np.where(mask & (per_token > 0.7), 1.0, 0.0).astype(np.float32),
    lambda_policy=np.where(segments > 0, 0.9, 0.0).astype(np.float32), turn_ids=mask.astype(np.int32),
    truncated=np.zeros(shape, bool), baseline_adv=np.zeros(shape, np.float32),
  )  # fmt: skip
