"""Top-p (nucleus) truncation of logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def nucleus(logits: jax.Array, *, top_p: float) -> jax.Array:
  """Sets the logits outside the nucleus to -inf.

    N = {a : Σ_{b : p_b > p_a} p_b < top_p},   z'_a = z_a if a ∈ N else -inf

  N is the smallest set of most probable tokens with a mass of `top_p` (Holtzman et al., arXiv 1904.09751). Deviation:
  equally probable tokens are all in N or all outside, so that the order of the vocabulary has no influence. The most
  probable token is always in N.

  Tokens are sampled from softmax(z'), and log-probs are recorded under it.

  Args:
    logits: `[S, V]` float32, already divided by the temperature.
    top_p: probability mass of the nucleus, in (0, 1).

  Returns:
    `[S, V]` float32.

  >>> nucleus(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), top_p=0.6)[0] > -jnp.inf
  Array([ True,  True, False], dtype=bool)
  """
  descending = jnp.sort(logits, axis=-1, descending=True)
  upto = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
  more_probable = jnp.pad(upto[:, :-1], ((0, 0), (1, 0)))
  size = jnp.sum(more_probable < top_p, axis=-1, keepdims=True)
  least = jnp.take_along_axis(descending, size - 1, axis=-1)
  return jnp.where(logits >= least, logits, -jnp.inf)
