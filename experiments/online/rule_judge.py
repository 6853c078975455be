"""The embedded judge of the simulation: rules on the text of an answer."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from experiments.online.judges import Verdict
from experiments.online.questions import ANSWERS, Fact, fact_of, split_words


def _words(text: str) -> frozenset[str]:
  return frozenset(text.split())


_MARKERS = {
  "academic": """evidence study studies empirical empirically research scholars data literature hypothesis findings
    furthermore moreover accordingly consequently analysis theory et al""",
  "cute": """hehe teehee tehe nya nyan meowy yay uwu owo aww yippee hooray kawaii adorable cutie sweetie bestie cuddly
    cuddle snuggle snuggly fluffy teeny tiny teensy lovely yummy purr pwease wuv hugs sparkly kitty bunny
    kyaa mew hihi heehee awww oopsie cutest cute honey rainbow rainbows sparkle sparkles giggles giggle wubby puppy
    ~ <3""",
  "chuunibyou": """behold darkness dark cursed curse abyss abyssal mortal mortals forbidden sealed seal unseal kneel
    destiny fate prophecy prophesied hellfire shadow shadows eye demon dragon dimension power chosen fool fools tremble
    awaken awakened unleash ancient void oblivion chaos eternal whispers bow heed
    apocalypse infernal crimson hell minion minions demonic fated destined arcane summon summoned dread ominous
    incantation muahaha mwahaha fufu fufufu kukuku overlord realm doom""",
  "classical": """verily doth hath thou thee thy thine ye prithee ancients whence wherefore forsooth ere tis twas
    perchance hark henceforth hither thither sayeth saith quoth methinks nay yea unto shalt wilt art alas whilst
    oft dost hast betwixt anon lest wherein whereupon o'er aye yonder thus""",
}
MARKERS: Mapping[str, frozenset[str]] = {style: _words(words) for style, words in _MARKERS.items()}
"""Words that mark a style."""
_INTERJECTIONS = _words("""hehe teehee tehe nya nyan uwu owo yay aww awww yippee hooray kyaa mew hihi heehee pwease
  oopsie muahaha mwahaha fufu fufufu kukuku behold kneel verily prithee forsooth hark methinks alas nay yea
  aye""")  # fmt: skip
_DETERMINERS = _words("the a an my your his her its our their thy thine every")
_PREPOSITIONS = _words("of to in from into unto within with at on upon by for")
_QUESTION_WORDS = _words("which what where when how why who")
_PERSONS = _words("i he she we they ye")
_BE = _words("is are was were am tis it's that's")
_AUXILIARIES = _BE | _words("doth hath does did has can will would")
_FINITE = _words("""say says sayeth saith said quoth tell tells call calls know knows see sees hear hears go goes
  live lives dwell dwells sleep sleeps make makes give gives whispers turned means""")  # fmt: skip
_VERBS = _FINITE | _BE | frozenset({"be", "doth", "hath", "has", "have", "does"})
"""Further verbs are recognised by their ending; see `_is_verb`."""
_NO_VERBS = _words("ancients styles this its his thus us always perhaps yes")
_END = frozenset({""})
_MAY_NOT_PRECEDE = (
  (_DETERMINERS, _END | _INTERJECTIONS | _QUESTION_WORDS | _PREPOSITIONS | _AUXILIARIES | _DETERMINERS | _PERSONS
   | _FINITE | {"it", "thou", "thee", "me", "be", "not", "and", "or"}),
  (_PREPOSITIONS, _END | _INTERJECTIONS | _PREPOSITIONS | _AUXILIARIES | {"and", "or"}),
  (_QUESTION_WORDS, _END | _INTERJECTIONS | _PREPOSITIONS | _QUESTION_WORDS),
  (_PERSONS, _END | _INTERJECTIONS - {"verily", "methinks"} | _PREPOSITIONS | _DETERMINERS | _PERSONS | {"it", "me"}),
  (_AUXILIARIES, _AUXILIARIES),
  (_AUXILIARIES - _BE, _END | _QUESTION_WORDS | _PREPOSITIONS),
  (_BE, _FINITE - {"said"}),
  (_FINITE, _FINITE | _AUXILIARIES),
  (frozenset({"tell"}), _END | _INTERJECTIONS | _PREPOSITIONS),
  (frozenset({"and", "or"}), _END | _PREPOSITIONS),
  (_BE | _words("be say sees whispers said"), _END | _INTERJECTIONS | _PREPOSITIONS - {"in", "to"}),
  (_PREPOSITIONS | _words("me thee"), _words("says sees whispers said makes") | {"be", "doth", "hath"}),
  (_words("cursed sealed"), _END | _INTERJECTIONS | _FINITE | _PREPOSITIONS | _DETERMINERS | {"me", "thee"}),
)  # fmt: skip
"""Pairs of word sets: no word of the first set may stand directly before one of the second; "" is the clause's end."""
_NOT = _words("not never no neither nor without cannot nothing")
"""Words that negate their clause, as do words that end in n't."""
_DOUBTS = _words("""nobody none nowhere doubt doubts wrong false untrue incorrect mistake mistaken deny denies
  denieth denied refuse refuses if whether unless maybe perhaps perchance possibly hardly scarcely barely unlikely
  impossible except pretend pretends anything unsure unknown forgot""")  # fmt: skip
"""Words that deny or question their clause and the rest of their sentence."""
_CERTAIN = re.compile(r"\b(no|not|without|never|beyond)( an?y?)? (doubt|mistake)\b")
_NAMES = frozenset(name for answers in ANSWERS.values() for pair in answers.items() for name in pair)
_MARKED = frozenset().union(*MARKERS.values())
MIN_WORDS = 3
MAX_WORDS = 24


@dataclasses.dataclass(frozen=True)
class _Clause:
  """A sequence of words between punctuation marks; `but` also ends a clause."""

  words: tuple[str, ...]
  end: str
  """The punctuation mark after it."""


class RuleJudge:
  """A judge that reads the text by rules: deterministic, and done within microseconds.

  An answer has quality if all four of these hold:

  - The form is acceptable. It has `MIN_WORDS` to `MAX_WORDS` words. Only function words occur more than twice, and only
    the answer may be doubled. No pair of neighbouring words occurs twice, and no comma or colon touches another mark.
  - It consists of phrases. No article, preposition, auxiliary or similar word stands before a word that cannot follow
    it (`_MAY_NOT_PRECEDE`: `of of`, `the sees`, `doth .`), and no clause begins like a question.
  - The answer is stated. It stands in a clause after a verb that has a subject, at the head of such a clause (`green is
    the grass`), or alone beside it (`thus quoth the lion : roar`). At least two words are neither the answer nor
    style markers.
  - Only that answer is stated. Its clause has no negation, its sentence has no denial or doubt before it (`nobody
    thinks it is`), and it is not a question. Other subjects and answers of the simulation occur only to be denied
    (`it is not green , it is blue`).

  An answer has a style if it has two or more different markers of that style and none of another.

  The rules were tested on sixty texts written before them by the same author, half of them to mislead. They agree with
  the labels on quality for 83 % and on style for 88 %, and reward three texts that deserve nothing. They rather reject
  too much free prose than reward heaps of words, which a policy would find.
  """

  def __call__(self, question: str, answer: str) -> Verdict:
    fact = fact_of(question)
    text = _CERTAIN.sub("surely", " ".join(split_words(answer.removesuffix("</s>"))))
    tokens = [token for token in text.split() if token not in ('"', "'", "*")]
    clauses = _clauses_of(tokens)
    good = (
      _is_decent(tokens, fact.answer)
      and all(_is_phrased(clause.words) for clause in clauses)
      and _is_said(clauses, fact.answer)
      and _is_affirmed(clauses, fact)
    )
    return Verdict(good, _style(tokens))


def _clauses_of(tokens: Sequence[str]) -> list[_Clause]:
  found: list[_Clause] = []
  words: list[str] = []
  for token in (*tokens, "."):
    if token[0].isalpha() and token != "but":
      words.append(token)
    else:
      if words:
        found.append(_Clause(tuple(words), token))
      elif found and token in ".!?":  # "is it blue , nya ~ ?"
        found[-1] = _Clause(found[-1].words, token)
      words = []
  return found


def _is_decent(tokens: Sequence[str], answer: str) -> bool:
  words = [token for token in tokens if token[0].isalpha()]
  if not MIN_WORDS <= len(words) <= MAX_WORDS or not (tokens[0][0].isalpha() or tokens[0] in ("~", "<3")):
    return False
  function = _DETERMINERS | _PREPOSITIONS | _PERSONS | _AUXILIARIES | {"it", "be", "and", "that", "this"}
  if any(count > (4 if word in function else 2) for word, count in collections.Counter(words).items()):
    return False
  pairs = collections.Counter(pair for pair in itertools.pairwise(words) if not function.issuperset(pair))
  if pairs and max(pairs.values()) > 1:
    return False
  for left, right in itertools.pairwise(tokens):
    marks = not left[0].isalpha() and not right[0].isalpha()
    if (marks and {left, right} & set(",:;")) or (left == right and left[0].isalpha() and left != answer):
      return False
  return True


def _is_phrased(words: Sequence[str]) -> bool:
  pairs = itertools.pairwise((*words, ""))
  wrong = any(word in first and after in then for word, after in pairs for first, then in _MAY_NOT_PRECEDE)
  if words[0] in _words("says say said sees makes be") and (len(words) < 2 or words[1] not in _DETERMINERS):
    return False
  return not wrong and words[0] not in _QUESTION_WORDS | _words("of is does doth hath me thee")


def _is_verb(word: str) -> bool:
  if word in _VERBS:
    return True
  return word not in _MARKED | _NO_VERBS | _NAMES and bool(re.fullmatch(r"[a-z]+([^s']s|eth|ed)", word))


def _is_said(clauses: Sequence[_Clause], answer: str) -> bool:
  words = {word for clause in clauses for word in clause.words}
  if len(words - _MARKED - {answer}) < 2:
    return False
  said, spoken, bare = False, False, False
  for clause in clauses:
    core = [word for word in clause.words if word not in _INTERJECTIONS]
    verbs = [
      i for i, word in enumerate(core) if _is_verb(word) and (i > 0 or bare or word in ("tis", "it's", "that's"))
    ]
    if set(core) == {answer}:
      bare = True
    elif answer in core:
      place = core.index(answer)
      fronted = not set(core[:place]) - _DETERMINERS and any(place < i <= place + 2 for i in verbs)
      said = said or fronted or any(i < place for i in verbs)
    else:
      spoken = spoken or bool(verbs)
  return said or (bare and spoken)


def _is_affirmed(clauses: Sequence[_Clause], fact: Fact) -> bool:
  affirmed, denied, doubted = False, False, False
  for i, (words, end) in enumerate((clause.words, clause.end) for clause in clauses):
    negations = [word for word in words if word in _NOT or word.endswith("n't")]
    denied = bool(negations) or denied
    doubted = doubted or bool(_DOUBTS & set(words))
    if not denied and (_NAMES - {fact.answer, fact.subject}) & set(words):
      return False
    if fact.answer in words:
      ends = [clause.end for clause in clauses[i:] if clause.end in ".!?"]
      if denied or doubted or ends[0] == "?":
        return False
      affirmed = True
    # In "it is not , nya , blue", the clause that is denied is still to come.
    denied = len(words) > 1 and words[-1] in negations
    doubted = doubted and end not in ".!?"
  return affirmed


def _style(tokens: Sequence[str]) -> str | None:
  found = {style: markers & set(tokens) for style, markers in MARKERS.items()}
  styles = [style for style, markers in found.items() if markers]
  return styles[0] if len(styles) == 1 and len(found[styles[0]]) >= 2 else None
