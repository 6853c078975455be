"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + (α / r) B A x, with W frozen.

The adapters of a model are a tree of their own. Each adapted `layers.Linear` has `kernel_lora_a` `[in, r]` and
`kernel_lora_b` `[r, out]`, at the path of its `kernel`. `join` puts them into the frozen parameters, and
`with_adapters` makes a model read them there. `merge` computes W + (α / r) A B for the rollout engine and for export.

This is written here, and not taken from qwix, because qwix 0.1.8 replaces functions of JAX and Flax (`jax.numpy.dot`,
`flax.linen.Module.param`) in the whole process while it traces a model. Other threads that call them when the trace
ends get a `KeyError`. Here the rollout engine works in other threads while the learner compiles. Moreover qwix passes
over experts and latent attention without a word, and float32 adapters turn bfloat16 activations into float32. The
parameters have qwix's names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key

from sao_jax.models.config import ModelConfig
from sao_jax.models.heads import init_policy
from sao_jax.models.layers import Linear
from sao_jax.models.transformer import Transformer
from sao_jax.types import AnyArray, Params

F = TypeVar("F", bound=Callable[..., Any])
A, B = "kernel_lora_a", "kernel_lora_b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """Adapters of the policy and of the critic.

  They train, and so does the critic's value head. All other parameters are frozen, and policy and critic share them.
  """

  rank: int | None = None
  """r. None: no adapters; all parameters of the policy train."""
  alpha: float = 16.0
  """α: the adapters' output is scaled by α / r."""
  modules: str = r".*_proj"
  """Regular expression for the whole path of a module, such as `layers_0/attention/q_proj` or
  `layers_0/mlp/gate_proj`. The default adapts the projections of attention, MLPs and shared experts. Expert layers,
  routers, latent attention, embeddings and heads have no adapters."""

  def __post_init__(self) -> None:
    if self.rank is not None and self.rank < 1:
      raise ValueError(f"lora.rank must be >= 1, or None for no adapters; received {self.rank!r}.")
    if not 0.0 < self.alpha < float("inf"):
      raise ValueError(f"lora.alpha must be > 0 and finite; received {self.alpha!r}.")
    try:
      re.compile(self.modules)
    except re.error as error:
      raise ValueError(f"lora.modules must be a regular expression; received {self.modules!r}: {error}.") from error

  @property
  def enabled(self) -> bool:
    """Whether there are adapters."""
    return self.rank is not None

  @property
  def scale(self) -> float:
    """α / r."""
    return self.alpha / _rank(self)


def _rank(lora: LoraConfig) -> int:
  if lora.rank is None:
    raise ValueError("lora.rank is None: there are no adapters.")
  return lora.rank


def init_adapters(config: ModelConfig, lora: LoraConfig, key: Key[Array, ""]) -> Params:
  """Initial adapters of a policy, in float32; the key is consumed.

  A is uniform in ±1 / sqrt(in), as in PEFT. B is zero, so that the adapters change nothing at first.

  Args:
    config: the architecture.
    lora: rank and modules.
    key: PRNG key.

  Returns:
    Nested dict with `kernel_lora_a` `[in, r]` and `kernel_lora_b` `[r, out]` of every adapted module.

  Raises:
    ValueError: `lora.modules` matches no module or one that cannot be adapted, or the rank is not below the dimensions
      of a module.

  >>> config = ModelConfig(
  ...   vocab_size=8, hidden_size=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=4
  ... )
  >>> adapters = init_adapters(config, LoraConfig(rank=1, modules=r".*/q_proj"), jax.random.key(0))
  >>> jax.tree.map(jax.numpy.shape, adapters)
  {'layers_0': {'attention': {'q_proj': {'kernel_lora_a': (4, 1), 'kernel_lora_b': (1, 4)}}}}
  """
  adapters: dict[str, Any] = {}
  chosen, rank = _chosen(config, lora), _rank(lora)
  for (path, (fan_in, fan_out)), one in zip(chosen.items(), jax.random.split(key, len(chosen)), strict=True):
    node = adapters
    for name in path:
      node = node.setdefault(name, {})
    bound = fan_in**-0.5
    node[A] = jax.random.uniform(one, (fan_in, rank), jnp.float32, -bound, bound)
    node[B] = jnp.zeros((rank, fan_out), jnp.float32)
  return adapters


def init_trained(config: ModelConfig, lora: LoraConfig, key: Key[Array, ""]) -> Params:
  """Initial values of what a policy trains: its adapters, or all parameters where there are none; see `init_policy`."""
  return init_adapters(config, lora, key) if lora.enabled else init_policy(config, key)


def _chosen(config: ModelConfig, lora: LoraConfig) -> dict[tuple[str, ...], tuple[int, int]]:
  """Returns the sizes `(in, out)` of the adapted kernels, by the paths of their modules."""
  linear: dict[tuple[str, ...], tuple[int, int]] = {}

  def record(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    if isinstance(context.module, Linear) and context.method_name == "__call__":
      linear[context.module.path] = (args[0].shape[-1], context.module.features)
    return next_fun(*args, **kwargs)

  with nn.intercept_methods(record):
    jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))

  def matches(path: tuple[str, ...]) -> bool:
    return re.fullmatch(lora.modules, "/".join(path)) is not None

  chosen = {path: sizes for path, sizes in linear.items() if matches(path)}
  known = ", ".join(sorted({"/".join(("layers_*", *path[1:])) for path in linear}))
  for path, leaf in jax.tree_util.tree_flatten_with_path(_policy_shapes(config))[0]:
    *module, _ = (entry.key for entry in path)
    if len(leaf.shape) > 1 and matches(tuple(module)) and tuple(module) not in linear:
      raise ValueError(
        f"lora.modules = {lora.modules!r} matches {'/'.join(module)}, which cannot have adapters; these can: {known}."
      )
  if not chosen:
    raise ValueError(f"lora.modules = {lora.modules!r} matches no module; these can have adapters: {known}.")
  for path, sizes in chosen.items():
    if _rank(lora) >= min(sizes):
      raise ValueError(
        f"lora.rank must be below the dimensions of every adapted module; received {lora.rank} with "
        f"{'/'.join(path)}, of {sizes[0]} x {sizes[1]}."
      )
  return chosen


def _policy_shapes(config: ModelConfig) -> Params:
  return jax.eval_shape(lambda: init_policy(config, jax.random.key(0)))


def join(base: Params, trained: Params) -> Params:
  """Returns one tree with the leaves of two: frozen parameters, and adapters with or without a value head.

  >>> base = {"q_proj": {"kernel": jnp.ones((4, 3))}}
  >>> joined = join(base, {"q_proj": {"kernel_lora_a": jnp.ones((4, 2))}, "value_head": jnp.ones(4)})
  >>> jax.tree.map(jnp.shape, joined)
  {'q_proj': {'kernel': (4, 3), 'kernel_lora_a': (4, 2)}, 'value_head': (4,)}
  """
  joined = dict(base)
  for name, value in trained.items():
    joined[name] = join(base[name], value) if name in base else value
  return joined


def with_adapters(lora: LoraConfig, apply: F) -> F:
  """Makes a `PolicyApply` or `ValueApply` of this package read the adapters among its parameters (`join`).

  They are cast to the model's compute dtype, as its kernels are. Where there are no adapters, returns `apply` itself.
  """
  if not lora.enabled:
    return apply
  scale = lora.scale

  def add(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    y = next_fun(*args, **kwargs)
    module = context.module
    if not isinstance(module, Linear) or context.method_name != "__call__" or not module.has_variable("params", A):
      return y
    dtype = module.config.compute_dtype
    a, b = (jnp.asarray(module.get_variable("params", name), dtype) for name in (A, B))
    return y + jnp.dot(jnp.dot(args[0].astype(dtype), a), b) * scale

  def adapted(*args: Any, **kwargs: Any) -> Any:
    with nn.intercept_methods(add):
      return apply(*args, **kwargs)

  return adapted  # type: ignore[return-value]


def merge(lora: LoraConfig, base: Params, adapters: Params) -> Params:
  """Returns the kernels of all adapted modules as W + (α / r) A B, computed in float32, in W's dtype.

  Args:
    lora: decides α / r.
    base: the frozen parameters.
    adapters: of a policy.

  Returns:
    A tree of the adapted kernels only.
  """
  if A in adapters:
    a, b, kernel = adapters[A], adapters[B], base["kernel"]
    return {"kernel": (kernel.astype(jnp.float32) + _product(a, b) * lora.scale).astype(kernel.dtype)}
  return {name: merge(lora, base[name], adapters[name]) for name in adapters}


def merge_all(lora: LoraConfig, base: Params, adapters: Params) -> Params:
  """Returns the whole policy with the adapters merged into its kernels (`merge`)."""
  return replace(base, merge(lora, base, adapters))


def _product(a: Float32[AnyArray, "I r"], b: Float32[AnyArray, "r O"]) -> Float32[Array, "I O"]:
  return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def replace(params: Params, new: Params) -> Params:
  """Returns `params` with the leaves of `new`, which has some of its paths, in place of its own."""
  if not isinstance(new, Mapping):
    return new
  return {name: replace(value, new[name]) if name in new else value for name, value in params.items()}


def without(params: Params, paths: Params) -> Params:
  """Returns the leaves of `params` at none of the paths of `paths`; empty dicts are left out."""
  rest = {}
  for name, value in params.items():
    if name not in paths:
      rest[name] = value
    elif isinstance(value, Mapping) and (left := without(value, paths[name])):
      rest[name] = left
  return rest
