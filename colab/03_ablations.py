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
# # Ablations
#
# `python -m experiments.ablate --suite=NAME` runs one of the paper's comparisons. Here: one suite at the size
# `--quick` (every stage of every arm, nothing is learned), then the committed full results.

# %%
# In Colab: set REPOSITORY to where you have the library. Here it takes a clone, in which the committed results lie.
import importlib.util
import os
import subprocess
import sys

REPOSITORY = "https://github.com/OWNER/sao_jax"
if importlib.util.find_spec("sao_jax") is None:
  subprocess.run(["git", "clone", "-q", REPOSITORY], check=True)
  os.chdir("sao_jax")
  subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", "."], check=True)

# %%
import pathlib
import tempfile

from IPython.display import Image, Markdown, display

import experiments
from experiments.ablations import results
from experiments.ablations.suites import SUITES

for name, suite in SUITES.items():
  print(f"{name:12} {len(suite.arms):2d} arms  {suite.title}")

# %%
workdir = pathlib.Path(tempfile.mkdtemp())
command = [
  sys.executable,
  "-m",
  "experiments.ablate",
  "--suite=granularity",
  "--seeds=1",
  "--quick",
  f"--workdir={workdir}",
]
if base := os.environ.get("SAO_JAX_NOTEBOOK_BASE"):  # what the tests run: a smaller base
  command.append(f"--base={base}")
subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
display(Markdown((workdir / "granularity" / "granularity.md").read_text()))
display(Image(filename=str(workdir / "granularity" / "granularity.png")))

# %% [markdown]
# ## The committed results
#
# Tables and plots are made anew here from the CSV files.

# %%
committed = pathlib.Path(experiments.__file__).parent / "results"
for name, suite in SUITES.items():
  path = committed / name / f"{name}.csv"
  if path.exists():
    rows = results.read_csv(path)
    display(Markdown(f"### {suite.title}\n\n{results.table(suite, rows)}"))
    results.plot(workdir / f"{name}.png", suite, rows)
    display(Image(filename=str(workdir / f"{name}.png")))
