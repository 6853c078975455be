# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Losses and advantages, beside their equations
#
# Every function of `sao_jax.ops` is pure: arrays in, arrays out. This notebook calls each one on a few numbers and
# shows which tokens each method leaves out.

# %%
# In Colab: set REPOSITORY to where you have the library. Where it is installed there is nothing to do.
import importlib.util
import subprocess
import sys

REPOSITORY = "https://github.com/OWNER/sao_jax"
if importlib.util.find_spec("sao_jax") is None:
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{REPOSITORY}"], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from sao_jax.ops import advantages, importance, policy_losses

# %% [markdown]
# ## Direct double-sided importance sampling (Eqs. 1 to 3)
#
# $r_t = \exp(\log \pi_\theta(a_t|s_t) - \log \pi_{\text{rollout}}(a_t|s_t))$, and $f(r) = r$ inside $(1 -
# \epsilon_{low}, 1 + \epsilon_{high})$, else 0. With the paper's 0.3 and 5.0 that is $(0.7, 6)$.

# %%
ratios = jnp.array([0.5, 0.7, 0.71, 1.0, 5.5, 6.0, 7.0])
behavior_logp = jnp.full(ratios.shape, -2.0)
logp = behavior_logp + jnp.log(ratios)
kept = importance.dis_coefficient(logp, behavior_logp, eps_low=0.3, eps_high=5.0)
for ratio, coefficient in zip(ratios, kept, strict=True):
  print(f"r = {ratio:4.2f}  f(r) = {coefficient:4.2f}")

# %% [markdown]
# The objective is $L = \mathbb{E}_t[f(r_t) A_t \log \pi_\theta(a_t|s_t)]$ with $f(r_t) A_t$ a coefficient: the
# gradient of the loss with respect to $\log \pi$ is exactly $-r_t A_t$.


# %%
def loss(x):
  args = (jnp.array([-2.1]), jnp.array([2.0]), jnp.array([True]))
  return policy_losses.dis_policy_loss(x, *args, eps_low=0.3, eps_high=5.0).sum()


gradient = jax.grad(loss)(jnp.array([-2.0]))
print("gradient", float(gradient[0]), "expected", -float(np.exp(0.1)) * 2.0)
np.testing.assert_allclose(gradient, [-np.exp(0.1) * 2.0], rtol=1e-5)

# %% [markdown]
# ## What masks what
#
# The size of the gradient over the ratio, for a good and a bad action. DIS cuts on both sides whatever the sign of the
# advantage; PPO cuts only where the update would go further from the old policy; truncated importance sampling never
# cuts.

# %%
grid = jnp.linspace(0.05, 7.0, 400)
base = jnp.full(grid.shape, -3.0)
mask = jnp.ones(grid.shape, bool)
shown = base + jnp.log(grid)


def gradients(adv):
  adv = jnp.full(grid.shape, adv)
  found = {
    "DIS": lambda x: policy_losses.dis_policy_loss(x, base, adv, mask, eps_low=0.3, eps_high=5.0),
    "PPO clip": lambda x: policy_losses.ppo_clip_loss(x, base, adv, mask, clip_low=0.2, clip_high=0.28),
    "truncated IS": lambda x: policy_losses.truncated_is_loss(x, base, adv, mask, cap=2.0),
  }
  return {name: jax.grad(lambda x, f=f: f(x).sum())(shown) for name, f in found.items()}


figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
for axis, adv in zip(axes, (1.0, -1.0), strict=True):
  for name, value in gradients(adv).items():
    axis.plot(grid, -value * adv, label=name)
  axis.set(title=f"advantage {adv:+.0f}", xlabel="ratio", ylabel="weight of the token")
axes[0].legend()
plt.show()

# %% [markdown]
# ## Skip-observation GAE (Eqs. 4 and 5)
#
# GAE over the subsequence of action tokens: the value at an observation is never read, and observations get advantage
# 0. Here the middle token is an observation with an absurd value.

# %%
adv = advantages.skip_observation_gae(
  jnp.array([0.0, 0.0, 1.0]), jnp.array([0.2, 999.0, 0.4]), jnp.array([True, False, True]), discount=1.0, lambda_=1.0
)
print(adv)
np.testing.assert_allclose(adv, [0.8, 0.0, 0.6], rtol=1e-6)

# %% [markdown]
# ## Length-adaptive lambda
#
# $\lambda = 1 - 1/(\alpha l)$ with $\alpha = 1.5$ and $l$ the number of action tokens: long trajectories look further
# ahead.

# %%
lengths = jnp.arange(1, 200)
plt.figure(figsize=(5, 2.8))
plt.plot(lengths, advantages.length_adaptive_lambda(lengths))
plt.xlabel("action tokens")
plt.ylabel("lambda")
plt.show()

# %% [markdown]
# ## One advantage per turn, or per token
#
# The step-level variants of the appendix give all tokens of a turn the same advantage.

# %%
rewards = jnp.array([0.0, 0.0, 0.0, 0.0, 1.0])
values = jnp.array([0.1, 0.3, 0.0, 0.5, 0.8])
actions = jnp.array([True, True, False, True, True])
print("token level  ", advantages.skip_observation_gae(rewards, values, actions, discount=1.0, lambda_=0.9))
for kind in ("mean", "last"):
  found = advantages.step_level_gae(rewards, values, actions, discount=1.0, lambda_=0.9, step_value=kind)
  print(f"step level {kind}", found)

# %% [markdown]
# ## Groups
#
# GRPO compares the rewards of one prompt's rollouts with one another; SAO needs no groups.

# %%
rewards = jnp.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
groups = jnp.array([0, 0, 0, 1, 1, 1])
print(advantages.group_relative_advantages(rewards, groups, num_groups=2))
