"""Savings in bytes and FLOPs by the learner's design: `python -m experiments.benchmarks.memory`.

Everything is compiled, nothing is run: sizes come from shapes and from XLA's own account of its temporaries. Other load
on the machine does not matter.

- The critic with frozen attention against the whole critic: bytes of parameters, of optimizer state, and of the sums of
  gradients in the compiled critic step. Frozen parameters have neither optimizer state nor gradients.
- The log-probs of 4,096 tokens at a vocabulary of 32,768 (d 256, float32), forward and backward, in chunks, against
  full logits.
- The head on action tokens only: FLOPs of the same log-probs, forward and backward, for all tokens and for the 30 %
  that are actions when turns have 32 action and 75 observation tokens. This is XLA's count for one chunk times the
  number of chunks that run.

Expected before the first measurement: optimizer state and gradients shrink by attention's share of the parameters, a
fifth of this model. Chunks of 512 tokens hold an eighth of the logits, twice in the backward pass, against two to three
arrays of full size: about 10 %.

Measured: optimizer state and gradients are 21.4 % smaller. Chunks of 256 tokens need 71.6 MB of temporaries against
1,074 MB (two arrays of logits). This is 6.7 %, or 13.3 % of one array; more than half of it is the gradient of the head
itself.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.benchmarks import decoding
from experiments.support import aot, command
from sao_jax.learner import init_state, learner_config, split
from sao_jax.models import init_critic, init_policy
from sao_jax.ops import logprobs

TURN = (32, 75)
"""The action tokens and observation tokens of a turn."""
TOKENS, VOCABULARY, WIDTH = 4_096, 32_768, 256


def critic_bytes(frozen: tuple[str, ...]) -> dict[str, int]:
  """Returns the bytes of the critic's parameters, gradients and optimizer state with these components frozen."""
  config = learner_config("sao", frozen_critic=frozen)
  key = jax.random.key(0)
  policy = jax.eval_shape(lambda: init_policy(decoding.MODEL, key))
  critic = jax.eval_shape(lambda: init_critic(decoding.MODEL, key))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (policy, critic))
  state = init_state(config, *zeros)
  trainable, _ = split(critic, frozen)
  return {
    "parameters": aot.total_bytes(critic),
    # Gradients are summed over microbatches in float32, which is also the dtype of the parameters here.
    "gradients": aot.total_bytes(trainable),
    "optimizer": aot.total_bytes(state.critic_opt),
  }


def logprob_temporaries(chunk_size: int | None) -> int:
  """Returns the bytes of temporaries of the compiled log-probs with their gradient; None computes full logits."""

  def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    if chunk_size is None:
      logp = logprobs.token_logprobs(hidden @ head, tokens)
    else:
      logp, _ = logprobs.chunked_token_logprobs(hidden, head, tokens, chunk_size=chunk_size)
    return jnp.sum(logp)

  shapes = (
    jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32),
    jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
  )
  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
  return int(compiled.memory_analysis().temp_size_in_bytes)


def head_flops(chunk_size: int) -> dict[str, float]:
  """Returns the FLOPs of the log-probs and their gradient for all tokens and for action tokens only."""
  mask = np.arange(TOKENS) % sum(TURN) < TURN[0]
  used, every, width = logprobs.masked_chunks(mask, chunk_size=chunk_size)

  def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.sum(logprobs.chunked_token_logprobs(hidden, head, tokens, chunk_size=width)[0])

  shapes = (
    jax.ShapeDtypeStruct((width, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32),
    jax.ShapeDtypeStruct((width,), jnp.int32),
  )
  of_a_chunk = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile().cost_analysis()["flops"]
  return {
    "action_share": float(mask.mean()),
    "head_flops_all_tokens": of_a_chunk * every,
    "head_flops_action_tokens": of_a_chunk * int(used),
  }


def run(*, chunk_size: int) -> dict[str, Any]:
  """Prints rows and returns the object of the last line."""
  whole, frozen = critic_bytes(()), critic_bytes(("attention",))
  print(f"{'critic, bytes':<16}{'all trained':>14}{'attention frozen':>18}{'saved':>8}")
  for name, value in whole.items():
    print(f"{name:<16}{value:>14,}{frozen[name]:>18,}{1.0 - frozen[name] / value:>8.1%}")
  full, chunked = logprob_temporaries(None), logprob_temporaries(chunk_size)
  logits = TOKENS * VOCABULARY * 4
  print(f"temporaries of the log-probs of {TOKENS:,} tokens, vocabulary {VOCABULARY:,}, forward and backward, in bytes")
  print(f"  full logits {full:,}; chunks of {chunk_size} {chunked:,}: {chunked / full:.1%}")
  print(f"  compared with one array of logits: {chunked / logits:.1%}")
  head = head_flops(chunk_size)
  share = head["head_flops_action_tokens"] / head["head_flops_all_tokens"]
  print(f"FLOPs of the head with {head['action_share']:.1%} action tokens: {share:.1%} of those for all tokens")
  return {
    **head,
    "critic_bytes_full": whole,
    "critic_bytes_frozen": frozen,
    "logprob_temporaries_full": full,
    "logprob_temporaries_chunked": chunked,
    "logprob_ratio": chunked / full,
    "logprob_share_of_logits": chunked / logits,
  }


def define_flags() -> None:
  """Defines the command's flags. Importing the module does not, since other commands use the same names."""
  flags.DEFINE_integer("chunk_size", 256, "The number of tokens whose logits exist at a time.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  print(json.dumps(run(chunk_size=flags.FLAGS["chunk_size"].value)))


if __name__ == "__main__":
  define_flags()
  command.run(main)
