"""The ends of calls: tags in strings, code and values are text."""

from __future__ import annotations

import json

import pytest

from sao_jax.tokenizers import ToolCall, parse_tool_calls

PYTHON = {
  "type": "function",
  "function": {
    "name": "python",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}, "n": {"type": "integer"}}},
  },
}
SEARCH = {
  "type": "function",
  "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}
CODES = (
  "print('</tool_call>')",
  "s.split('</think>')",
  "s = '<think>a</think>' + \"</tool_call>\" + '<tool_call>'",
  'print("</parameter>")',
  'print("</parameter></function></tool_call>")',
  's = """\n</parameter>\n</function>\n</tool_call>\n"""',
  'print("</arg_value>")',
  'print("</arg_value></tool_call>")',
  "a = {'name': 'python', 'arguments': {}}",
  'a = {"name": "python", "parameters": {}}',
  'if a < b:\n  print("é∑🎉", r"\\d{2}", f"{x[\'k\']}")',
  "'<|python_tag|>'",
)


def write(style, code):
  text = json.dumps(code)
  return {
    "json_tags": f'<tool_call>\n{{"name": "python", "arguments": {{"code": {text}}}}}\n</tool_call>',
    "xml": f"<tool_call>\n<function=python>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>",
    "key_values": f"<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>",
    "json": f'{{"name": "python", "parameters": {{"code": {text}}}}}',
  }[style]


def codes(text, style):
  parsed = parse_tool_calls(text, style, tools=[PYTHON])
  assert parsed.error is None
  return [dict(call.arguments) for call in parsed.calls]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("style", ["json_tags", "xml", "key_values", "json"])
def test_tags_in_code_are_text(style, code):
  call, other = write(style, code), write(style, "2")
  for before in ("", "<think>\nhm\n</think>\n\n", "I look.\n", "a thought that the prompt opened\n</think>\n\n"):
    for after in ("", "\n<think>\nNow I wait.\n</think>\n", "\nDone.", "\n</think>"):
      assert codes(before + call + after, style) == [{"code": code}]
  assert codes(f"{call}\n{other}", style) == [{"code": code}, {"code": "2"}]
  assert codes(f"<think>{other} no</think>{call}<think>or {other}?</think>", style) == [{"code": code}]


@pytest.mark.parametrize("code", ['print("</parameter></function></tool_call>")', 'print("</arg_value></tool_call>")'])
def test_an_argument_may_follow_code_with_closing_tags(code):
  xml = f"<function=python><parameter=code>{code}</parameter><parameter=n>2</parameter></function>"
  assert codes(f"<tool_call>{xml}</tool_call>", "xml") == [{"code": code, "n": 2}]
  pairs = f"<arg_key>code</arg_key><arg_value>{code}</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>"
  assert codes(f"<tool_call>python{pairs}</tool_call>", "key_values") == [{"code": code, "n": 2}]


@pytest.mark.parametrize("code", ["print(6*7)", "import math\nmath.sqrt(2)", "{1, 2}", "{'a': 1}", *CODES])
def test_python_tag_announces_code(code):
  for after in ("", "\n<think>\nNow I wait.\n</think>"):
    parsed = parse_tool_calls(f"<|python_tag|>{code}{after}<|eom_id|>", "json", stop_tokens=["<|eom_id|>"])
    assert parsed.calls == (ToolCall(name="python", arguments={"code": code}),)
    assert parsed.content == "" and parsed.error is None


def test_code_goes_to_the_tool_that_takes_code():
  text = "I look. <|python_tag|>print(1)"
  parsed = parse_tool_calls(text, "json", tools=[SEARCH, PYTHON])
  assert parsed.calls == (ToolCall(name="python", arguments={"code": "print(1)"}),) and parsed.content == "I look."
  parsed = parse_tool_calls(text, "json", tools=[SEARCH])
  assert parsed.error == "malformed tool call: no tool runs code; available: search"


@pytest.mark.parametrize(
  ("text", "call"),
  [
    ('python(code="print(42)")', ToolCall(name="python", arguments={"code": "print(42)"})),
    ('python.call(code = "a\\nb", n=3)', ToolCall(name="python", arguments={"code": "a\nb", "n": 3})),
    ('search(query="(a, b)")', ToolCall(name="search", arguments={"query": "(a, b)"})),
    ("search()", ToolCall(name="search", arguments={})),
    ("searching(1)", ToolCall(name="python", arguments={"code": "searching(1)"})),
  ],
)
def test_python_tag_with_a_tools_name(text, call):
  assert parse_tool_calls("<|python_tag|>" + text, "json", tools=[PYTHON, SEARCH]).calls == (call,)


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("", "no code after <|python_tag|>"),
    ("python(code='1')", "strings need double quotes"),
    ("python(1)", "its arguments are not well-formed"),
    ('python(code="1" n=2)', "its arguments are not well-formed"),
    ('python(code="1"', "its arguments are not well-formed"),
    ('{"name": "python"}', '"parameters" (an object)'),
    ('{"name": "python", "parameters": {"code": "pri', "not valid JSON"),
  ],
)
def test_malformed_behind_python_tag(text, why):
  parsed = parse_tool_calls("<|python_tag|>" + text, "json", tools=[PYTHON])
  assert parsed.calls == () and parsed.error is not None and why in parsed.error


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1" * 5000])
def test_what_is_no_json_number(number):
  parsed = parse_tool_calls(f'{{"name": "python", "parameters": {{"n": {number}}}}}', "json", tools=[PYTHON])
  assert parsed.error is not None and parsed.error.startswith("malformed tool call: not valid JSON (")
  call = f"<tool_call>python<arg_key>n</arg_key><arg_value>{number}</arg_value></tool_call>"
  assert parse_tool_calls(call, "key_values", tools=[PYTHON]).calls[0].arguments == {"n": number}


@pytest.mark.parametrize(
  ("style", "text", "why"),
  [
    ("json_tags", write("json_tags", "1").replace("}\n<", "}}\n<"), "text follows it"),
    ("json_tags", write("json_tags", "1").replace("</tool_call>", "\n") + write("json_tags", "2"), "</tool_call> is"),
    ("xml", write("xml", "1").replace("</tool_call>", "") + write("xml", "2"), "</tool_call> is missing"),
    ("key_values", write("key_values", "1").replace("</tool_call>", "") + write("key_values", "2"), "</tool_call> is"),
    ("xml", write("xml", "1").replace("</parameter>", ""), "arguments are not well-formed"),
    ("key_values", write("key_values", "1").replace("</arg_value>", ""), "arguments are not well-formed"),
    ("json", write("json", "one").replace("one", "1\n2"), "not valid JSON"),
    ("json", write("json", "1").replace("parameters", "arguments"), '"parameters" (an object)'),
    ("json", '{"name": 3, "parameters": {}}', '"name" (a string)'),
    ("json", '{"name": "' + "r" * 1000 + '", "parameters": {}}', "no tool 'rrr"),
  ],
)
def test_malformed(style, text, why):
  parsed = parse_tool_calls(text, style, tools=[PYTHON])
  assert parsed.calls == () and parsed.error is not None and why in parsed.error
  assert len(parsed.error) < 250
