"""Rendering of templates in a limited process: exceeded limits of every kind, recovery, and the end of the process."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import subprocess
import sys

import pytest

from sao_jax.tokenizers import ChatTemplate
from sao_jax.tokenizers import _template_worker as worker
from sao_jax.tokenizers.template_renderer import RefusedError, TemplateRenderer
from tests.waiting import until

USER = [{"role": "user", "content": "x"}]

TOO_MUCH_MEMORY = {
  "string": "{{ ('a' * 1500000000) | length }}",
  "list": "{{ ([0] * 1500000000) | length }}",
  "center": "{{ 'a' | center(2000000000) }}",
  "format": "{{ '%2000000000d' | format(1) }}",
  "format_method": "{{ '{:>2000000000}'.format(1) }}",
  "json": "{{ [1] | tojson(indent=2000000000) }}",
  "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
  "join": "{{ range(99999) | join('a' * 100000) | length }}",
  "doubled": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
}
TOO_MUCH_TIME = {
  "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
  "power": "{{ 10 ** (10 ** 9) > 1 }}",  # inside one operation, where Python runs no signal handler
}
OTHER_BOUNDS = {
  "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "more than 8388608 characters",
  "{% for i in range(10 ** 9) %}{% endfor %}": "Range too big",
  "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
}


def load(source):
  return ChatTemplate(source, stop_tokens=["e"], control_tokens=["e"])


@pytest.mark.parametrize("source", TOO_MUCH_MEMORY.values(), ids=TOO_MUCH_MEMORY)
def test_memory_is_bounded_when_a_template_is_loaded(source):
  with pytest.raises(ValueError, match="the chat template fails: rendering takes more than 512 MiB"):
    load(source)


@pytest.mark.parametrize("source", TOO_MUCH_TIME.values(), ids=TOO_MUCH_TIME)
def test_time_is_bounded_when_a_template_is_loaded(source):
  with pytest.raises(ValueError, match="the chat template fails: it takes more than 2 s of processor time"):
    load(source)


@pytest.mark.parametrize(("source", "message"), OTHER_BOUNDS.items(), ids=["output", "range", "recursion"])
def test_output_and_depth_are_bounded_when_a_template_is_loaded(source, message):
  with pytest.raises(ValueError, match=f"the chat template fails: .*{message}"):
    load(source)


def test_compiling_is_bounded():
  """Compiling folds constants."""
  with pytest.raises(ValueError, match="the chat template fails: compiling it takes more than 512 MiB"):
    load("{{ ('\\x01' * 140000000) }}")  # Its repr is four times as long, which takes memory before time.


@pytest.mark.parametrize("bomb", [TOO_MUCH_TIME["loops"], TOO_MUCH_MEMORY["string"]])
def test_a_bomb_that_waits_for_a_later_turn(bomb):
  template = load("{% if messages | length > 3 %}" + bomb + "{% endif %}{{ messages[0].content }}")
  with pytest.raises(ValueError, match=r"the chat template fails: .* more than"):
    template.render(USER * 4)
  assert template.render(USER) == "x"  # The next rendering starts a process again.


def test_a_bomb_is_no_refusal():
  """Otherwise `between` would try the next form of an action."""
  renderer = TemplateRenderer({"a": "{{ 'a' | center(2000000000) }}", "b": "{{ 1 // 0 }}"})
  with pytest.raises(ValueError, match="512 MiB") as caught:
    renderer.render("a", {})
  assert not isinstance(caught.value, RefusedError)
  with pytest.raises(RefusedError, match="ZeroDivisionError"):
    renderer.render("b", {})


def test_limits_hold_whatever_the_caller_does_with_signals():
  code = (
    "import signal; from sao_jax.tokenizers.template_renderer import TemplateRenderer\n"
    "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF, signal.SIGALRM})\n"
    f"TemplateRenderer({{'a': {TOO_MUCH_TIME['loops']!r}}}).render('a', {{}})"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
  assert "ValueError: the chat template fails: it takes more than 2 s of processor time" in done.stderr


def test_a_refusal_is_cut_short():
  with pytest.raises(RefusedError) as caught:
    TemplateRenderer({"a": "{{ raise_exception('a' * 100000) }}"}).render("a", {})
  assert len(str(caught.value)) < 1000


def test_values_that_are_not_json_are_named():
  renderer = TemplateRenderer({"a": "{{ x }}"})
  with pytest.raises(ValueError, match="must be JSON values: received a object"):
    renderer.render("a", {"x": object()})
  assert renderer.render("a", {"x": "é\ud800\n"}) == "é\ud800\n"


def test_random_draws_repeat():
  renderer = TemplateRenderer({"a": "{{ range(1000) | random }} {{ lipsum() }}"})
  assert renderer.render("a", {}) == renderer.render("a", {}) == TemplateRenderer(renderer._sources).render("a", {})


def test_threads_get_their_own_texts():
  renderer = TemplateRenderer({"a": "{{ x }}"})
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert list(pool.map(lambda i: renderer.render("a", {"x": i}), range(200))) == [str(i) for i in range(200)]


def test_the_process_ends_with_its_owner_and_is_replaced_when_killed():
  renderer = TemplateRenderer({"a": "{{ x }}"})
  first = renderer._process.popen
  os.kill(first.pid, signal.SIGKILL)
  first.wait()
  assert renderer.render("a", {"x": 1}) == "1"
  second = renderer._process.popen
  assert second.pid != first.pid and second.poll() is None
  del renderer
  gc.collect()
  assert second.returncode == -signal.SIGKILL and second.stdin.closed and second.stdout.closed


def ticks(pid: int) -> int:
  """Processor time of a process, in clock ticks."""
  with open(f"/proc/{pid}/stat") as file:
    return sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))


def test_one_that_breaks_its_process_is_told():
  renderer = TemplateRenderer({"a": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"})
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    before = ticks(renderer._process.popen.pid)
    pending = pool.submit(renderer.render, "a", {})
    until(lambda: ticks(renderer._process.popen.pid) > before + 5)  # It has begun to render.
    os.kill(renderer._process.popen.pid, signal.SIGKILL)
    with pytest.raises(ValueError, match=r"it ends the process that renders it \(exit status -9\)"):
      pending.result()


def test_rendering_in_this_process():
  """The worker's functions in this process, for coverage."""
  templates = worker.compile_all(
    worker.make_environment(), {"a": "{{ raise_exception('no') }}", "b": "{{ [1] | tojson }}"}
  )
  assert worker.render(templates["a"], {}) == {"error": "refuses the messages: no", "bound": False}
  assert worker.render(templates["b"], {}) == {"text": "[1]"}
