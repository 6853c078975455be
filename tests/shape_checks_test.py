"""The tests' checks of shapes and dtypes: on in every checked package, and off on demand."""

from __future__ import annotations

import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from sao_jax import ops
from sao_jax.learner import targets
from sao_jax.models import attention
from tests import shape_checks

WRONG = [
  (ops.skip_observation_gae, (jnp.zeros(3), jnp.zeros(4), jnp.ones(3, bool)), {"discount": 1.0, "lambda_": 1.0}, "v_t"),
  (ops.masked_mean, (jnp.zeros(3), jnp.ones(3)), {}, "mask"),
  (targets.values_before, (jnp.zeros(3),), {}, "v_after"),
  (targets.values_before, (jnp.zeros((2, 3), jnp.bfloat16),), {}, "v_after"),
  (
    attention.packed_attention,
    (jnp.zeros((1, 3, 2, 4)), jnp.zeros((1, 2, 2, 4)), jnp.zeros((1, 3, 2, 4)), jnp.ones((1, 3), int), 1.0),
    {},
    "k",
  ),
]


@pytest.mark.parametrize(("function", "arguments", "keywords", "name"), WRONG)
def test_a_wrong_shape_or_dtype_is_caught(function, arguments, keywords, name):
  with pytest.raises(jaxtyping.TypeCheckError, match=f"typechecking parameter '{name}'"):
    function(*arguments, **keywords)
  with pytest.raises(jaxtyping.TypeCheckError, match=f"typechecking parameter '{name}'"):
    jax.eval_shape(lambda: function(*arguments, **keywords))  # while tracing, too


def test_the_checks_can_be_switched_off_for_a_functions_own():
  with shape_checks.without(), pytest.raises(ValueError, match="works on one stream"):
    ops.skip_observation_gae(jnp.zeros(3), jnp.zeros(4), jnp.ones(3, bool), discount=1.0, lambda_=1.0)
  with pytest.raises(jaxtyping.TypeCheckError):
    ops.skip_observation_gae(jnp.zeros(3), jnp.zeros(4), jnp.ones(3, bool), discount=1.0, lambda_=1.0)


WITHOUT_SHAPES = re.compile(
  r"""\w+\[(Array|ArrayLike|AnyArray|np\.ndarray), ['"][^'"]*['"]\]|Callable\[\[.*?\], .*?\]"""
)


@pytest.mark.parametrize("module", [name for name in shape_checks.modules() if "._" not in name])
def test_every_array_in_the_signature_of_a_public_function_has_a_shape(module):
  for name, function in vars(importlib.import_module(module)).items():
    if not name.startswith("_") and inspect.isfunction(function) and function.__module__ == module:
      for argument, annotation in function.__annotations__.items():
        bare = WITHOUT_SHAPES.sub("", str(annotation))
        assert not re.search(r"\b(Any)?Array(Like)?\b|ndarray", bare), f"{name}: {argument}: {annotation}"
