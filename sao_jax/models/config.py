"""`ModelConfig`: the architecture of a decoder of one of the `MODEL_TYPES`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from sao_jax.models.token_ids import TokenIds

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm_moe_dsa")
DTYPES = ("float32", "bfloat16", "float16")
MOE_IMPLEMENTATIONS = ("auto", "ragged", "blocks", "dense", "gmm")
ATTENTION_IMPLEMENTATIONS = ("auto", "xla", "heads_first", "chunked", "splash")
ROUTERS = ("softmax", "sigmoid")
REMAT_POLICIES = ("none", "full", "dots")
INDEXER_TYPES = ("full", "shared")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_FLOAT_MAX = 1.7976931348623157e308


def _check(name: str, received: Any, allowed: bool, want: str) -> None:
  if not allowed:
    raise ValueError(f"{name} must be {want}; received {received!r:.200}.")


def _check_choice(name: str, received: Any, allowed: tuple[str, ...]) -> None:
  _check(name, received, received in allowed, f"one of {allowed}")


def _check_kinds(config: Any) -> None:
  """Checks the fields' types, and that numbers are in range: configurations may come from untrusted files."""
  for field in dataclasses.fields(config):
    value, name, kind = getattr(config, field.name), f"{type(config).__name__}.{field.name}", str(field.type)
    if value is None and kind.endswith("| None"):
      continue
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if kind == "bool":
      _check(name, value, isinstance(value, bool), "true or false")
    elif kind == "int":
      _check(name, value, number and isinstance(value, int) and abs(value) < 2**31, "an int below 2**31")
    elif kind.startswith("float"):
      _check(name, value, number and abs(value) <= _FLOAT_MAX, "a finite number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Scaling of rotary frequencies beyond the length that a model was first trained on."""

  rope_type: str = "default"
  """'default' (none), 'linear', 'llama3' or 'yarn'."""
  factor: float = 1.0
  original_max_position_embeddings: int = 0
  """llama3 and yarn: length before scaling."""
  low_freq_factor: float = 1.0
  """llama3."""
  high_freq_factor: float = 4.0
  """llama3."""
  beta_fast: float = 32.0
  """yarn."""
  beta_slow: float = 1.0
  """yarn."""
  attention_factor: float | None = None
  """yarn: factor of cos and sin; None computes it, see `cos_factor`."""
  mscale: float = 0.0
  """yarn: with `mscale_all_dim`, scale of the computed factor of cos and sin; 0: not given."""
  mscale_all_dim: float = 0.0
  """yarn: as `mscale`; latent attention also scales its scores with it, see `score_factor`."""
  truncate: bool = True
  """yarn: round the bounds of the ramp to whole dimensions."""

  @staticmethod
  def yarn_attention(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cos and sin: `0.1 * scale * ln(factor) + 1`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

  @property
  def cos_factor(self) -> float:
    """YaRN's attention factor, which multiplies cos and sin."""
    if self.attention_factor is not None:
      return self.attention_factor
    if self.mscale and self.mscale_all_dim:
      return self.yarn_attention(self.factor, self.mscale) / self.yarn_attention(self.factor, self.mscale_all_dim)
    return self.yarn_attention(self.factor)

  @property
  def score_factor(self) -> float:
    """yarn: factor of the scores of latent attention, as in DeepSeek-V3; 1 without `mscale_all_dim`."""
    return self.yarn_attention(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

  def __post_init__(self) -> None:
    _check_kinds(self)
    _check_choice("RopeScaling.rope_type", self.rope_type, ROPE_TYPES)
    _check("RopeScaling.factor", self.factor, self.factor >= 1.0, "at least 1")
    if self.rope_type in ("llama3", "yarn"):
      length = self.original_max_position_embeddings
      _check("RopeScaling.original_max_position_embeddings", length, length > 0, f"positive for {self.rope_type!r}")
    if self.rope_type == "llama3":
      high = self.high_freq_factor
      _check("RopeScaling.high_freq_factor", high, high > self.low_freq_factor > 0, "greater than low_freq_factor > 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Architecture of a decoder, and the way it is computed.

  The defaults describe a dense Qwen3. With `num_experts > 0`, the sparse layers are mixtures of experts.

  >>> config = ModelConfig(
  ...   vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
  ... )
  >>> config.rotary_dim, config.is_sparse(0)
  (8, False)
  """

  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  """Dimensions of a head. With latent attention, those of a query or key head that are rotated."""
  intermediate_size: int
  """Width of a dense layer's SwiGLU."""

  model_type: str = "qwen3"
  """Hugging Face name of the family, written by `save_hf`. It does not affect the computation."""
  tie_word_embeddings: bool = True
  attention_bias: bool = False
  """Bias on the q, k and v projections; with latent attention, on the projections to the latents."""
  attention_out_bias: bool = False
  """Bias on the attention's output projection."""
  mlp_bias: bool = False
  qk_norm: bool = True
  """RMS norm of every query and key head before the rotation."""
  norm_eps: float = 1e-6

  rope_theta: float = 10_000.0
  partial_rotary_factor: float = 1.0
  """Share of each head's dimensions that is rotated."""
  rope_scaling: RopeScaling = RopeScaling()
  max_position_embeddings: int = 32_768
  """Kept for checkpoints; no array is sized by it."""

  kv_lora_rank: int = 0
  """Width of the latent that keys and values of all heads are computed from (multi-head latent attention,
  arXiv 2405.04434, Section 2.1); 0: grouped-query attention."""
  q_lora_rank: int = 0
  """Latent attention: width of the latent of queries; 0: they are computed from the layer's input."""
  qk_nope_head_dim: int = 0
  """Latent attention: dimensions of a query or key head that are not rotated."""
  v_head_dim: int = 0
  """Latent attention: dimensions of a value head."""
  rope_interleave: bool = False
  """Latent attention: whether neighbouring dimensions, (0, 1), (2, 3), ..., are rotated as a pair, and not those that
  are half of `head_dim` apart."""
  index_topk: int = 0
  """Sparse attention over latents: the number of tokens that a query attends to, chosen by an indexer; 0: all."""
  index_n_heads: int = 0
  """Number of the indexer's query heads; they share one key head."""
  index_head_dim: int = 0
  """Dimensions of an indexer's head, of which the first `head_dim` are rotated."""
  indexer_types: tuple[str, ...] = ()
  """'full' or 'shared' per layer: a shared one attends to the tokens that the last full one before it chose."""

  num_experts: int = 0
  """0: every layer is dense."""
  num_experts_per_tok: int = 0
  moe_intermediate_size: int = 0
  """Width of one expert's SwiGLU."""
  router: str = "softmax"
  """'softmax' (qwen3_moe), or 'sigmoid' with a correction bias that affects the choice of experts only (the other
  families)."""
  norm_topk_prob: bool = True
  """Whether the chosen experts' weights are divided by their sum."""
  routed_scaling_factor: float = 1.0
  n_group: int = 1
  """Number of expert groups; only experts of the `topk_group` best groups can be chosen."""
  topk_group: int = 1
  num_shared_experts: int = 0
  """Number of experts that every token passes through, computed as one SwiGLU of the experts' total width."""
  first_dense_layers: int = 0
  """Number of layers at the start that are dense in spite of `num_experts`."""
  decoder_sparse_step: int = 1
  """Layer i is sparse only if (i + 1) is a multiple of it."""
  mlp_only_layers: tuple[int, ...] = ()
  """Further layers that are dense."""

  # Not compared: weights of the same architecture fit, whatever a file says of tokens.
  token_ids: TokenIds = dataclasses.field(default=TokenIds(), compare=False)
  """bos, eos and pad of `config.json`. Kept for checkpoints; nothing here stops at them."""
  generation_token_ids: TokenIds = dataclasses.field(default=TokenIds(), compare=False)
  """Those of `generation_config.json`, which transformers prefers; none: there is no such file."""

  dtype: str = "float32"
  """Dtype of activations and matmuls. Norms, router, rotation, softmax, logits and values are always float32."""
  param_dtype: str = "float32"
  remat: str = "none"
  """Recomputation in a layer's backward pass: 'none', 'full', or 'dots' (all but the results of matmuls)."""
  moe_impl: str = "auto"
  """'auto' picks by platform and token count; see `moe.py`."""
  attention_impl: str = "auto"
  """'auto' picks by platform and length of the rows; see `attention.py`."""
  init_std: float = 0.02
  """Standard deviation of fresh embeddings and of a fresh untied head."""

  def __post_init__(self) -> None:
    _check_kinds(self)
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    for name in sizes:
      _check(f"ModelConfig.{name}", getattr(self, name), getattr(self, name) > 0, "a positive int")
    _check_choice("ModelConfig.model_type", self.model_type, MODEL_TYPES)
    _check_choice("ModelConfig.dtype", self.dtype, DTYPES)
    _check_choice("ModelConfig.param_dtype", self.param_dtype, DTYPES)
    _check_choice("ModelConfig.remat", self.remat, REMAT_POLICIES)
    _check_choice("ModelConfig.moe_impl", self.moe_impl, MOE_IMPLEMENTATIONS)
    _check_choice("ModelConfig.attention_impl", self.attention_impl, ATTENTION_IMPLEMENTATIONS)
    _check_choice("ModelConfig.router", self.router, ROUTERS)
    divides = self.num_heads % self.num_kv_heads == 0
    _check("ModelConfig.num_kv_heads", self.num_kv_heads, divides, f"a divisor of num_heads = {self.num_heads}")
    layers = all(isinstance(i, int) for i in self.mlp_only_layers)
    _check("ModelConfig.mlp_only_layers", self.mlp_only_layers, layers, "numbers of layers")
    _check("ModelConfig.norm_eps", self.norm_eps, self.norm_eps > 0, "positive")
    _check("ModelConfig.rope_theta", self.rope_theta, self.rope_theta > 0, "positive")
    rotary = self.rotary_dim + self.rotary_dim % 2  # dimensions are rotated in pairs
    _check(
      "ModelConfig.partial_rotary_factor",
      self.partial_rotary_factor,
      0 < rotary <= self.head_dim,
      f"such that 1 or more whole pairs of the head_dim = {self.head_dim} dimensions are rotated",
    )
    whole = self.rope_scaling.rope_type != "yarn" or self.rotary_dim % 2 == 0  # its ramp is defined over pairs
    _check("ModelConfig.partial_rotary_factor", self.partial_rotary_factor, whole, "such that 'yarn' turns whole pairs")
    if self.num_experts:
      self._check_experts()
    if self.kv_lora_rank:
      self._check_latent()
    else:
      for name in ("rope_interleave", "index_topk"):
        _check(f"ModelConfig.{name}", getattr(self, name), not getattr(self, name), "unset without kv_lora_rank")
    if self.index_topk:
      self._check_indexer()

  def _check_latent(self) -> None:
    for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
      _check(f"ModelConfig.{name}", getattr(self, name), getattr(self, name) > 0, "positive with latent attention")
    _check("ModelConfig.q_lora_rank", self.q_lora_rank, self.q_lora_rank >= 0, "0 or positive")
    kv_heads, heads = self.num_kv_heads, self.num_heads
    _check("ModelConfig.num_kv_heads", kv_heads, kv_heads == heads, f"num_heads = {heads} with latent attention")
    _check("ModelConfig.head_dim", self.head_dim, self.head_dim % 2 == 0, "even with latent attention")
    _check("ModelConfig.qk_norm", self.qk_norm, not self.qk_norm, "false with latent attention")
    factor = self.partial_rotary_factor
    _check("ModelConfig.partial_rotary_factor", factor, factor == 1.0, "1 with latent attention")

  def _check_indexer(self) -> None:
    _check("ModelConfig.index_topk", self.index_topk, self.index_topk > 0, "0 or positive")
    _check("ModelConfig.index_n_heads", self.index_n_heads, self.index_n_heads > 0, "positive with an indexer")
    size, least = self.index_head_dim, self.head_dim
    _check("ModelConfig.index_head_dim", size, size >= least, f"at least head_dim = {least}, which are rotated")
    _check(
      "ModelConfig.q_lora_rank", self.q_lora_rank, self.q_lora_rank > 0, "positive with an indexer, which reads it"
    )
    types, layers = self.indexer_types, self.num_layers
    known = len(types) == layers and all(kind in INDEXER_TYPES for kind in types)
    _check("ModelConfig.indexer_types", types, known, f"one of {INDEXER_TYPES} for each of {layers} layers")
    _check("ModelConfig.indexer_types", types, types[0] == "full", "'full' in the first layer")

  def _check_experts(self) -> None:
    experts, chosen = self.num_experts, self.num_experts_per_tok
    _check("ModelConfig.num_experts", experts, experts > 0, "0 (dense) or positive")
    _check("ModelConfig.num_experts_per_tok", chosen, 1 <= chosen <= experts, f"in 1 .. num_experts = {experts}")
    _check("ModelConfig.moe_intermediate_size", self.moe_intermediate_size, self.moe_intermediate_size > 0, "positive")
    _check("ModelConfig.decoder_sparse_step", self.decoder_sparse_step, self.decoder_sparse_step >= 1, "at least 1")
    _check("ModelConfig.num_shared_experts", self.num_shared_experts, self.num_shared_experts >= 0, "0 or positive")
    groups = self.n_group
    divides = groups >= 1 and experts % groups == 0
    _check("ModelConfig.n_group", groups, divides, f"a divisor of num_experts = {experts}")
    _check("ModelConfig.topk_group", self.topk_group, 1 <= self.topk_group <= groups, f"in 1 .. n_group = {groups}")
    if groups > 1:
      _check("ModelConfig.n_group", groups, self.router == "sigmoid", "1 with the softmax router")
      _check("ModelConfig.n_group", groups, experts // groups >= 2, "such that every group holds 2 experts or more")
      reachable = self.topk_group * (experts // groups)
      _check(
        "ModelConfig.num_experts_per_tok",
        chosen,
        chosen <= reachable,
        f"at most the {reachable} experts of topk_group = {self.topk_group} groups",
      )

  @property
  def rotary_dim(self) -> int:
    """Number of dimensions of a head that are rotated. An odd number is rounded up to whole pairs."""
    return int(self.head_dim * self.partial_rotary_factor)

  @property
  def attention_scale(self) -> float:
    """Factor of the attention scores."""
    if self.kv_lora_rank:
      return self.rope_scaling.score_factor / math.sqrt(self.qk_nope_head_dim + self.head_dim)
    return 1.0 / math.sqrt(self.head_dim)

  @property
  def compute_dtype(self) -> jnp.dtype:
    """`dtype` as a JAX dtype."""
    return jnp.dtype(self.dtype)

  def has_indexer(self, layer: int) -> bool:
    """Whether layer number `layer` (from 0) chooses the tokens that it attends to by an indexer of its own."""
    return self.index_topk > 0 and self.indexer_types[layer] == "full"

  def is_sparse(self, layer: int) -> bool:
    """Whether layer number `layer` (from 0) is a mixture of experts."""
    return (
      self.num_experts > 0
      and layer >= self.first_dense_layers
      and layer not in self.mlp_only_layers
      and (layer + 1) % self.decoder_sparse_step == 0
    )
