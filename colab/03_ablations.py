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
# # Ablations
#
# `python -m experiments.ablate --suite=NAME --seeds=N --tune --workdir=DIR` runs one of the paper's comparisons. It
# trains every arm with every seed, half a minute of one CPU core each, and writes a CSV file, a table and plots. This
# notebook runs one suite at the size `--quick`, which goes through every stage of every arm and learns nothing. Then it
# shows the committed results of all suites.

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
import tempfile

from IPython.display import Image, Markdown, display

import experiments
from experiments.ablations import report, results
from experiments.ablations.suites import SUITES

for name, suite in SUITES.items():
  print(f"{name:12} {len(suite.arms):2d} arms  {suite.title}")
root = pathlib.Path(experiments.__file__).parents[1]

# %% tags=["parameters"]
SUITE = "granularity"
BASE = "experiments.presets.ablation_cpu:make_config"
WORKDIR = tempfile.mkdtemp()

# %% [markdown]
# ## A suite, quickly
#
# For real results, use more seeds, add `--tune` and leave out `--quick`.

# %%
workdir = pathlib.Path(WORKDIR)
command = [sys.executable, "-m", "experiments.ablate", f"--suite={SUITE}", f"--base={BASE}", "--seeds=1", "--quick"]
done = subprocess.run(
  [*command, f"--workdir={workdir}"], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
)
if done.returncode:
  raise RuntimeError(done.stdout)
display(Markdown((workdir / SUITE / f"{SUITE}.md").read_text()))
display(Image(filename=str(workdir / SUITE / f"{SUITE}.png")))

# %% [markdown]
# ## The committed results
#
# Tables and plots are made here from the CSV files under `experiments/results/`. `RESULTS.md` explains them.

# %%
committed = root / "experiments" / "results"
for name, suite in SUITES.items():
  if not (committed / name / f"{name}.csv").exists():
    display(Markdown(f"### {suite.title}\n\n{report.NOTHING}"))
    continue
  folder = workdir / "committed" / name
  folder.mkdir(parents=True, exist_ok=True)
  shutil.copy(committed / name / f"{name}.csv", folder)
  results.draw_all(folder, name, suite, made="")
  display(Markdown(f"### {suite.title}\n\n{results.table(suite, results.read_csv(folder / f'{name}.csv'))}"))
  for path in sorted(folder.glob("*.png")):
    display(Image(filename=str(path)))
