from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.envs.tool_math.expressions import (
  count_code_operations,
  evaluate,
  left_to_right,
  num_operations,
  operators_in_order,
  parse_expression,
  reduce_stepwise,
)

_NUMBERS = st.integers(-999, 999).map(str)
_TEXTS = st.recursive(
  _NUMBERS,
  lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(" ".join),
    inner.map("( {} )".format),
    inner.map("-( {} )".format),
  ),
  max_leaves=6,
)


@given(text=_TEXTS)
def test_stepwise_reduction_computes_what_python_computes(text: str) -> None:
  tree = parse_expression(text)
  steps, value = reduce_stepwise(tree)
  assert value == evaluate(tree) == eval(text)  # noqa: S307
  assert len(steps) == num_operations(tree) == len(operators_in_order(tree))
  for code, result in steps:
    assert eval(code) == result  # noqa: S307
    assert count_code_operations(code) == 1


def test_steps_respect_precedence_and_associativity() -> None:
  steps, value = reduce_stepwise(parse_expression("12 + 3 * 45 - -6"))
  assert steps == [("3 * 45", 135), ("12 + 135", 147), ("147 - -6", 153)] and value == 153
  steps, value = reduce_stepwise(parse_expression("-( 5 - 7 ) * 3"))
  assert steps == [("5 - 7", -2), ("2 * 3", 6)] and value == 6


def test_exchanged_operators_carry_on() -> None:
  steps, value = reduce_stepwise(parse_expression("2 + 3 - 4"), exchange={0: "*"})
  assert steps == [("2 * 3", 6), ("6 - 4", 2)] and value == 2


def test_left_to_right_ignores_precedence() -> None:
  tree = left_to_right("2 + 3 * -4")
  assert tree is not None and evaluate(tree) == -20
  for text in ("( 2 + 3 ) * 4", "60 // gcd(60, 100) * 100", "2 +", "2 ** 3"):
    assert left_to_right(text) is None


@pytest.mark.parametrize("text", ["", "2 +", "x", "2 ** 3", "1.5", "True + 1", "f(2)", "1 / 2"])
def test_other_texts_are_refused(text: str) -> None:
  with pytest.raises(ValueError, match="must be an integer expression"):
    parse_expression(text)


def test_operations_in_code() -> None:
  assert count_code_operations("gcd(60, 100)") == 1
  assert count_code_operations("x = 3\nx += 2\nprint(x * 7)") == 3
  assert count_code_operations("-7 - -5") == 1
  assert count_code_operations("12 *") is None
  assert count_code_operations("(" * 5_000) is None
  assert count_code_operations("1\x00") is None
