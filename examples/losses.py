"""The losses in your own training loop, with plain JAX and optax: `python -m examples.losses`

An episode is [digit, action, observation, action]. It earns 1 if the last action is (digit + observation) % 10. The
rollouts use weights that are up to `LAG` updates old. `colab/05_use_it_in_your_jax_code` trains a neural network.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from sao_jax import ops

LAG = 4
OPTIMIZER = optax.adam(0.03)


def apply(table, tokens):
  """The model, a lookup table: `[B, 4]` tokens to `[B, 4, num_outputs]`. Position t sees only tokens before t."""
  observation = jnp.where(jnp.arange(4) == 3, tokens[:, 2:3], 10)  # 10: not seen yet
  return table[tokens[:, :1], observation]


@jax.jit
def generate(policy, key):
  """Returns tokens, action mask, rewards, and the log-probs that the actions were sampled with."""
  task_key, action_key = jax.random.split(key)
  tokens = jax.random.randint(task_key, (256, 4), 0, 10)
  mask = jnp.broadcast_to(jnp.arange(4) % 2 == 1, tokens.shape)  # True where the policy writes the token
  logits = apply(policy, tokens)
  tokens = jnp.where(mask, jax.random.categorical(action_key, logits), tokens)
  rewards = jnp.zeros(tokens.shape).at[:, 3].set(tokens[:, 3] == (tokens[:, 0] + tokens[:, 2]) % 10)
  return tokens, mask, rewards, ops.token_logprobs(logits, tokens)


def loss(params, tokens, mask, rewards, behavior_logp):
  """SAO's policy loss (Eq. 1) plus the critic's; the paper updates the critic first, twice."""
  values = apply(params["critic"], tokens)[..., 0]
  adv = jax.vmap(lambda r, v, m: ops.skip_observation_gae(r, v, m, discount=1.0, lambda_=0.67))(rewards, values, mask)
  logp = ops.token_logprobs(apply(params["policy"], tokens), tokens)
  policy_loss = ops.dis_policy_loss(logp, behavior_logp, adv, mask, eps_low=0.3, eps_high=5.0)
  returns = jnp.broadcast_to(rewards.sum(axis=1, keepdims=True), tokens.shape)
  return ops.masked_mean(policy_loss + ops.squared_value_loss(values, returns, mask), mask)


def main(num_steps: int = 200) -> float:
  params = {"policy": jnp.zeros((10, 11, 10)), "critic": jnp.zeros((10, 11, 1))}
  opt_state, gradient = OPTIMIZER.init(params), jax.jit(jax.grad(loss))
  for step in range(num_steps):
    if step % LAG == 0:
      rollout_policy = params["policy"]
    tokens, mask, rewards, behavior_logp = generate(rollout_policy, jax.random.key(step))
    updates, opt_state = OPTIMIZER.update(gradient(params, tokens, mask, rewards, behavior_logp), opt_state)
    params = optax.apply_updates(params, updates)
  return float(rewards.sum(axis=1).mean())


if __name__ == "__main__":
  print(f"success {main():.2f}")
