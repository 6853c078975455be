"""Choice among named templates, requirements of published families, and ends of turns."""

from __future__ import annotations

import json
import re

import pytest

from sao_jax.tokenizers import ChatTemplate

TOOL = {
  "type": "function",
  "function": {
    "name": "python", "description": "Runs code.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
  },
}  # fmt: skip
USER = [{"role": "user", "content": "hi"}]
RESULT = [{"role": "tool", "name": "python", "tool_call_id": "call00001", "content": "4"}]


def load(source, stops, control=(), **variables):
  return ChatTemplate(source, stop_tokens=stops, control_tokens=[*stops, *control], variables=variables)


def write(directory, files):
  for name, content in files.items():
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


# The choice of transformers 5.24: without tools, with tools. None if it refuses.
CHOICES = [
  ({"tokenizer_config.json": {"chat_template": "s"}}, "s", "s"),
  ({"tokenizer_config.json": {"chat_template": {"default": "d", "tool_use": "t"}}}, "d", "t"),
  ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "d"}]}}, "d", "d"),
  ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "t"}]}}, None, "t"),
  (
    {"tokenizer_config.json": {"chat_template": [{"name": n, "template": n} for n in ("rag", "default", "tool_use")]}},
    "default", "tool_use",
  ),
  ({"chat_template.jinja": "j"}, "j", "j"),
  ({"chat_template.jinja": "j", "additional_chat_templates/tool_use.jinja": "a"}, "j", "a"),
  ({"chat_template.jinja": "j", "additional_chat_templates/default.jinja": "a"}, "a", "a"),
  ({"chat_template.jinja": "j", "additional_chat_templates/rag.jinja": "{% if %}"}, "j", "j"),
  # Separate files override tokenizer_config.json.
  (
    {"tokenizer_config.json": {"chat_template": "s"}, "additional_chat_templates/tool_use.jinja": "a"}, None, "a",
  ),
  ({"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "t"}]}, "chat_template.jinja": "j"},
   "j", "j"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "without", "with_tools"), CHOICES)
def test_named_templates_are_chosen_as_in_transformers(tmp_path, files, without, with_tools):
  write(tmp_path, files)
  template = ChatTemplate.load(tmp_path, stop_tokens=["e"], control_tokens=["e"])
  assert template.render(USER, tools=[TOOL]) == with_tools == template.source
  if without is None:
    with pytest.raises(ValueError, match="'default', is missing; there is 'tool_use'"):
      template.render(USER)
  else:
    assert template.render(USER) == without


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({"additional_chat_templates/rag.jinja": "r"}, r"must include 'default' or 'tool_use'; received \['rag'\]"),
    ({"tokenizer_config.json": {"chat_template": []}}, r"must include 'default' or 'tool_use'; received \[\]"),
    ({"tokenizer_config.json": {"chat_template": [{"name": "default"}]}}, "objects with a name and a template"),
    ({"tokenizer_config.json": {"chat_template": ["d"]}}, "objects with a name and a template"),
    ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "{% if %}"}, "not valid jinja2"),
  ],
)
def test_names_that_choose_nothing_are_refused(tmp_path, files, message):
  write(tmp_path, files)
  with pytest.raises(ValueError, match=message):
    ChatTemplate.load(tmp_path, stop_tokens=["e"], control_tokens=["e"])


def test_no_template(tmp_path):
  with pytest.raises(FileNotFoundError, match="no chat template"):
    ChatTemplate.load(tmp_path, stop_tokens=["e"], control_tokens=["e"])


@pytest.mark.parametrize("decoder", [True, False])
def test_tokens_that_templates_name(tmp_path, decoder):
  """The old file counts if transformers reads it."""
  settings = {"chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}", "bos_token": {"content": "B"}}
  if decoder:
    settings["added_tokens_decoder"] = {}
  write(tmp_path, {"tokenizer_config.json": settings, "special_tokens_map.json": {"eos_token": "E"}})
  template = ChatTemplate.load(tmp_path, stop_tokens=["e"], control_tokens=["e"])
  assert template.render(USER) == ("B" if decoder else "BE")


def test_the_date_is_always_the_same():
  template = load("{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d %H:%M:%S') }}", ["e"])
  assert template.render(USER) == "26 Jul 2024 2024-07-26 00:00:00"


def test_keys_without_a_value_are_missing():
  template = load("{{ 'x' if messages[0].tool_calls is defined else 'none' }}", ["e"])
  assert template.render([{"role": "assistant", "content": "a", "tool_calls": None}]) == "none"


# The requirements of published templates, a few lines for each family.
QWEN = r"""
{%- if not tools %}{{ raise_exception('no tools') }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{% if not m.name %}{{ raise_exception('no name') }}{% endif %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response name=' + m.name + '>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """\
{{- strftime_now('%d %b %Y') }}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if not m.tool_calls | length == 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
{{- '<|start|>assistant<|head|>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson + '}<|eom_id|>' }}
{%- elif m.role == 'tool' %}<|start|>ipython<|head|>{{ m.content | tojson }}<|eot_id|>
{%- else %}<|start|>{{ m.role }}<|head|>{{ m.content | trim }}<|eot_id|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|head|>{% endif %}"""
GLM = r"""
{%- for m in messages %}
{%- if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}
{{- '\n<tool_response>' + m.content + '</tool_response>' }}
{%- else %}<|{{ m.role }}|>
{{ m.content.strip() }}
{%- for c in m.tool_calls %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MISTRAL = """\
{%- for m in messages if m.role != 'tool' and m.tool_calls is undefined %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.tool_calls is defined %}[TOOL_CALLS][
{%- for c in m.tool_calls %}{% if c.id is undefined or c.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}
{{- (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.role == 'user' %}{% if not tools %}{{ raise_exception('no tools') }}{% endif %}[INST]{{ m.content }}[/INST]
{%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""
GPT_OSS = """\
{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no previous assistant message with a tool call!') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}<|end|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
DEEPSEEK = """\
{%- for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>
{%- elif m.role == 'tool' %}<|output|>{{ m.content }}<|/output|>
{%- elif m.tool_calls is defined %}{{ m.content + '<|calls|>' }}
{%- for c in m.tool_calls %}{{ c.function.name + '<|sep|>' + c.function.arguments }}{% endfor %}<|/calls|><|eos|>
{%- else %}{{ m.content }}<|eos|>{% endif %}
{%- endfor %}"""
COMMAND_R = """\
{%- macro index(id) %}
{%- for m in messages %}{% for c in m.tool_calls %}{% if c.id == id %}{{ loop.index0 }}{% endif %}{% endfor %}
{%- endfor %}
{%- endmacro %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|TURN|><|SYSTEM|>{"tool_call_id": "{{ index(m.tool_call_id) }}", "results":
{{- ' ' + m.content | tojson + '}' }}<|END|>
{%- elif m.tool_calls %}<|TURN|><|CHATBOT|><|ACTION|>
{%- for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}<|END_ACTION|><|END|>
{%- elif m.role == 'assistant' %}<|TURN|><|CHATBOT|><|RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END|>
{%- else %}<|TURN|><|USER|>{{ m.content }}<|END|>{% endif %}
{%- endfor %}<|TURN|><|CHATBOT|>"""

FAMILIES = {
  "qwen": (
    QWEN, ["<|im_end|>", "<|endoftext|>"],
    "\n<|im_start|>user\n<tool_response name=python>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
  ),
  "llama": (LLAMA, ["<|eot_id|>", "<|eom_id|>"], '<|start|>ipython<|head|>"4"<|eot_id|><|start|>assistant<|head|>'),
  "mistral": (MISTRAL, ["</s>"], '[TOOL_RESULTS]{"content": 4, "call_id": "call00001"}[/TOOL_RESULTS]'),
  "gpt_oss": (
    GPT_OSS, ["<|call|>", "<|return|>"],
    '<|start|>functions.python to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant',
  ),
  "deepseek": (DEEPSEEK, ["<|eos|>"], "<|output|>4<|/output|>"),
  "command_r": (
    COMMAND_R, ["<|END|>"],
    '<|TURN|><|SYSTEM|>{"tool_call_id": "0", "results": "4"}<|END|><|TURN|><|CHATBOT|>',
  ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_demands_of_published_templates_are_met(family):
  source, stops, after = FAMILIES[family]
  template = load(source, stops, ["<tool_call>", "</tool_call>", "<|end|>"], eos_token=stops[0])
  assert template.render(USER, tools=[TOOL])
  for stop in stops:  # for any of them at the end of the action
    assert template.between(RESULT, ended_with="call" + stop, tools=[TOOL]) == after
  assert re.fullmatch(rf"<[^<>]*>{re.escape(after)}", template.between(RESULT, ended_with="call", tools=[TOOL]))


def test_two_results_at_once():
  results = [*RESULT, {**RESULT[0], "tool_call_id": "call00002", "content": "5"}]
  llama = load(LLAMA, ["<|eot_id|>"]).between(results, ended_with="x<|eot_id|>", tools=[TOOL])
  assert llama == '<|start|>ipython<|head|>"4"<|eot_id|><|start|>ipython<|head|>"5"<|eot_id|><|start|>assistant<|head|>'
  mistral = load(MISTRAL, ["</s>"], eos_token="</s>").between(results, ended_with="x</s>", tools=[TOOL])
  assert re.findall(r'"call_id": "(\w+)"', mistral) == ["call00001", "call00002"]


def test_tokens_that_begin_the_next_turn_are_not_left_out():
  """GLM's stop tokens begin the next turn. Only the sampled one is left out."""
  template = load(GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"], ["<tool_call>", "</tool_call>"])
  after = "\n<tool_response>4</tool_response><|assistant|>"
  assert template.between(RESULT, ended_with="c<|observation|>", tools=[TOOL]) == after
  for ended in ("<|user|>", "<|endoftext|>", ""):
    assert template.between(RESULT, ended_with="c" + ended, tools=[TOOL]) == "<|observation|>" + after
  assert template.between(USER, ended_with="c<|user|>") == "\nhi<|assistant|>"
  assert template.between(USER, ended_with="c<|endoftext|>") == "<|user|>\nhi<|assistant|>"


def chatml(end):
  return (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + end + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  )


@pytest.mark.parametrize(
  ("end", "after"),
  [
    ("<|im_end|>\n", "\n"),
    ("\n<|im_end|>\n", "\n"),
    ("</response><|im_end|>\n", "\n"),
    # If nothing follows, the turn stays open.
    ("{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}", "\n"),
  ],
)
@pytest.mark.parametrize("ended", ["<|im_end|>", "<|endoftext|>"])
def test_the_end_of_a_turn_is_written_once(end, after, ended):
  template = load(chatml(end), ["<|endoftext|>", "<|im_end|>"])
  text = template.between(USER, ended_with="a" + ended)
  assert text.startswith(after + "<|im_start|>user\nhi") and text.endswith("<|im_start|>assistant\n")


def test_a_template_whose_end_of_turn_is_no_stop_token():
  template = load(chatml("<|im_end|>\n"), ["<|endoftext|>"], ["<|im_start|>", "<|im_end|>"])
  assert template.between(USER, ended_with="a<|endoftext|>").startswith("\n<|im_start|>user\nhi<|im_end|>")


def test_what_users_write_ends_no_turn():
  """The stop token is only in the content, so nothing may be cut."""
  template = load("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ["<|end|>"])
  text = template.between([{"role": "user", "content": "a <|end|> b"}], ended_with="x<|end|>")
  assert text.startswith("\nuser: a ")
