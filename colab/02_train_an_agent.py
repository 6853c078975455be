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
# # Train an agent
#
# A smaller form of `python -m experiments.train`: a policy of 0.2 M parameters learns to solve math problems by calling
# a Python tool over several turns. The stages are a warm start on demonstrations, value pretraining on the policy's own
# trajectories, and SAO with asynchronous rollouts.

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
import dataclasses
import html
import tempfile

from IPython.display import HTML, Image, display

from experiments import plots
from experiments.presets import tool_math_cpu
from experiments.tasks.factory import make_domain
from sao_jax.io import trajectories
from sao_jax.io.metrics import read_metrics
from sao_jax.training import loop

# %% tags=["parameters"]
# The run in the README has 800 warm-start steps, 1024 pretraining trajectories, 150 steps and 512 evaluation episodes.
WARM_START_STEPS = 400
PRETRAINING_TRAJECTORIES = 512
NUM_STEPS = 60
EVAL_EPISODES = 256
BATCH_SIZE = 128

# %% [markdown]
# The config of a run is a frozen dataclass. Every field has a docstring and is checked.

# %%
full = tool_math_cpu.make_config()
warm_start_optimizer = dataclasses.replace(
  full.warm_start.optimizer, warmup_steps=WARM_START_STEPS // 16, decay_steps=WARM_START_STEPS
)
policy_optimizer = dataclasses.replace(full.learner.policy_optimizer, decay_steps=NUM_STEPS)
config = dataclasses.replace(
  full,
  num_steps=NUM_STEPS,
  batch_size=BATCH_SIZE,
  eval_episodes=EVAL_EPISODES,
  warm_start=dataclasses.replace(full.warm_start, num_steps=WARM_START_STEPS, optimizer=warm_start_optimizer),
  critic=dataclasses.replace(full.critic, pretraining_trajectories=PRETRAINING_TRAJECTORIES),
  learner=dataclasses.replace(full.learner, policy_optimizer=policy_optimizer),
  checkpoint=dataclasses.replace(full.checkpoint, every_steps=10),  # also saves a sample of trajectories
)
print(config.algorithm, config.schedule, config.learner.eps_low, config.learner.eps_high)

# %% [markdown]
# `loop.train` runs the three stages in a folder and returns a summary. Called again after an interruption, it continues
# from there.

# %%
workdir = tempfile.mkdtemp()
domain = make_domain(config)
summary = loop.train(config, domain, workdir)
print(f"held-out success {summary['success_before']:.3f} -> {summary['success_after']:.3f} (n = {summary['n']})")
print({stage: round(seconds, 1) for stage, seconds in summary["seconds_by_stage"].items()})

# %% [markdown]
# ## Trajectories
#
# Text that the policy wrote is blue. Text that it was given (the problem, the tool's answers) is grey. The numbers are
# the policy versions that wrote an action. One trajectory can have several, since the engine takes up new weights while
# it generates.


# %%
def render(sample):
  """Renders a trajectory as HTML, with a span for each run of action tokens or of other tokens."""
  pieces, start = [], 0
  for end in range(1, len(sample.tokens) + 1):
    if end < len(sample.tokens) and sample.action_mask[end] == sample.action_mask[start]:
      continue
    text = html.escape(domain.tokenizer.decode(sample.tokens[start:end].tolist()))
    if sample.action_mask[start]:
      versions = sorted({int(version) for version in sample.versions[start:end]})
      pieces.append(f"<span style='color:#2f6db5'>{text}</span><sub>{' '.join(map(str, versions))}</sub>")
    else:
      pieces.append(f"<span style='color:#777777'>{text}</span>")
    start = end
  outcome = f"{'solved' if sample.success else 'not solved'}, {sample.num_turns} turns, {sample.ended}"
  return f"<p><b>{outcome}</b></p><pre style='white-space:pre-wrap'>{' '.join(pieces)}</pre>"


samples = trajectories.read(f"{workdir}/trajectories.jsonl")
for sample in [*samples[:2], *samples[2:][-3:]]:
  display(HTML(render(sample)))

# %% [markdown]
# ## Plots and metrics

# %%
for path in plots.plot_run(workdir):
  display(Image(filename=str(path)))
steps, evaluations = read_metrics(workdir)
for key in ("success_rate", "staleness_mean", "mixed_version_fraction", "dis_masked_fraction", "entropy"):
  print(f"{key:24} {steps[0][key]:8.4f} -> {steps[-1][key]:8.4f}")
