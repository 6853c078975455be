"""Trainable and frozen parameters: chosen by their paths, and reported in a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from sao_jax.parallel.rules import path_components
from sao_jax.types import Params

KINDS = ("attention", "MoE/MLP", "routers", "embeddings", "norms", "head", "other")
"""Kinds of modules: the rows of the report."""
PROJECTIONS_AND_HEAD = ("attention", "embeddings", "norms", "routers")
"""Frozen names with which the MoE or MLP projections and the head train: the paper's form for the value model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleCount:
  """Number of parameters of one kind of module."""

  name: str
  total: int
  trainable: int

  @property
  def frozen(self) -> int:
    return self.total - self.trainable


def split(params: Params, frozen: Sequence[str]) -> tuple[Params, Params]:
  """Splits `params` into `(trainable, frozen)`: two trees of the same structure, each with None for the other's leaves.

  A leaf is frozen if one whole component of its path, or its `module_kind`, is in `frozen`: `attention` freezes
  `layers_0/attention/q_norm/scale`, but not `layers_0/post_attention_norm/scale`, which `norms` freezes. JAX does not
  count None as a leaf, so gradients, optimizer states and checkpoints of the trainable part contain nothing of the
  frozen one.

  Args:
    params: a pytree of arrays.
    frozen: names of path components or of `KINDS`; with none, everything trains. A model may lack a kind (a dense one
      has no routers), except for attention.

  Raises:
    ValueError: a name matches no path, or nothing is left to train.

  >>> params = {"attention": {"kernel": jax.numpy.ones(2)}, "mlp": {"kernel": jax.numpy.ones(3)}}
  >>> trainable, frozen = split(params, ("attention",))
  >>> jax.tree.map(jax.numpy.shape, trainable)
  {'attention': {'kernel': None}, 'mlp': {'kernel': (3,)}}
  >>> jax.tree.map(jax.numpy.shape, frozen)
  {'attention': {'kernel': (2,)}, 'mlp': {'kernel': None}}
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  paths = [path_components(path) for path, _ in leaves]
  for name in frozen:
    if not any(name in path for path in paths) and (name not in KINDS or name == "attention"):
      known = sorted({component for path in paths for component in path})
      raise ValueError(
        f"frozen = {name!r} matches no parameter; the components of the paths are {known}, the kinds {KINDS}."
      )
  held = [module_kind(path) in frozen or any(name in path for name in frozen) for path in paths]
  if all(held):
    raise ValueError(f"frozen = {tuple(frozen)} leaves no parameter to train.")
  trainable = [None if h else leaf for h, (_, leaf) in zip(held, leaves, strict=True)]
  fixed = [leaf if h else None for h, (_, leaf) in zip(held, leaves, strict=True)]
  return jax.tree.unflatten(treedef, trainable), jax.tree.unflatten(treedef, fixed)


def merge(trainable: Params, frozen: Params) -> Params:
  """Undoes `split`."""
  return jax.tree.map(lambda t, f: f if t is None else t, trainable, frozen, is_leaf=lambda leaf: leaf is None)


def module_kind(path: Sequence[str]) -> str:
  """One of `KINDS` for a parameter, decided by the outermost component that names a kind of module.

  >>> module_kind(("layers_0", "attention", "q_norm", "scale")), module_kind(("final_norm", "scale"))
  ('attention', 'norms')
  >>> module_kind(("layers_0", "moe", "router", "kernel")), module_kind(("layers_0", "moe", "up_proj"))
  ('routers', 'MoE/MLP')
  """
  for component in path:
    if component == "attention":
      return "attention"
    if component in ("mlp", "moe"):
      return "routers" if "router" in path else "MoE/MLP"
    if component == "embed":
      return "embeddings"
    if component in ("lm_head", "value_head"):
      return "head"
    if component.endswith("norm"):
      return "norms"
  return "other"


def parameter_counts(params: Params, frozen: Sequence[str] = ()) -> list[ModuleCount]:
  """Counts parameters by kind of module, the total first. Absent kinds have no row, except for `attention`."""
  trainable, _ = split(params, frozen)
  kinds: dict[str, list[int]] = {"attention": [0, 0]}
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  trains = {path for path, _ in jax.tree_util.tree_flatten_with_path(trainable)[0]}
  for path, leaf in flat:
    count = kinds.setdefault(module_kind(path_components(path)), [0, 0])
    size = math.prod(leaf.shape)
    count[0] += size
    count[1] += size if path in trains else 0
  rows = [ModuleCount(name=name, total=kinds[name][0], trainable=kinds[name][1]) for name in KINDS if name in kinds]
  total = ModuleCount(name="total", total=sum(r.total for r in rows), trainable=sum(r.trainable for r in rows))
  return [total, *rows]


def parameter_report(params: Params, frozen: Sequence[str] = (), *, title: str = "parameters") -> str:
  """Formats `parameter_counts` as a table: count, share of the total, trainable, frozen, trainable share."""
  rows = parameter_counts(params, frozen)
  whole = max(rows[0].total, 1)
  lines = [f"{title:<12}{'count':>16}{'share':>9}{'trainable':>16}{'frozen':>16}{'trainable':>11}"]
  for row in rows:
    share = row.trainable / row.total if row.total else 0.0
    lines.append(
      f"{row.name:<12}{row.total:>16,}{row.total / whole:>9.1%}{row.trainable:>16,}{row.frozen:>16,}{share:>11.1%}"
    )
  return "\n".join(lines)
