"""Tool calls in each style: well-formed ones are parsed, and all others give an error for the model."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.tokenizers import ToolCall, parse_tool_calls, tool_call_style
from sao_jax.tokenizers.tool_calls import content

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
    ("json_tags", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "no tool 'rm'; available: python"),
    ("json_tags", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply|not valid JSON"),
    ("xml", "<tool_call>python(1)</tool_call>", "no function name"),
    ("xml", "<tool_call><function=python>code=1</function></tool_call>", "arguments are not well-formed"),
    ("xml", "<tool_call><function=python><parameter=>1</parameter></function></tool_call>", "has no name"),
    ("key_values", "<tool_call></tool_call>", "no function name"),
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
    ("xml", "x <tool_call><function=f><parameter=code>" + "</parameter></function></tool_call>" * 20_000 + "<think>"),
    ("key_values", "x <tool_call>f" + "<arg_key>k</arg_key><arg_value>" * 20_000 + "</think>x</tool_call>"),
    ("json", '{"name": ' * 50_000),
    ("json", '{"name": "python", "parameters": {"code": "' + '{\\"' * 200_000),
    ("json", '{"a": ' * 100_000 + '"name": "x", "parameters": 1'),
    ("json", '{"a' * 100_000 + "</tool_call>"),
    ("json_tags", "<think>" * 100_000 + "</tool_call>"),
    ("json_tags", "</think>" * 100_000 + "</tool_call>"),
    ("json_tags", '{"a"}' * 50_000 + "</tool_call>"),
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


@pytest.mark.parametrize("before", ["", "Sure.\n", "<think>hm</think>\n", "hm</think>\n", "```json\n"])
@pytest.mark.parametrize("code", ["1", "s.split('</think>')", "'</tool_call>' + '</think>'", "'<tool_call>'"])
@pytest.mark.parametrize("style", FORMS)
def test_a_call_is_no_answer_without_its_opening_tag_nor_cut_off(style, code, before):
  call = FORMS[style].replace('"1"', f'"{code}"').replace("\n1\n", f"\n{code}\n").replace(">1<", f">{code}<")
  bare = call.removeprefix("{").removeprefix("<tool_call>").lstrip()
  # From here on the text looks like a call.
  begins = {"json_tags": '{"name"', "xml": "<function=", "key_values": "python\n<arg_key>", "json": bare[:34]}[style]
  for text, length in ((call, len("<tool_call>")), (bare, len(begins))):
    for end in range(length, len(text) + 1):
      parsed = parse_tool_calls(before + text[:end], style, tools=[PYTHON])
      assert parsed.calls or parsed.error, text[:end]


@pytest.mark.parametrize(
  ("style", "text", "why"),
  [
    ("json_tags", FORMS["json_tags"][11:], "<tool_call> is missing"),
    ("json_tags", FORMS["json_tags"][11:-12], "<tool_call> is missing"),
    ("json_tags", '{"arguments": {"code": "1"}, "name": "python"}', "<tool_call> is missing"),
    ("json_tags", f"[{FORMS['json_tags'][11:-12]}]", "<tool_call> is missing"),
    ("json_tags", FORMS["json"], "<tool_call> is missing"),
    ("json_tags", f'{{"function": {FORMS["json_tags"][11:-12]}}}', "<tool_call> is missing"),
    ("json_tags", '{"tool": "python", "arguments": {"code": "1"}}', "<tool_call> is missing"),
    ("json_tags", "print(1)\n</tool_call>", "</tool_call> outside a call; <tool_call> is missing"),
    ("xml", FORMS["xml"][11:], "<function= outside a call; <tool_call> is missing"),
    ("xml", FORMS["xml"] + FORMS["xml"][11:], "<function= outside a call"),
    ("xml", FORMS["json"], "<tool_call> is missing"),
    ("key_values", FORMS["key_values"][11:], "<arg_key> outside a call"),
    ("key_values", FORMS["key_values"] + FORMS["key_values"][11:], "<arg_key> outside a call"),
    ("key_values", "python</tool_call>", "</tool_call> outside a call"),
    ("json", FORMS["json"][1:], "not a JSON object"),
    ("json", "{'name': 'python', 'parameters': {'code': '1'}}", "not a JSON object"),
    ("json", FORMS["xml"], "<tool_call> outside a call; write JSON without tags"),
    ("json", '<function=python>{"code": "1"}</function>', "<function= outside a call; write JSON"),
    ("json", 'python(code="1")', "<|python_tag|> is missing"),
    ("json", '[python(code="1")]', "<|python_tag|> is missing"),
    ("json", "print(6*7)<|eom_id|>", "<|python_tag|> is missing"),
  ],
)
def test_without_the_opening_tag(style, text, why):
  parsed = parse_tool_calls(text, style, tools=[PYTHON], stop_tokens=["<|eom_id|>"])
  assert parsed.calls == () and parsed.error is not None and why in parsed.error


@pytest.mark.parametrize(
  "text",
  [
    "Sure: {}",
    "{} It prints 1.",
    "```json\n{}\n```",
    "[{}]",
    '{{"calls": [{}]}}',
    "<|start_header_id|>assistant<|end_header_id|>\n\n{}",
  ],
)
def test_llamas_call_amid_text(text):
  form = FORMS["json"]
  parsed = parse_tool_calls(text.replace("{{", "{").replace("}}", "}").replace("{}", form), "json", tools=[PYTHON])
  assert parsed.calls == (ToolCall(name="python", arguments={"code": "1", "n": 2}),)


def test_several_calls_of_llama():
  text = f"{FORMS['json']}; " + '{"type": "function", "id": 1, "name": "python", "parameters": {}}'
  names = [dict(call.arguments) for call in parse_tool_calls(text, "json", tools=[PYTHON]).calls]
  assert names == [{"code": "1", "n": 2}, {}]


def test_a_closing_tag_may_come_twice():
  for style in ("json_tags", "xml", "key_values"):
    parsed = parse_tool_calls(FORMS[style] + "\n</tool_call>", style, tools=[PYTHON])
    assert len(parsed.calls) == 1 and parsed.content == ""


@pytest.mark.parametrize("style", FORMS)
@pytest.mark.parametrize(
  "answer",
  [
    "{1, 2, 3}",
    "{}",
    '{"answer": 42}',
    '{"a": [1',
    "{'a': 1}",
    '{"name": "Alice", "age": 3}',
    '{"people": [{"name": "Bob"}]}',
    "A call begins with `<tool_call>` and ends with '</tool_call>'.",
    'The tag "</think>" ends a thought that `<think>` begins.',
    "python(code) runs code.",
  ],
)
def test_answers_that_resemble_calls(style, answer):
  for thought in ("", "<think>hm</think>\n", "hm\n</think>\n"):
    parsed = parse_tool_calls(thought + answer, style, tools=[PYTHON])
    assert (parsed.content, parsed.calls, parsed.error) == (answer, (), None)
  assert content(answer) == answer


@pytest.mark.parametrize("style", FORMS)
def test_which_thoughts_hold_calls(style):
  form = FORMS[style]
  for text, calls, said in (
    (f"<think>{form}</think>4", 0, "4"),
    (f"I could: {form} No.</think>4", 0, "4"),  # the prompt opened the thought
    (f"I look. {form}</think>", 1, "I look."),  # nothing follows
    (f"{form}\n</think>\nI wait.", 1, "I wait."),  # nothing was thought
    (f"<think>I look. {form}", 1, "I look."),  # the thought never ends
    (f"<think>a</think>I look.<think>{form}</think> {form}<think>{form}</think>", 1, "I look."),
    (f"<think>a</think>{form}</think>{form}", 2, ""),
    ("Hm.<think>a</think> 4 <think>b</think>", 0, "Hm. 4 <think>b</think>"),
  ):
    parsed = parse_tool_calls(text, style, tools=[PYTHON])
    assert parsed.error is None and len(parsed.calls) == calls
    assert parsed.content.removeprefix("<think>") == said


def test_a_thought_that_the_prompt_opened_may_mention_tags():
  for style in ("json_tags", "xml", "key_values"):
    text = "I use <tool_call> now, or not.</think>\n"
    assert parse_tool_calls(text + "4", style, tools=[PYTHON]).content == "4"
    assert len(parse_tool_calls(text + FORMS[style], style, tools=[PYTHON]).calls) == 1
    assert parse_tool_calls(text, style, tools=[PYTHON]).error


TAGS = (
  "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=python>", "</function>", "<parameter=code>",
  "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", '{"name": "python"',
  '"parameters": {', "}", '"', "'", "`", "\\", "x", "\n", "python(", ")",
)  # fmt: skip


@given(st.sampled_from(sorted(FORMS)), st.lists(st.sampled_from(TAGS), max_size=30))
def test_no_mix_of_tags_raises(style, pieces):
  parsed = parse_tool_calls("".join(pieces), style, tools=[PYTHON])
  assert not (parsed.calls and parsed.error)


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
