"""The notebooks: each is its text form, and runs."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from experiments.ablations import suites
from sao_jax.training import config as config_lib
from tests.child_environment import FAST_COMPILE
from tests.experiments import tiny_base

ROOT = pathlib.Path(__file__).parents[1]
COLAB = ROOT / "colab"
NAMES = (
  "01_losses_and_gae",
  "02_train_an_agent",
  "03_ablations",
  "04_your_own_environment",
  "05_use_it_in_your_jax_code",
)


def read(name):
  return nbformat.read(COLAB / f"{name}.ipynb", as_version=4)


def test_every_notebook_has_its_text_form():
  assert sorted(path.stem for path in COLAB.glob("*.ipynb")) == list(NAMES)
  assert sorted(path.stem for path in COLAB.glob("*.py")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_say_the_same_and_hold_no_outputs(name):
  notebook, text = read(name), jupytext.read(COLAB / f"{name}.py")
  assert [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells] == [
    (cell.cell_type, cell.source, cell.metadata) for cell in text.cells
  ]
  assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.fixture
def install(monkeypatch):
  """Runs the install cell, which is the same everywhere, as if the library were missing; returns its commands."""
  cells = {read(name).cells[1].source for name in NAMES}
  assert len(cells) == 1
  ran = []
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command[-2:]) or check)
  monkeypatch.setattr(shutil, "which", lambda name: None)
  monkeypatch.setattr("sys.path", [])

  def run(repository):
    (cell,) = cells
    changed = cell.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}")
    assert changed != cell
    exec(changed, {})
    return ran

  return run


def test_install_cell_takes_the_checkout_around_it_or_a_clone(tmp_path, monkeypatch, install):
  monkeypatch.chdir(COLAB)
  assert install("nowhere") == [["-e", str(ROOT)]]
  monkeypatch.chdir(tmp_path)
  clone = str(tmp_path / "checkout")
  assert install("https://host/name.git")[1:] == [["https://host/name.git", clone], ["-e", clone]]


def test_install_cell_asks_for_the_repository(tmp_path, monkeypatch, install):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="set REPOSITORY"):
    install("")


@pytest.fixture
def run(monkeypatch):
  """Executes a notebook in a kernel of its own; returns its text and how many pictures it shows.

  `parameters` stand in place of the values in its parameters cell; `code` follows them.
  """
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
  monkeypatch.setenv("XLA_FLAGS", " ".join(FAST_COMPILE))

  def execute(name, code="", **parameters):
    notebook = read(name)
    marked = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    if parameters:
      (index,) = marked
      names = {line.partition(" = ")[0] for line in notebook.cells[index].source.splitlines() if " = " in line}
      assert parameters.keys() == names
      lines = [f"{key} = {value!r}" for key, value in parameters.items()]
      notebook.cells.insert(index + 1, nbformat.v4.new_code_cell("\n".join([*lines, code])))
    place = {"metadata": {"path": str(COLAB)}}
    NotebookClient(notebook, timeout=None, startup_timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    data = [output.get("data", {}) for output in outputs]
    shown = [x.get("text/html") or x.get("text/markdown") or "" for x in data]
    return "\n".join([*(x.get("text", "") for x in outputs), *shown]), sum("image/png" in x for x in data)

  return execute


def smaller(preset):
  """Code that makes a preset's policy the smallest one that still has all its parts."""
  return f"""
make_config = {preset}.make_config
sizes = dict(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=1, num_kv_heads=1)
if make_config().policy.num_experts:
  sizes.update(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
{preset}.make_config = lambda: dataclasses.replace(
  make_config(), policy=dataclasses.replace(make_config().policy, **sizes)
)
"""


SIZES = {"WARM_START_STEPS": 2, "NUM_STEPS": 2, "EVAL_EPISODES": 8, "BATCH_SIZE": 16}


def test_losses_and_gae(run):
  text, pictures = run("01_losses_and_gae")
  assert "r = 6.00  masked  f(r) = 0.00" in text and "advantages [0.8 0.  0.6] targets [1. 0. 1.]" in text
  assert pictures == 2


@pytest.mark.timeout(900)
def test_train_an_agent(run):
  text, pictures = run("02_train_an_agent", smaller("tool_math_cpu"), **SIZES, PRETRAINING_TRAJECTORIES=16)
  assert "(n = 8)" in text and "warm_start" in text
  assert text.count("solved, ") == 4 and re.search(r"</span><sub>[01]", text)  # trajectories, and who wrote them
  assert pictures >= 5


@pytest.mark.timeout(900)
def test_your_own_environment(run):
  text, pictures = run("04_your_own_environment", smaller("ablation_cpu"), **SIZES, PRETRAINING_TRAJECTORIES=0)
  assert "(n = 8)" in text and text.count("solved ") == 3 and "7 -> reward 1.0" in text
  assert pictures == 1


def test_use_it_in_your_jax_code(run):
  text, _ = run("05_use_it_in_your_jax_code", NUM_STEPS=6, LAG=4)
  assert "success, first and last steps:" in text


def make_finished_suite(folder, name, base):
  """The workdir of a suite whose runs have all ended, as far as the command looks at it."""
  config = suites.quick(base)
  (folder / "base").mkdir()
  (folder / "base" / "config.json").write_text(json.dumps(config_lib.to_json(config)))
  (folder / "start" / "seed0").mkdir(parents=True)
  (folder / "start" / "seed0" / "done").touch()
  for i, arm in enumerate(suites.SUITES[name].arms):
    run = folder / "runs" / f"{arm.slug}_lr{config.learner.policy_optimizer.learning_rate:g}" / "seed0"
    run.mkdir(parents=True)
    rows = [{"step": step, "success_rate": i / 10, "explained_variance": 0.5} for step in range(1, 5)]
    rows.append({"step": 4, "eval_success_rate": i / 10 + 0.123, "eval_n": 16})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "summary.json").touch()


def test_ablations(run, tmp_path):
  """The command finds the suite's runs there, and makes table and plots; `ablate_test` runs one from the start."""
  make_finished_suite(tmp_path, "granularity", tiny_base.make_config())
  base = "tests.experiments.tiny_base:make_config"
  text, pictures = run("03_ablations", SUITE="granularity", BASE=base, WORKDIR=str(tmp_path))
  assert "| step level, last token | 0.001 | 1 | 1 | 0.323 | 0.200 |" in text
  committed = [name for name in suites.SUITES if (ROOT / "experiments" / "results" / name / f"{name}.csv").exists()]
  assert pictures >= 1 + len(committed) and text.count("Not run yet.") == len(suites.SUITES) - len(committed)
