"""The notebooks: each is its text form, and runs."""

from __future__ import annotations

import pathlib
import re

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

COLAB = pathlib.Path(__file__).parents[1] / "colab"
NAMES = (
  "01_losses_and_gae",
  "02_train_an_agent",
  "03_ablations",
  "04_your_own_environment",
  "05_use_it_in_your_jax_code",
)


def test_every_notebook_has_its_text_form():
  assert sorted(path.stem for path in COLAB.glob("*.ipynb")) == sorted(path.stem for path in COLAB.glob("*.py"))
  assert sorted(path.stem for path in COLAB.glob("*.py")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_say_the_same_and_hold_no_outputs(name):
  notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
  text = jupytext.read(COLAB / f"{name}.py")
  assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
    (cell.cell_type, cell.source) for cell in text.cells
  ]
  assert not any(cell.get("outputs") for cell in notebook.cells)
  assert 'find_spec("sao_jax") is None' in notebook.cells[1].source  # the install cell


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run(name, monkeypatch):
  """In a kernel of their own, at the smallest size."""
  monkeypatch.setenv("SAO_JAX_NOTEBOOK_SIZE", "tiny")
  monkeypatch.setenv("SAO_JAX_NOTEBOOK_BASE", "tests.experiments.tiny_base:make_config")
  monkeypatch.setenv("PYTHONPATH", str(COLAB.parent))
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
  NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": str(COLAB)}}).execute()
  texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
  assert not re.search(r"Error|Traceback", "".join(texts))
  shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
  assert shown, "a notebook that shows nothing"
