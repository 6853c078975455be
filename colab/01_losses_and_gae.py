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
# # Losses and advantages beside their equations
#
# Every function of `sao_jax.ops` is pure: arrays in, arrays out, float32 results. Index $t$ of a per-token array
# describes `tokens[t]`. Masks are bool; True marks an action token, which the policy wrote. Equation numbers are those
# of [arXiv 2607.07508](https://arxiv.org/abs/2607.07508). The functions run under `jax.jit` here, as in a training
# step. Without it the results are the same, but JAX compiles each operation separately.

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
import matplotlib.pyplot as plt
import numpy as np

from sao_jax.ops import advantages, baselines, diagnostics, importance, logprobs, masking, policy_losses, value_losses

# %% [markdown]
# ## Log-probs: `logprobs`, `masking.align_predictions`
#
# $\log \pi(a) = z_a/\tau - \operatorname{logsumexp}(z/\tau)$, with $\tau$ the temperature that the engine samples at. A
# model's output at index $t$ predicts `tokens[t + 1]`. `align_predictions` is the only shift in the library.
# `chunked_token_logprobs` computes log-probs and entropies from hidden states, and never holds the logits of all
# tokens.

# %%
rng = np.random.default_rng(0)
tokens = np.array([[3, 0, 2, 1]])
hidden, lm_head = rng.normal(size=(1, 4, 8)), rng.normal(size=(8, 5))


@jax.jit
def score(hidden):
  aligned = masking.align_predictions(hidden)
  whole = logprobs.token_logprobs(aligned @ lm_head, tokens, temperature=0.7)
  return whole, logprobs.chunked_token_logprobs(aligned, lm_head, tokens, temperature=0.7, chunk_size=2)


whole, (chunked, entropy) = score(hidden)
print("log-probs", whole, "entropies", entropy)
np.testing.assert_allclose(whole, chunked, atol=1e-2)  # some accelerators multiply matrices at low precision

# %% [markdown]
# ## Direct double-sided importance sampling: `importance`
#
# $$r_t = \exp\big(\log \pi_\theta(a_t|s_t) - \log \pi_{\text{rollout}}(a_t|s_t)\big) \quad \text{(Eq. 2)} \qquad f(r) =
# \begin{cases} r & 1 - \epsilon_{low} < r < 1 + \epsilon_{high} \\ 0 & \text{else}\end{cases} \quad \text{(Eq. 3)}$$
#
# The paper's values for mathematics, 0.3 and 5.0, keep the open interval (0.7, 6): both bounds are strict.

# %%
DIS = {"eps_low": 0.3, "eps_high": 5.0}
ratios = np.array([0.5, 0.7, 0.71, 1.0, 5.5, 6.0, 7.0])
behavior_logp = np.full(ratios.shape, -2.0)
logp = behavior_logp + np.log(ratios)
np.testing.assert_allclose(jax.jit(importance.importance_ratio)(logp, behavior_logp), ratios, rtol=1e-6)
kept = jax.jit(importance.dis_mask)(logp, behavior_logp, **DIS)
coefficients = jax.jit(importance.dis_coefficient)(logp, behavior_logp, **DIS)
for ratio, keep, coefficient in zip(ratios, kept, coefficients, strict=True):
  print(f"r = {ratio:4.2f}  {'kept  ' if keep else 'masked'}  f(r) = {coefficient:4.2f}")
assert kept.tolist() == [False, False, True, True, True, False, False]

# %% [markdown]
# ## The policy's objective: `policy_losses.dis_policy_loss`
#
# $$L = \mathbb{E}_t\big[f(r_t)\, A_t \log \pi_\theta(a_t|s_t)\big] \quad \text{(Eq. 1, maximised)}$$
#
# $f(r_t) A_t$ is a coefficient: no gradient flows through it. So the gradient of the loss with respect to
# $\log \pi_\theta$ is $-f(r_t) A_t$. `masked_mean` divides by all action tokens, including those that DIS masks: more
# masking makes a smaller step.


# %%
def loss(x):
  return policy_losses.dis_policy_loss(x, -2.1, 2.0, True, **DIS)


gradient = jax.jit(jax.grad(loss))(-2.0)
print("gradient", float(gradient), "expected", -float(np.exp(0.1)) * 2.0)
np.testing.assert_allclose(gradient, -np.exp(0.1) * 2.0, rtol=1e-5)

everywhere = np.ones(ratios.shape, bool)
per_token = jax.jit(policy_losses.dis_policy_loss)(logp, behavior_logp, 1.0, everywhere, **DIS)
mean = jax.jit(masking.masked_mean)(per_token, everywhere)
print("loss", float(mean), "over", ratios.size, "tokens, of which 3 contribute")
np.testing.assert_allclose(mean, -(kept * ratios * logp).sum() / 7, rtol=1e-5)

# %% [markdown]
# ## The other policy losses
#
# $r_t = \pi_\theta/\pi_{old}$ in the losses that keep a $\pi_{old}$:
#
# | | per-token loss |
# |---|---|
# | `ppo_clip_loss` | $-\min\big(r_t A_t, \operatorname{clip}(r_t, 1 - c_{low}, 1 + c_{high}) A_t\big)$ |
# | `icepop_loss` | $M(k_t)$ times that, $k_t = \pi_{old}/\pi_{rollout}$, $M(k) = k$ in $[low, high]$, else 0 |
# | `truncated_is_loss` | $-\min(r_t, cap)\, A_t \log \pi_\theta$, $r_t = \pi_\theta/\pi_{rollout}$, held constant |
# | `gspo_loss` | PPO's with one ratio for the sequence, $s = \exp\big(\frac{1}{l} \sum_t \log r_t\big)$ |
#
# The plot shows the weight that each loss gives to the score $\nabla \log \pi_\theta$ of a token, over the ratio, for a
# good and a bad action. DIS masks on both sides, whatever the sign of $A_t$. PPO's clipping masks only where the update
# would lead further away from $\pi_{old}$. Truncation masks nothing. (Here $\pi_{old} = \pi_{rollout}$, as in a batch
# without lag.)

# %%
grid = np.linspace(0.05, 7.0, 400)
base = np.full(grid.shape, -3.0)
mask = np.ones(grid.shape, bool)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES = {
  "DIS": lambda x, adv: policy_losses.dis_policy_loss(x, base, adv, mask, **DIS),
  "PPO clip": lambda x, adv: policy_losses.ppo_clip_loss(x, base, adv, mask, **CLIP),
  "truncated IS": lambda x, adv: policy_losses.truncated_is_loss(x, base, adv, mask, cap=2.0),
}
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2))
for axis, adv in zip(axes, (1.0, -1.0), strict=False):
  for name, function in LOSSES.items():
    scores = jax.jit(jax.grad(lambda x, f=function, a=adv: f(x, a).sum()))(base + np.log(grid))
    axis.plot(grid, -scores / adv, label=name)
  axis.set(title=f"advantage {adv:+.0f}", xlabel="ratio", ylabel="weight of the token")


# IcePop masks by the mismatch of the two engines. Here the policy has not moved since the rollout (r = 1).
def icepop(x):
  return policy_losses.icepop_loss(x, base, base - np.log(grid), 1.0, mask, low=0.5, high=5.0, **CLIP).sum()


axes[2].plot(grid, -jax.jit(jax.grad(icepop))(base), color="C3", label="IcePop")
axes[2].set(title="advantage +1, policy not moved", xlabel="mismatch k", ylabel="weight of the token")
for axis in axes:
  axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=3, fontsize=8, frameon=False)
plt.show()

# %% [markdown]
# GSPO has one ratio for the sequence, so a sequence is clipped as a whole. Two tokens with ratios 2 and 1/2 have a mean
# of 1, and GSPO keeps both. PPO's clipping removes the first.

# %%
old = np.array([-2.0, -2.0])
new = old + np.log([2.0, 0.5])
both = np.array([True, True])
for name, function in (("PPO clip", policy_losses.ppo_clip_loss), ("GSPO", policy_losses.gspo_loss)):
  print(name, jax.jit(jax.grad(lambda x, f=function: f(x, old, 1.0, both, **CLIP).sum()))(new))

# %% [markdown]
# ## Skip-observation GAE: `advantages.skip_observation_gae`, `skip_observation_returns`
#
# With $t'$ the next ACTION token of the trajectory:
#
# $$\delta_t = r_t + \gamma V(s_{t'}) - V(s_t), \qquad A_t = \delta_t + \gamma \lambda A_{t'} \quad \text{(Eqs. 4, 5)}$$
#
# This is GAE over the subsequence of action tokens. The value at an observation is never read, and observations get
# advantage 0. Here the middle token is an observation with an absurd value. The critic's targets are $A_t + V(s_t)$
# with the critic's own $\lambda = 1$, which is the Monte-Carlo return.

# %%
rewards = np.array([0.0, 0.0, 1.0])
values = np.array([0.2, 999.0, 0.4])
actions = np.array([True, False, True])
adv = jax.jit(advantages.skip_observation_gae)(rewards, values, actions, discount=1.0, lambda_=1.0)
returns = jax.jit(advantages.skip_observation_returns)(rewards, values, actions, discount=1.0, lambda_=1.0)
print("advantages", adv, "targets", returns)
np.testing.assert_allclose(adv, [0.8, 0.0, 0.6], rtol=1e-6)
np.testing.assert_allclose(returns, [1.0, 0.0, 1.0], rtol=1e-6)

# %% [markdown]
# ## Length-adaptive lambda: `advantages.length_adaptive_lambda`
#
# $\lambda = \max\big(0, 1 - \frac{1}{\alpha l}\big)$ with $\alpha = 1.5$ and $l$ the number of action tokens. In a long
# trajectory the reward reaches as far back as in a short one. The right plot shows the weight $\lambda^{l - 1}$ of the
# last token's reward in the advantage of the first.

# %%
lengths = np.arange(1, 200)
adaptive = np.asarray(jax.jit(advantages.length_adaptive_lambda)(lengths))
figure, axes = plt.subplots(1, 2, figsize=(10, 2.8))
axes[0].plot(lengths, adaptive)
axes[0].set(xlabel="action tokens", ylabel="lambda")
axes[1].plot(lengths, adaptive ** (lengths - 1), label="length-adaptive")
axes[1].plot(lengths, 0.95 ** (lengths - 1), label="0.95 for all")
axes[1].set(xlabel="action tokens", ylabel="weight of the last token")
axes[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
plt.show()

# %% [markdown]
# ## One advantage per turn: `advantages.step_level_gae` (appendix A.1)
#
# The same recursion over turns: $\delta_i = R_i + \gamma V(S_{i+1}) - V(S_i)$. $V(S_i)$ is the mean of the values of
# the turn's tokens, or the value of its last token. All tokens of a turn get the turn's advantage.

# %%
rewards = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
values = np.array([0.1, 0.3, 0.0, 0.5, 0.8])
actions = np.array([True, True, False, True, True])
SETTINGS = {"discount": 1.0, "lambda_": 0.9}
print("token level     ", jax.jit(advantages.skip_observation_gae)(rewards, values, actions, **SETTINGS))
step_level_gae = jax.jit(advantages.step_level_gae, static_argnames="step_value")
for kind in ("mean", "last"):
  found = step_level_gae(rewards, values, actions, **SETTINGS, step_value=kind)
  print(f"step level, {kind}", found)

# %% [markdown]
# ## Without a value model: `advantages.group_relative_advantages`, `baselines`
#
# GRPO compares the rollouts of one prompt, $A_i = (R_i - \operatorname{mean}_g)/(\operatorname{std}_g + 10^{-6})$, and
# so waits for the slowest of them. A running mean remembers the last $W$ rewards of each prompt. Take its value before
# the update: a baseline must not contain the reward that it is subtracted from. `ValueTracker` (SPO,
# [arXiv 2509.13232](https://arxiv.org/abs/2509.13232)) forgets faster when the policy changes faster.

# %%
rewards = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
groups = np.array([0, 0, 0, 1, 1, 1])
group_relative = jax.jit(advantages.group_relative_advantages, static_argnames="num_groups")
print("GRPO", group_relative(rewards, groups, num_groups=2))

RHO = {"rho_min": 0.875, "rho_max": 0.96}


@jax.jit
def read_and_update(states, prompts, rewards):
  """Returns the values before the rewards, and the states after them."""
  mean, tracker = states
  values = mean.value(prompts), tracker.value(prompts)
  return values, (mean.update(prompts, rewards), tracker.update(prompts, rewards, 0.01, half_life=0.06, **RHO))


states = baselines.RunningMean.init(2, window=2), baselines.ValueTracker.init(np.full(2, 0.5), rho_min=RHO["rho_min"])
for prompt, reward in ((0, 1.0), (0, 0.0), (0, 0.0), (1, 1.0)):
  (mean, tracked), states = read_and_update(states, np.array([prompt]), np.array([reward]))
  print(f"prompt {prompt}: running mean {mean[0]:.3f}, value tracker {tracked[0]:.3f}, then reward {reward:g}")

# %% [markdown]
# ## The value model's losses: `value_losses`
#
# `squared_value_loss` is $(V(s_t) - R_t)^2$ on action tokens. `clipped_value_loss` is PPO's: the larger of that loss
# and the loss of a value clipped to within $c$ of the old one.

# %%
v, old_v = np.array([0.5, 9.0, 0.9]), np.array([0.5, 0.0, 0.5])
target, mask = np.array([1.0, 0.0, 1.0]), np.array([True, False, True])
print("squared", jax.jit(value_losses.squared_value_loss)(v, target, mask))
print("clipped", jax.jit(value_losses.clipped_value_loss)(v, old_v, target, mask, clip=0.2))

# %% [markdown]
# ## Diagnostics and whitening: `diagnostics`, `masking.masked_whiten`
#
# - Explained variance, $EV = 1 - \operatorname{Var}(R - V)/\operatorname{Var}(R)$: the part of the returns' variance
#   that the value model explains.
# - Approximate KL, $\operatorname{mean}(r - 1 - \log r)$: the distance of the policy from the engine's.
# - Effective sample size, $(\sum r)^2/\sum r^2$: how many on-policy tokens the batch is worth.
#
# `masked_whiten` standardises over True entries. SAO does not use it.

# %%
returns, mask = np.array([1.0, 0.0, 1.0, 0.0]), np.ones(4, bool)
explained_variance = jax.jit(diagnostics.explained_variance)
for guess in ([0.5, 0.5, 0.5, 0.5], [0.8, 0.3, 0.9, 0.2]):
  print("values", guess, "explain", round(float(explained_variance(np.array(guess), returns, mask)), 3))
everywhere = np.ones(ratios.shape, bool)
print("KL", float(jax.jit(diagnostics.approx_kl)(logp, behavior_logp, everywhere)))
size = float(jax.jit(diagnostics.effective_sample_size)(logp, behavior_logp, everywhere))
print(f"effective tokens {size:.2f} of {ratios.size}")
print("whitened", jax.jit(masking.masked_whiten)(np.array([1.0, 3.0, 99.0]), np.array([True, True, False])))
