"""Tool calls in each style: well-formed ones are read, all others come back as an error for the model."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.tokenizers import ToolCall, parse_tool_calls, tool_call_style

PYTHON = {
  "type": "function",
  "function": {
    "name": "python",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}, "n": {"type": "integer"}}},
  },
}

FORMS = {
  "json_tags": '<tool_call>\n{"name": "python", "arguments": {"code": "1", "n": 2}}\n</tool_call>',
  "xml": (
    "<tool_call>\n<function=python>\n<parameter=code>\n1\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
  ),
  "key_values": (
    "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>"
  ),
  "json": '{"name": "python", "parameters": {"code": "1", "n": 2}}',
}


@pytest.mark.parametrize("style", FORMS)
def test_call(style):
  parsed = parse_tool_calls(FORMS[style] + "<|end|>", style, tools=[PYTHON], stop_tokens=["<|end|>"])
  assert parsed.error is None and parsed.content == ""
  assert parsed.calls == (ToolCall(name="python", arguments={"code": "1", "n": 2}),)


@pytest.mark.parametrize("style", ["json_tags", "xml", "key_values"])
def test_thought_content_and_several_calls(style):
  text = f"<think>{FORMS[style]} no</think>\n\nI look. {FORMS[style]}\n{FORMS[style]}"
  parsed = parse_tool_calls(text, style)
  assert parsed.content == "I look." and len(parsed.calls) == 2


def test_glm_without_line_breaks_and_without_arguments():
  text = "<tool_call>f<arg_key>k</arg_key><arg_value>[1, 2]</arg_value></tool_call><tool_call>g</tool_call>"
  assert parse_tool_calls(text, "key_values").calls == (
    ToolCall(name="f", arguments={"k": [1, 2]}), ToolCall(name="g", arguments={}),
  )  # fmt: skip


def test_code_keeps_its_lines():
  text = "<tool_call><function=python><parameter=code>\nif x:\n  y < 3\n</parameter></function></tool_call>"
  assert parse_tool_calls(text, "xml", tools=[PYTHON]).calls[0].arguments == {"code": "if x:\n  y < 3"}


@pytest.mark.parametrize("style", FORMS)
def test_plain_answer(style):
  parsed = parse_tool_calls("The answer is 4.<|end|>", style, stop_tokens=["<|end|>"])
  assert parsed.content == "The answer is 4." and parsed.calls == () and parsed.error is None


@pytest.mark.parametrize(
  ("style", "text", "why"),
  [
    ("json_tags", '<tool_call>{"name": "python", "arguments": {}}', "</tool_call> is missing"),
    ("json_tags", "<tool_call>{name: python}</tool_call>", "not valid JSON"),
    ("json_tags", '<tool_call>{"name": "python", "arguments": "1"}</tool_call>', '"arguments" \\(an object\\)'),
    ("json_tags", '<tool_call>["python"]</tool_call>', "must be an object"),
    ("json_tags", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "no tool 'rm'; there are python"),
    ("json_tags", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply|not valid JSON"),
    ("xml", "<tool_call>python(1)</tool_call>", "no function's name"),
    ("xml", "<tool_call><function=python>code=1</function></tool_call>", "arguments are not well-formed"),
    ("xml", "<tool_call><function=python><parameter=>1</parameter></function></tool_call>", "has no name"),
    ("key_values", "<tool_call></tool_call>", "no function's name"),
    ("key_values", "<tool_call>python<arg_key>code</arg_key></tool_call>", "arguments are not well-formed"),
    ("json", '{"name": "python"}', '"parameters" \\(an object\\)'),
  ],
)
def test_malformed(style, text, why):
  parsed = parse_tool_calls(text, style, tools=[PYTHON])
  assert parsed.calls == ()
  assert parsed.error is not None and parsed.error.startswith("malformed tool call: ")
  assert re.search(why, parsed.error)


@pytest.mark.parametrize(
  ("style", "text"),
  [
    ("key_values", "<tool_call>python<arg_key>" + " " * 100_000 + "</tool_call>"),
    ("key_values", "<tool_call>python" + "<arg_key>" * 50_000 + "</tool_call>"),
    ("key_values", "<tool_call>python" + "<arg_key>code</arg_key>" * 50_000 + "</tool_call>"),
    ("xml", "<tool_call><function=python>" + "<parameter=code>" * 50_000 + "</function></tool_call>"),
    ("xml", "<tool_call><function=python>" + "</function> " * 50_000 + "</tool_call>x"),
    ("json_tags", "<tool_call>" * 50_000),
  ],
)
def test_a_model_that_repeats_itself_is_read_in_linear_time(style, text):
  began = time.process_time()
  assert parse_tool_calls(text, style, tools=[PYTHON]).error is not None
  assert time.process_time() - began < 10.0  # quadratic: minutes


@pytest.mark.parametrize("style", ["json_tags", "xml", "key_values"])
def test_code_may_speak_of_thoughts(style):
  code = "print('</think>')"
  call = FORMS[style].replace('"1"', f'"{code}"').replace("\n1\n", f"\n{code}\n").replace(">1<", f">{code}<")
  parsed = parse_tool_calls("<think>hm</think>\n" + call, style, tools=[PYTHON])
  assert parsed.error is None and parsed.calls[0].arguments == {"code": code, "n": 2}


def test_strings_that_look_like_numbers_stay_strings():
  tags = "<arg_key>code</arg_key><arg_value>{}</arg_value>"
  for value in ("1", "1.50", "null", "true", '"x"', "[1]", " 007\n"):
    call = f"<tool_call>python{tags.format(value)}</tool_call>"
    assert parse_tool_calls(call, "key_values", tools=[PYTHON]).calls[0].arguments == {"code": value}
    call = f"<tool_call><function=python><parameter=code>\n{value}\n</parameter></function></tool_call>"
    assert parse_tool_calls(call, "xml", tools=[PYTHON]).calls[0].arguments == {"code": value}


def test_llamas_python_tag():
  parsed = parse_tool_calls("<|python_tag|>" + FORMS["json"] + "<|eom_id|>", "json", stop_tokens=["<|eom_id|>"])
  assert parsed.calls == (ToolCall(name="python", arguments={"code": "1", "n": 2}),) and parsed.content == ""


@given(st.sampled_from(sorted(FORMS)), st.text(alphabet='<>/{}[]":,abc tool_call=\n', max_size=60), st.integers(0, 80))
def test_no_text_raises(style, noise, place):
  form = FORMS[style]
  parse_tool_calls(form[:place] + noise + form[place:], style, tools=[PYTHON])


def test_style_of_templates():
  assert tool_call_style('<tool_call>{"name": ..., "arguments": ...}</tool_call>') == "json_tags"
  assert tool_call_style("<tool_call><function=f>") == "xml"
  assert tool_call_style("<tool_call>f<arg_key>") == "key_values"
  assert tool_call_style('{"name": n, "parameters": p}') == "json"
  assert tool_call_style("{{ messages }}") is None


def test_unknown_style():
  with pytest.raises(ValueError, match="style must be one of json_tags, xml, key_values, json; received 'yaml'"):
    parse_tool_calls("", "yaml")
