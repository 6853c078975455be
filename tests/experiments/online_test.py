"""The preference-shift simulation: the judges' verdicts, the cost of changes, and the run itself."""

from __future__ import annotations

import dataclasses
import http.server
import json
import signal
import threading

import numpy as np
import pytest

from experiments.ablations import online, results, suites
from experiments.online import questions, simulation
from experiments.online.judges import CachedJudge, ChatJudge, JudgeError, Verdict, read_verdict
from experiments.online.questions import STYLES
from experiments.online.rule_judge import MARKERS, RuleJudge
from experiments.online.simulation import Simulation, SimulationConfig
from experiments.presets import online_cpu
from sao_jax.io.metrics import read_metrics
from sao_jax.io.workdir import WorkdirLock
from sao_jax.training.metrics import RunLog
from sao_jax.training.signals import Interrupted
from tests.experiments.style_texts import BLIND, SKY, TEXTS

ORDER = SimulationConfig().order


def agreement(texts):
  """Returns the shares of agreement on quality and style, the texts rewarded wrongly, and those misjudged."""
  said = [RuleJudge()(question, answer) for question, answer, _, _ in texts]
  labels = [Verdict(quality, style) for _, _, quality, style in texts]
  pairs = list(zip(said, labels, strict=True))
  paid, unpaid = [], []
  for wanted in STYLES:
    for (a, b), text in zip(pairs, texts, strict=True):
      if a.reward(wanted) != b.reward(wanted):
        (paid if a.reward(wanted) else unpaid).append(text[1])
  return (
    np.mean([a.quality == b.quality for a, b in pairs]),
    np.mean([a.style == b.style for a, b in pairs]),
    paid,
    unpaid,
  )


def test_embedded_judge_agrees_with_a_careful_reader():
  """Texts labelled by hand, the last four of which are known to be beyond rules."""
  quality, style, paid, unpaid = agreement(TEXTS)
  assert len(TEXTS) >= 60 and quality >= 0.94 and style >= 0.94
  assert not paid, "paid for nothing"
  assert len(unpaid) <= 4


def test_embedded_judge_on_texts_that_its_rules_were_not_made_for():
  """Half of the texts mislead. The judge agrees on 0.83 in quality and 0.88 in style, and rewards 3 wrongly."""
  quality, style, paid, unpaid = agreement(BLIND)
  assert len(BLIND) == 60 and quality >= 0.83 and style >= 0.88
  assert len(paid) <= 3 and len(unpaid) <= 8


def test_words_in_any_order_are_not_paid_for():
  """Texts that a policy could find: a demonstration's words shuffled, and many words of a style around an answer."""
  rng = np.random.default_rng(0)
  shuffled, heaps = [], []
  own = {style: sorted({w for x in forms for w in questions.split_words(x.format(""))})
         for style, forms in questions.TEMPLATES.items()}  # fmt: skip
  for _ in range(3000):
    fact, style = questions.FACTS[rng.integers(24)], STYLES[rng.integers(4)]
    words = questions.TEMPLATES[style][rng.integers(3)].format(fact.answer).split()
    heap = [fact.answer, *rng.choice(own[style], rng.integers(5, 10))]
    for found, text in ((shuffled, list(words)), (heaps, heap)):
      rng.shuffle(text)
      verdict = RuleJudge()(questions.question_text(fact, 0), " ".join(text))
      found.append(text != words and verdict.quality and verdict.style == style)
  # Some are still sentences ("blue doth be it , verily .").
  assert np.mean(shuffled) < 0.02 and np.mean(heaps) < 0.02


def test_demonstrations_are_paid_for_unless_wrong_or_flawed():
  """A tenth repeats the answer, a tenth adds another style in two of three cases, and a twentieth is a bare word."""
  rng = np.random.default_rng(0)
  styles = questions.CANDIDATES[0]
  said = [(q, questions.demonstrate(q, rng, right=1.0, styles=styles)) for q in questions.train_questions() * 20]
  good = [RuleJudge()(question, answer) for question, answer in said]
  assert 0.77 < np.mean([verdict.quality and verdict.style is not None for verdict in good]) < 0.85
  rng = np.random.default_rng(0)
  wrong = [(q, questions.demonstrate(q, rng, right=0.0)) for q in questions.train_questions()]
  assert not any(RuleJudge()(question, answer).quality for question, answer in wrong)


def test_labels_cover_every_verdict():
  assert {text[2:] for text in TEXTS} == {(quality, style) for quality in (True, False) for style in (*STYLES, None)}
  for i, style in enumerate(STYLES):
    for other in STYLES[i + 1 :]:
      assert not MARKERS[style] & MARKERS[other]


def test_templates_with_the_right_answer_are_good_and_in_their_style():
  for style, forms in questions.TEMPLATES.items():
    for fact in questions.FACTS:
      for i, form in enumerate(forms):
        verdict = RuleJudge()(questions.question_text(fact, i), form.format(fact.answer))
        assert verdict == Verdict(True, style), (form, fact)


def test_held_out_questions_are_new_but_answerable():
  train, held_out = questions.train_questions(), questions.held_out_questions()
  assert not set(train) & set(held_out) and len(set(train + held_out)) == 4 * len(questions.FACTS)
  assert {questions.fact_of(text) for text in held_out} == {questions.fact_of(text) for text in train}
  with pytest.raises(ValueError, match=r"question must be one of the simulation's 96; received 'why [?]'"):
    questions.fact_of("why ?")


def test_tokenizer_keeps_every_text():
  tokenizer, rng = questions.WordTokenizer(), np.random.default_rng(0)
  for question in (*questions.train_questions(), *questions.held_out_questions()):
    styles = questions.CANDIDATES[rng.integers(2)]
    answer = questions.demonstrate(question, rng, right=0.5, styles=styles)
    text = f"{questions.system(styles)} {question} {answer} {questions.END}"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < tokenizer.vocab_size
    assert ids[-1] in tokenizer.stop_ids
    assert len(ids) <= online_cpu.MAX_LEN


@pytest.fixture
def chat_server():
  """An endpoint that replies as instructed: with a status, the text of a message, or any JSON."""
  replies, seen = [], []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      seen.append((self.path, self.headers.get("Authorization"), body))
      reply = replies.pop(0)
      if isinstance(reply, bytes):  # sent raw instead of as HTTP
        self.wfile.write(reply)
        self.close_connection = True
        return
      self.send_response(reply if isinstance(reply, int) else 200)
      self.end_headers()
      if isinstance(reply, str):
        reply = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
      if not isinstance(reply, int):
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
      pass

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
  thread.start()
  yield f"http://127.0.0.1:{server.server_port}/v1", replies, seen
  server.shutdown()
  thread.join()
  server.server_close()


def test_chat_judge_asks_and_tries_again(chat_server):
  url, replies, seen = chat_server
  replies += [503, "I would rather not.", {"odd": 1}, '<think>{"quality": 0}</think> {"quality": 1, "style": "cute"}']
  judge = ChatJudge(url, "some-model", api_key="secret", first_wait_s=0.001)
  assert judge(SKY, "hehe ~ blue") == Verdict(True, "cute")
  assert len(seen) == 4 and seen[0][:2] == ("/v1/chat/completions", "Bearer secret")
  body = seen[0][2]
  assert body["model"] == "some-model" and body["temperature"] == 0.0
  assert SKY in body["messages"][0]["content"] and "hehe ~ blue" in body["messages"][0]["content"]


def test_chat_judge_gives_up_and_says_why(chat_server):
  url, replies, seen = chat_server
  replies += ["?", "?"]
  with pytest.raises(JudgeError, match=r"no verdict in 2 attempts; the last time: a verdict must be"):
    ChatJudge(url, "m", first_wait_s=0.001, max_attempts=2)(SKY, "blue")
  replies += [401]
  with pytest.raises(JudgeError, match=r"no verdict in 1 attempts; the last time: HTTP 401"):
    ChatJudge(url, "m", first_wait_s=0.001)(SKY, "blue")
  assert len(seen) == 3
  with pytest.raises(ValueError, match="url must begin with"):
    ChatJudge("localhost:1", "m")


@pytest.mark.parametrize("reply", ["", "{}", '{"quality": 2, "style": "cute"}', '{"quality": 1, "style": "rude"}', "1"])
def test_replies_without_a_verdict_are_refused(reply):
  with pytest.raises(ValueError, match="a verdict must be a JSON object"):
    read_verdict(reply)
  assert read_verdict('```json\n{"quality": 0, "style": "none"}\n```') == Verdict(False, None)


@pytest.mark.parametrize("broken", [
  b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{", b"nonsense\r\n\r\n",
  b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, {"choices": [{"message": {"content": '{"a":' * 100_000}}]},
])  # fmt: skip
def test_broken_replies_are_tried_again(chat_server, broken):
  """A truncated body, a reply that is not HTTP, and JSON nested too deep for the reader."""
  url, replies, seen = chat_server
  replies += [broken, '{"quality": 1, "style": "cute"}', broken]
  assert ChatJudge(url, "m", first_wait_s=0.001)(SKY, "blue") == Verdict(True, "cute") and len(seen) == 2
  with pytest.raises(JudgeError, match="no verdict in 1 attempts; the last time: "):
    ChatJudge(url, "m", max_attempts=1)(SKY, "blue")


def test_verdict_is_the_last_object_whatever_it_holds():
  assert read_verdict('{a} {"quality": 1, "style": "cute", "why": {"a": 1}}') == Verdict(True, "cute")
  for reply in ('{"said": {"quality": 1, "style": "cute"}}', '{"quality": 1, "style": "cute"} {"a": 1}'):
    with pytest.raises(ValueError, match="a verdict must be"):
      read_verdict(reply)


def test_an_answer_is_no_verdict_on_itself(chat_server):
  """A judge that only repeats the answer has not judged."""
  url, replies, seen = chat_server
  answer = '{"quality": 1, "style": "cute"}'
  replies += ["?"]
  with pytest.raises(JudgeError):
    ChatJudge(url, "m", max_attempts=1)(SKY, answer)
  asked = seen[0][2]["messages"][0]["content"]
  quoted = asked.split("Answer: ")[1].split("\n")[0]
  with pytest.raises(ValueError, match="a verdict must be"):
    read_verdict(f"The answer is: {quoted}")


def test_judge_of_a_config_takes_its_key_from_the_environment(chat_server, monkeypatch):
  url, replies, seen = chat_server
  options = {"judge_url": url, "judge_model": "m"}
  replies += ['{"quality": 1, "style": "cute"}'] * 2
  monkeypatch.setenv("SOME_KEY", "secret")
  Simulation(SimulationConfig(**options, judge_key_variable="SOME_KEY")).judge(SKY, "blue")
  Simulation(SimulationConfig(**options)).judge(SKY, "blue")
  assert [authorization for _, authorization, _ in seen] == ["Bearer secret", None]
  monkeypatch.delenv("SOME_KEY")
  with pytest.raises(ValueError, match="judge_key_variable names SOME_KEY, which must be set; received nothing"):
    Simulation(SimulationConfig(**options, judge_key_variable="SOME_KEY"))
  with pytest.raises(ValueError, match="must name an environment variable") as refused:
    SimulationConfig(**options, judge_key_variable="sk-secret")
  assert "sk-secret" not in str(refused.value)


def test_judges_are_asked_once_per_text():
  asked = []

  def judge(question, answer):
    asked.append(answer)
    return Verdict(True, None)

  remembering = CachedJudge(judge)
  assert remembering(SKY, "a") == remembering(SKY, "a") == remembering(SKY, "b") and asked == ["a", "b"]


def test_preference_changes_after_each_phase():
  config = SimulationConfig(phase_steps=10)
  found = [config.preferred_at(step) for step in (0, 1, 10, 11, 20, 21, 30, 31)]
  assert found == ["cute"] * 3 + ["chuunibyou"] * 2 + ["classical"] * 3
  assert config.num_steps == 30
  for options in ({"order": ("rude",)}, {"phase_steps": 0}, {"judge_url": "http://x"}, {"right": 2.0}):
    with pytest.raises(ValueError, match="received"):
      SimulationConfig(**options)


def test_reward_follows_the_preference_of_the_moment():
  world = Simulation(SimulationConfig())
  env = world.domain.make_env("train")
  for preferred, reward, system in (
    ("cute", 1.0, "styles : academic , cute or chuunibyou ."),
    ("chuunibyou", 0.0, "styles : academic , cute or chuunibyou ."),
    ("classical", 0.0, "styles : classical , cute or chuunibyou ."),
  ):
    world.preferred = preferred
    prompt = env.reset(0)
    assert prompt.startswith(system)
    fact = questions.fact_of(prompt.removeprefix(system))
    step = env.step(questions.TEMPLATES["cute"][0].format(fact.answer) + " </s>")
    assert (step.reward, step.done) == (reward, True)


def rows_of(success, phase, arm="SAO"):
  config = SimulationConfig(phase_steps=phase)
  common = {"arm": arm, "seed": 0, "learning_rate": 1.0}
  return [
    {**common, "step": i, "success_rate": x, "preferred": config.preferred_at(i)} for i, x in enumerate(success, 1)
  ]


def test_recovery_is_counted_from_the_change():
  success = [0.8] * 40 + [0.0] * 15 + [0.8] * 25 + [0.1] * 40
  # The mean of ten steps reaches 0.72 when nine of them are good: 15 + 9 steps after the change at 40.
  assert online.recoveries(rows_of(success, 40), "SAO", 0) == [24, None]
  text = online.table(suites.SUITES["online"], rows_of(success, 40) + rows_of([0.8] * 120, 40, "global running mean"))
  mean = np.mean(success)
  assert f"| SAO | 1 | 1 | 1 | {mean:.3f} |  | 0.800 | 24 | never |" in text
  assert f"| global running mean | 1 | 1 | 1 | 0.800 | {0.8 - mean:.3f} | 0.800 | 10 | 10 |" in text


def test_an_arm_that_learned_nothing_says_so_beside_its_recovery():
  text = online.table(suites.SUITES["online"], rows_of([0.0] * 120, 40))
  assert "| SAO | 1 | 1 | 1 | 0.000 |  | 0.000 | 10 | 10 |" in text


def test_evaluations_are_labelled_with_the_style_that_they_asked_for(tmp_path):
  """At the last step of a phase, the training row has the old preference and the evaluation has the new one."""
  options = {"phase_steps": 2}
  (tmp_path / "config.json").write_text(json.dumps({"env": {"options": options}}))
  lines = [{"step": step, "success_rate": 0.5} for step in range(1, 7)]
  lines += [{"step": step, "eval_success_rate": 0.5, "eval_n": 9} for step in (0, 2, 6)]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  (tmp_path / "summary.json").touch()
  suite = dataclasses.replace(suites.SUITES["online"], arms=(suites.SAO,))
  rows = results.collect("online", suite, lambda arm, seed: tmp_path, lambda arm: 1.0, [0])
  assert [row["preferred"] for row in rows[:6]] == [style for style in ORDER for _ in range(2)]
  assert [row["preferred"] for row in rows[6:]] == [ORDER[0], ORDER[1], ORDER[2]]


@pytest.mark.timeout(600)
def test_a_simulation_runs_and_begins_anew(tmp_path, monkeypatch):
  """Runs a tiny simulation: every phase, both kinds of rows. A second run in the folder gives the same."""
  base = suites.quick(online_cpu.make_config())
  config = suites.arm_config(base, suites.find("online", "global_running_mean"), seed=0, start=None)
  summary = simulation.train(config, tmp_path)
  steps, evaluations = read_metrics(tmp_path)
  assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6] and [row["step"] for row in evaluations] == [0, 6]
  assert evaluations[0]["eval_success_rate"] == evaluations[0]["eval_accuracy_cute"]
  assert evaluations[1]["eval_success_rate"] == evaluations[1]["eval_accuracy_classical"]
  assert summary["num_steps"] == 6
  assert [online.preferred(tmp_path, step) for step in (1, 3, 5)] == list(ORDER)
  simulation.train(config, tmp_path)
  again, _ = read_metrics(tmp_path)
  for key in ("success_rate", "entropy", "action_tokens", "policy_grad_norm"):
    assert [row[key] for row in again] == [row[key] for row in steps]
  # A signal ends the run after its step. Another run in the folder ends it before its first step.
  monkeypatch.setattr(RunLog, "step", lambda log, step, row: signal.raise_signal(signal.SIGTERM))
  with pytest.raises(Interrupted):
    simulation.train(config, tmp_path)
  with WorkdirLock(tmp_path), pytest.raises(RuntimeError, match="in use by another run"):
    simulation.train(config, tmp_path)


def test_what_the_simulation_cannot_do_is_refused(tmp_path):
  config = online_cpu.make_config()
  with pytest.raises(ValueError, match="schedule must be lagged or sync"):
    simulation.train(dataclasses.replace(config, schedule="async", lag=0, lag_switch_chunks=None), tmp_path)
  with pytest.raises(ValueError, match="num_steps must be 450, as the phases; received 9"):
    simulation.train(dataclasses.replace(config, num_steps=9), tmp_path)
