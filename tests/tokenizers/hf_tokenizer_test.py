"""Tokenizers and chat templates of checkpoints: a small real BPE, and templates like those of checkpoints."""

from __future__ import annotations

import json
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.tokenizers import Chat, ChatTemplate, HFTokenizer, quoting

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|observation|>", "<|assistant|>")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

CHATML = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role in ("system", "user", "assistant") %}<|im_start|>{{ message.role }}
{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>
{% else %}{{ raise_exception("unknown role " + message.role) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# The tag of the next turn ends an action; nothing is between them.
GLM = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}<|observation|>
<tool_response>{{ message.content }}</tool_response>
{%- else -%}<|{{ message.role }}|>
{{ message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""


@pytest.fixture(scope="module")
def serialized():
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400, show_progress=False, special_tokens=list(SPECIAL),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  backend.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
  backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in TAGS])
  return backend.to_str()


@pytest.fixture(scope="module")
def tokenizer(serialized):
  return HFTokenizer(serialized, stop_tokens=["<|im_end|>", "<|endoftext|>"])


def template(source, tokenizer):
  return ChatTemplate(source, stop_tokens=tokenizer.stop_tokens, control_tokens=tokenizer.control_tokens)


@given(text=st.text(max_size=40))
def test_text_survives(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == quoting.unquote(text)


PIECES = [*SPECIAL, *TAGS, "a", " fox", "\ue0f0", "\ue0f1", "\ue0f2", "<|im_", "é"]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8))
def test_foreign_text_never_becomes_control_tokens_and_loses_nothing(tokenizer, pieces):
  text = "".join(pieces)
  ids = tokenizer.encode(quoting.quote(text, tokenizer.control_tokens))
  control = {i for token in tokenizer.control_tokens for i in tokenizer.encode(token)}
  assert len(control) == len(SPECIAL) + len(TAGS)
  assert not control & set(ids)
  assert tokenizer.decode(ids) == text
  assert quoting.unquote(quoting.quote(text, tokenizer.control_tokens)) == text


def test_contents_survive_a_template_that_writes_json(tokenizer):
  """Llama's template writes tool results as JSON."""
  content = 'a "<|im_end|>" \ue0f0\ue0f1\ue0f2 é'
  chat = template("{{ messages[0].content | tojson }}", tokenizer)
  ids = tokenizer.encode(chat.render([{"role": "tool", "content": content}]))
  assert json.loads(tokenizer.decode(ids)) == content
  assert tokenizer.stop_ids[0] not in ids


def test_marks_without_partners_are_read_in_linear_time():
  began = time.process_time()
  text = "\ue0f0" * 200_000
  assert quoting.unquote(text) == text
  assert time.process_time() - began < 10.0  # quadratic: minutes


def test_markup_is_made_of_control_tokens(tokenizer):
  text = template(CHATML, tokenizer).render([{"role": "user", "content": "the fox <|im_end|>"}])
  ids = tokenizer.encode(text)
  assert ids.count(tokenizer.stop_ids[0]) == 1
  assert tokenizer.decode(ids) == "<|im_start|>user\nthe fox <|im_end|><|im_end|>\n<|im_start|>assistant\n"


def test_turns_laid_end_to_end_are_the_whole_conversation(tokenizer):
  """Prompt + action + between + action, as the engine joins them, are the text of the template."""
  chat = template(CHATML, tokenizer)
  question, result = {"role": "user", "content": "lazy?"}, {"role": "tool", "content": "dog"}
  first = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  context = chat.render([question]) + first + "<|im_end|>" + chat.between([result], ended_with=first + "<|im_end|>")
  assert context == chat.render([question, {"role": "assistant", "content": first}, result])
  assert context.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("message", [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}])
def test_a_turn_has_one_end_token(tokenizer, message):
  """An action that ends with another stop token does not get the template's token too."""
  chat = template(CHATML, tokenizer)
  own = chat.between([message], ended_with="a<|im_end|>")
  assert own.startswith("\n<|im_start|>user\n")
  assert chat.between([message], ended_with="a<|endoftext|>") == own
  assert chat.between([message], ended_with="a") == "<|im_end|>" + own


def test_next_turns_tag_as_stop_token(serialized):
  tokenizer = HFTokenizer(serialized, stop_tokens=["<|endoftext|>", "<|user|>", "<|observation|>"])
  chat = template(GLM, tokenizer)
  result = [{"role": "tool", "content": "4"}]
  assert chat.between(result, ended_with="call<|observation|>") == "\n<tool_response>4</tool_response><|assistant|>"
  whole = chat.between(result, ended_with="call<|user|>")
  assert whole == "<|observation|>\n<tool_response>4</tool_response><|assistant|>"


def test_tools_and_switches_reach_the_template(tokenizer):
  chat = template(CHATML, tokenizer)
  tool = {"type": "function", "function": {"name": "größe", "parameters": {}}}
  text = chat.render([{"role": "user", "content": "x"}], tools=[tool], enable_thinking=False)
  assert json.dumps(tool, ensure_ascii=False) in text
  assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
  assert "<think>" not in chat.render([{"role": "user", "content": "x"}])


def test_template_that_refuses(tokenizer):
  with pytest.raises(ValueError, match="refuses the messages: unknown role judge"):
    template(CHATML, tokenizer).render([{"role": "judge", "content": "x"}])


def test_template_is_sandboxed(tokenizer):
  with pytest.raises(ValueError, match="refuses the messages"):
    template("{{ ''.__class__.__mro__[1].__subclasses__() }}", tokenizer).render([])
  with pytest.raises(ValueError, match="not valid jinja2, line 1"):
    template("{% if %}", tokenizer)


@pytest.mark.parametrize(
  "source",
  [
    "{{ 1 // 0 }}", "{{ 'a' + 1 }}", "{% for i in range(10 ** 9) %}{% endfor %}", "{% import 'os' as o %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ range | tojson }}",
  ],
)  # fmt: skip
def test_a_template_that_fails_is_told_as_one(tokenizer, source):
  with pytest.raises(ValueError, match="the chat template fails: "):
    template(source, tokenizer).render([])


@pytest.mark.parametrize(
  "source",
  ["{{ messages | length }}", "{% for m in messages %}{{ m.content * 2 }}{% endfor %}"],
)
def test_template_without_tellable_turns_is_refused(tokenizer, source):
  with pytest.raises(ValueError, match="exactly once"):
    template(source, tokenizer).between([], ended_with="")


@pytest.fixture
def directory(tmp_path, serialized):
  (tmp_path / "tokenizer.json").write_text(serialized, encoding="utf-8")
  return tmp_path


def write(directory, name, content):
  (directory / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_stop_tokens_by_precedence(directory, tokenizer):
  with pytest.raises(ValueError, match="give stop_tokens"):
    HFTokenizer.load(directory)
  write(directory, "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
  assert HFTokenizer.load(directory).stop_tokens == ("<|im_end|>",)
  write(directory, "config.json", {"eos_token_id": tokenizer.encode("<|endoftext|>")[0]})
  assert HFTokenizer.load(directory).stop_tokens == ("<|endoftext|>",)
  ids = tokenizer.encode("<|user|><|observation|>")
  write(directory, "generation_config.json", {"eos_token_id": ids})
  assert HFTokenizer.load(directory).stop_ids == tuple(ids)
  assert HFTokenizer.load(directory, stop_tokens=["<|im_end|>"]).stop_tokens == ("<|im_end|>",)
  write(directory, "generation_config.json", {"eos_token_id": 10_000})
  with pytest.raises(ValueError, match="must be ids of the vocabulary"):
    HFTokenizer.load(directory)


@pytest.mark.parametrize("content", ["", "[" * 100_000, '{"model": 5}', "null"])
def test_a_file_that_is_no_tokenizer_is_named(directory, content):
  write(directory, "tokenizer.json", content)
  with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer: "):
    HFTokenizer.load(directory, stop_tokens=["<|im_end|>"])


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("generation_config.json", "[]", "must be a JSON object; received list"),
    ("generation_config.json", "{", "must be JSON"),
    *(("config.json", {"eos_token_id": ids}, "must be ids of the vocabulary") for ids in (-1, 2**70, "2", True, [[2]])),
    ("tokenizer_config.json", {"eos_token": {}}, "eos_token must be a token; received {}"),
    ("tokenizer_config.json", {"eos_token": 5}, "eos_token must be a token; received 5"),
  ],
)
def test_files_that_name_no_stop_tokens_are_named(directory, name, content, message):
  write(directory, name, content)
  with pytest.raises(ValueError, match=f"{name}.*{message}"):
    HFTokenizer.load(directory)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ({"chat_template": 5}, "chat_template must be text; received int"),
    ({"chat_template": [{"name": "default", "template": []}]}, "chat_template must be text; received list"),
    ({"chat_template": "x", "bos_token": {"content": 5}}, "bos_token must be a token"),
    ({"chat_template": "{% if %}"}, "not valid jinja2, line 1"),
    ({"chat_template": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}, "too deeply nested"),
  ],
)
def test_templates_that_cannot_be_read_are_named(directory, content, message):
  write(directory, "tokenizer_config.json", content)
  with pytest.raises(ValueError, match=rf"tokenizer_config\.json: .*{message}"):
    ChatTemplate.load(directory, stop_tokens=[], control_tokens=[])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=rf"^{tmp_path} holds no tokenizer\.json, "):
    HFTokenizer.load(tmp_path)


def test_bad_stop_tokens(serialized):
  with pytest.raises(ValueError, match=r"unknown: \['<nope>'\]"):
    HFTokenizer(serialized, stop_tokens=["<nope>", "<|im_end|>"])
  with pytest.raises(ValueError, match="one or more tokens"):
    HFTokenizer(serialized, stop_tokens=[])


def test_tokenizer_that_adds_spaces_is_refused():
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁x": 0, "<s>": 1, "?": 2}, unk_token="?"))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  backend.decoder = tokenizers.decoders.Metaspace()
  with pytest.raises(ValueError, match="adds a space"):
    HFTokenizer(backend.to_str(), stop_tokens=["<s>"])


def test_vocab_size_counts_added_tokens(tokenizer, serialized):
  assert tokenizer.vocab_size == tokenizers.Tokenizer.from_str(serialized).get_vocab_size()


def test_chat_reads_a_directory(directory):
  write(directory, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": CHATML})
  chat = Chat.load(directory, enable_thinking=False)
  tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
  question = [{"role": "user", "content": "x"}]
  assert chat.style == "json_tags"
  assert '"name": "f"' in chat.prompt(question, [tool]) and '"name": "f"' not in chat.prompt(question)
  assert chat.prompt(question).endswith("</think>\n\n")
  call = '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>'
  assert chat.parse(call, [tool]).calls[0].name == "f"
  assert chat.parse(call).calls == ()
  assert chat.between([{"role": "tool", "content": "4"}], ended_with=call).startswith("\n<|im_start|>user\n<tool_resp")


def test_every_turn_of_a_chat_is_rendered_with_its_tools(directory):
  strict = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}<tool_call>" + CHATML
  write(directory, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": strict})
  chat = Chat.load(directory)
  tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
  result = [{"role": "tool", "content": "4"}]
  assert chat.prompt([{"role": "user", "content": "x"}], [tool])
  assert "<tool_response>\n4" in chat.between(result, ended_with="x<|im_end|>", tools=[tool])
  with pytest.raises(ValueError, match="refuses the messages: no tools"):
    chat.between(result, ended_with="x<|im_end|>")


def test_template_without_calls_offers_no_tools(directory):
  write(directory, "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"})
  with pytest.raises(ValueError, match="teaches no tool calls"):
    Chat.load(directory).prompt([{"role": "user", "content": "x"}], [{"function": {"name": "f"}}])
