# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Use it in your JAX code
#
# The functions of `sao_jax.ops` need no engine, config or loop of this library. Here they train a plain Flax NNX model
# with optax. A policy and a value model learn a two-turn toy task from rollouts of an older policy.

# %%
# Installs the library if it is missing: from the checkout around this notebook, or else from REPOSITORY.
import importlib.util
import pathlib
import shutil
import subprocess
import sys

REPOSITORY = ""  # in Colab: the address of the library's repository, to be cloned
if importlib.util.find_spec("sao_jax") is None:
  here = pathlib.Path.cwd()
  above = [folder for folder in (here, *here.parents) if (folder / "sao_jax" / "version.py").exists()]
  checkout = above[0] if above else here / "checkout"
  if not checkout.exists():
    if not REPOSITORY:
      raise ValueError("set REPOSITORY, in this cell, to the address of the library's repository")
    subprocess.run(["git", "clone", "-q", "--depth=1", REPOSITORY, str(checkout)], check=True)
  extra = "[cuda12]" if shutil.which("nvidia-smi") else ""
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", f"{checkout}{extra}"], check=True)
  sys.path.insert(0, str(checkout))

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sao_jax.ops import advantages, logprobs, masking, policy_losses, value_losses

# %% tags=["parameters"]
NUM_STEPS = 300
LAG = 4  # rollouts come from the policy of LAG updates ago

# %% [markdown]
# An episode is a prompt digit `d`, a first action, an observation (a random digit `o`) and a second action. The reward
# is 1 if the second action is `(d + o) % 10`; the first action does not matter. The tokens are `[d, a0, o, a1]`, with
# actions at positions 1 and 3.


# %%
class Net(nnx.Module):
  """Predicts at each position from all tokens before it, one-hot."""

  def __init__(self, outputs: int, rngs: nnx.Rngs):
    self.hidden = nnx.Linear(40, 128, rngs=rngs)
    self.out = nnx.Linear(128, outputs, rngs=rngs)

  def __call__(self, tokens):
    seen = jnp.tril(jnp.ones((4, 4)), -1)  # position t sees the tokens before it
    flat = (seen[None, :, :, None] * jax.nn.one_hot(tokens, 10)[:, None]).reshape(*tokens.shape, 40)
    return self.out(jax.nn.relu(self.hidden(flat)))


policy, value = Net(10, nnx.Rngs(0)), Net(1, nnx.Rngs(1))
policy_opt = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
value_opt = nnx.Optimizer(value, optax.adam(3e-3), wrt=nnx.Param)
ACTIONS = jnp.array([False, True, False, True])


@nnx.jit
def rollout(policy, key, prompts):
  """Returns episodes, the log-probs that their actions were sampled with, and rewards."""
  keys = jax.random.split(key, 3)
  tokens = jnp.zeros((prompts.shape[0], 4), jnp.int32).at[:, 0].set(prompts)
  for t, k in ((1, keys[0]), (3, keys[1])):
    tokens = tokens.at[:, t].set(jax.random.categorical(k, policy(tokens)[:, t]))
    if t == 1:
      tokens = tokens.at[:, 2].set(jax.random.randint(keys[2], prompts.shape, 0, 10))
  logp = logprobs.token_logprobs(policy(tokens), tokens)
  right = tokens[:, 3] == (tokens[:, 0] + tokens[:, 2]) % 10
  return tokens, jnp.where(ACTIONS, logp, 0.0), jnp.zeros(tokens.shape).at[:, 3].set(right)


# %% [markdown]
# One learner step, as in the paper: two updates of the value model, values from the updated model, skip-observation
# GAE, and an update of the policy with DIS.


# %%
@nnx.jit
def learn(policy, value, policy_opt, value_opt, tokens, behavior_logp, rewards):
  mask = jnp.broadcast_to(ACTIONS, tokens.shape)
  returns = jnp.broadcast_to(rewards.sum(axis=1, keepdims=True), tokens.shape)  # discount 1, lambda 1

  def value_loss(value):
    return masking.masked_mean(value_losses.squared_value_loss(value(tokens)[..., 0], returns, mask), mask)

  for _ in range(2):
    value_opt.update(value, nnx.grad(value_loss)(value))
  lambda_ = advantages.length_adaptive_lambda(mask.sum(axis=1))
  gae = jax.vmap(lambda r, v, m, l: advantages.skip_observation_gae(r, v, m, discount=1.0, lambda_=l))
  adv = jax.lax.stop_gradient(gae(rewards, value(tokens)[..., 0], mask, lambda_))

  def policy_loss(policy):
    logp = logprobs.token_logprobs(policy(tokens), tokens)
    per_token = policy_losses.dis_policy_loss(logp, behavior_logp, adv, mask, eps_low=0.3, eps_high=5.0)
    return masking.masked_mean(per_token, mask)

  policy_opt.update(policy, nnx.grad(policy_loss)(policy))
  return rewards.sum(axis=1).mean()


# %%
graph, newest = nnx.split(policy)
history = [newest] * (LAG + 1)
success = []
for step in range(NUM_STEPS):
  key = jax.random.key(step)
  older = nnx.merge(graph, history[0])
  prompts = jax.random.randint(key, (256,), 0, 10)
  success.append(float(learn(policy, value, policy_opt, value_opt, *rollout(older, key, prompts))))
  history = [*history[1:], nnx.state(policy)]
print("success, first and last steps:", np.round(success[:3], 2), np.round(success[-3:], 2))
assert NUM_STEPS < 100 or np.mean(success[-10:]) > 0.5

# %% [markdown]
# Your own model can also train in the whole loop, with the engine, the queue and asynchronous rollouts. See
# `sao_jax.models.nnx_adapter`.
