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
# # Train an agent
#
# The main job, small: a policy learns to solve math problems by calling a Python tool over several turns. Warm start,
# value pretraining, then SAO with asynchronous rollouts. About two minutes on a free CPU with the `quick` budget; set
# `BUDGET = "full"` for the run of the README.

# %%
# In Colab: set REPOSITORY to where you have the library. Where it is installed there is nothing to do.
import importlib.util
import subprocess
import sys

REPOSITORY = "https://github.com/OWNER/sao_jax"
if importlib.util.find_spec("sao_jax") is None:
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"git+{REPOSITORY}"], check=True)

# %%
import dataclasses
import os
import tempfile

from IPython.display import Image, Markdown, display

from experiments import config_flags, plots
from experiments.domains.factory import make_domain
from experiments.presets import tool_math_cpu
from sao_jax import loop
from sao_jax.config import RunConfig
from sao_jax.io import trajectories
from sao_jax.io.metrics import read_metrics

BUDGET = "quick"
config = config_flags.from_config_dict(RunConfig, tool_math_cpu.get_config(BUDGET))
if os.environ.get("SAO_JAX_NOTEBOOK_SIZE") == "tiny":  # what the tests run: every stage, seconds each
  config = dataclasses.replace(
    config,
    num_steps=2,
    batch_size=16,
    eval_episodes=8,
    warm_start=dataclasses.replace(config.warm_start, num_steps=3, batch_size=16),
    critic=dataclasses.replace(config.critic, pretraining_trajectories=16, pretraining_epochs=1),
    engine=dataclasses.replace(config.engine, num_slots=16),
    env=dataclasses.replace(config.env, options={**config.env.options, "train_size": 200, "eval_size": 20}),
  )
workdir = tempfile.mkdtemp()

# %% [markdown]
# `loop.train` runs the three stages in a folder and returns a summary. Called again, it goes on from what is there.

# %%
summary = loop.train(config, make_domain(config), workdir)
print(f"held-out success {summary['success_before']:.3f} -> {summary['success_after']:.3f} (n = {summary['n']})")
print({stage: round(seconds, 1) for stage, seconds in summary["seconds_by_stage"].items()})

# %% [markdown]
# Trajectories: what the policy wrote and what the tool answered.

# %%
for sample in trajectories.read(f"{workdir}/trajectories.jsonl")[-4:]:
  outcome = "solved" if sample.success else "not solved"
  display(
    Markdown(f"**{outcome}, {sample.num_turns} turns, reward {sample.total_reward:g}**\n\n```\n{sample.text}\n```")
  )

# %% [markdown]
# Plots of the run, and a row of its metrics.

# %%
for path in plots.plot_run(workdir):
  display(Image(filename=str(path)))
steps, evaluations = read_metrics(workdir)
keys = ("success_rate", "staleness_mean", "dis_masked_fraction", "explained_variance", "entropy")
{key: steps[-1][key] for key in keys}
