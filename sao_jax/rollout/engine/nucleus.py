"""Top-p sampling: which tokens are left to choose from."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def nucleus(logits: jax.Array, *, top_p: float) -> jax.Array:
  """Logits of the truncated distribution: -inf outside the nucleus.

  N = {a : Σ_{b : p_b > p_a} p_b < top_p},   z'_a = z_a if a ∈ N else -inf.

  The most probable tokens, as few as reach a mass of `top_p` (Holtzman et al., arXiv 1904.09751), but equally probable
  ones are all in or all out, so that the order of the vocabulary decides nothing. The most probable token is always in.

  softmax(z') is what is sampled from, so that it is also what log-probs are recorded of.

  Args:
    logits: `[S, V]` float32, already divided by the temperature.
    top_p: in (0, 1); at 1 there is nothing to leave out.

  Returns:
    `[S, V]` float32.
  """
  descending = jnp.sort(logits, axis=-1, descending=True)
  upto = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
  more_probable = jnp.pad(upto[:, :-1], ((0, 0), (1, 0)))
  size = jnp.sum(more_probable < top_p, axis=-1, keepdims=True)
  least = jnp.take_along_axis(descending, size - 1, axis=-1)
  return jnp.where(logits >= least, logits, -jnp.inf)
