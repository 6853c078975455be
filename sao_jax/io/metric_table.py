"""Every metric that a run writes: its topic, what it is, and what is healthy. `docs/metrics.md` is made from it.

    python -m sao_jax.io.metric_table > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
  """One metric, or all whose name begins with `key` if that ends with `/`."""

  key: str
  topic: str
  """Group in TensorBoard and W&B, and heading in the documentation."""
  meaning: str
  healthy: str = ""


_TITLES: Mapping[str, str] = {
  "progress": "Progress",
  "reward": "Reward",
  "env": "The environment's own numbers",
  "episodes": "Episodes",
  "off_policy": "Off-policy data",
  "policy": "Policy update",
  "critic": "Critic update",
  "rollout": "Rollouts",
  "failed": "Failed episodes",
  "speed": "Speed",
  "eval": "Evaluation",
}

METRICS: tuple[Metric, ...] = (
  Metric("step", "progress", "learner step, from 1; of an evaluation, the number of steps before it"),
  Metric("policy_version", "progress", "version of the weights that the step published"),
  Metric("time_s", "progress", "seconds of RL so far, over all runs in the workdir"),
  Metric("reward_mean", "reward", "mean total reward of the step's trajectories", "rises"),
  Metric(
    "reward_std", "reward", "its standard deviation over trajectories",
    "above 0: trajectories that all earn the same teach nothing",
  ),
  Metric("success_rate", "reward", "share of the step's trajectories that succeeded", "rises"),
  Metric("reward/", "reward", "mean of one reward function, before its weight", "rises, each of them"),
  Metric("env/", "env", "mean over trajectories of the last value of a number in `Step.info`"),
  Metric("trajectories", "episodes", "trajectories of the step", "`batch_size`"),
  Metric("action_tokens", "episodes", "tokens that the policy wrote in them"),
  Metric("turns_mean", "episodes", "actions per trajectory"),
  Metric("tokens_mean", "episodes", "tokens per trajectory, prompt and observations included"),
  Metric(
    "truncated_fraction", "episodes", "share of trajectories that were cut off by a limit",
    "low; if it grows, answers get longer: raise the limits",
  ),
  Metric("observation_fraction", "episodes", "share of observations among the tokens after prompts: GAE skips them"),
  Metric(
    "changed_prompts", "episodes", "trajectories whose prompt differs from an earlier one of the same task index", "0"
  ),
  Metric(
    "unmarked_observations", "episodes", "trajectories with an observation without a control token, though the prompt "
    "has some", "0: the model cannot tell where its turn begins",
  ),
  Metric(
    "staleness_mean", "off_policy", "versions between a trajectory's oldest action token and its use", "about 1 to 3"
  ),
  Metric("staleness_max", "off_policy", "the largest of the step", "at most `max_staleness`"),
  Metric("mixed_version_fraction", "off_policy", "share of trajectories that more than one version wrote"),
  Metric(
    "dis_masked_fraction", "off_policy", "share of action tokens that the loss masks or clips",
    "below a few per cent; 0 on-policy",
  ),
  Metric("dis_masked_low", "off_policy", "share whose ratio is too small"),
  Metric("dis_masked_high", "off_policy", "share whose ratio is too large"),
  Metric("masked_fraction_positive_adv", "off_policy", "masked or clipped share of tokens with a positive advantage"),
  Metric("masked_fraction_negative_adv", "off_policy", "masked or clipped share of tokens with a negative advantage"),
  Metric(
    "logprob_error", "off_policy",
    "mean absolute difference of the engine's and the learner's log-probs, on tokens of the learner's version",
    "below 1e-4 in float32; the run stops above `max_logprob_error`",
  ),
  Metric("logprob_error_tokens", "off_policy", "number of these tokens"),
  Metric(
    "ratio_mean", "off_policy", "mean ratio of the policy's probability to the rollout engine's",
    "near 1; exactly 1 up to rounding with staleness 0",
  ),
  Metric("approx_kl", "off_policy", "estimated KL divergence of policy and rollouts", "below 0.1"),
  Metric(
    "effective_sample_size", "off_policy", "number of equally weighted action tokens with the same information",
    "near `action_tokens`",
  ),
  Metric("policy_loss", "policy", "loss before the update; its level means little"),
  Metric("policy_grad_norm", "policy", "global L2 norm before clipping", "steady; spikes may precede a collapse"),
  Metric("entropy", "policy", "mean entropy of the action tokens' distributions, in nats", "falls slowly, not to 0"),
  Metric(
    "reference_kl", "policy", "estimated KL divergence of the policy from the reference, with `learner.kl_coef`",
    "grows slowly, and stays bounded",
  ),
  Metric("lambda_policy_mean", "policy", "mean λ of the policy's advantages"),
  Metric("advantage_mean", "policy", "mean advantage of action tokens", "near 0"),
  Metric("advantage_std", "policy", "its standard deviation", "above 0"),
  Metric("advantage_snr", "policy", "signal-to-noise ratio of the advantages, abs(mean) / standard deviation"),
  Metric("skipped_policy_nonfinite", "policy", "policy updates so far that were skipped: a value was not finite", "0"),
  Metric("skipped_policy_empty", "policy", "policy updates so far that were skipped: every token was masked", "0"),
  Metric("skipped_in_a_row", "policy", "learner steps in a row that skipped an update", "0"),
  Metric("value_loss", "critic", "squared error at the first of the K updates", "falls"),
  Metric("value_loss_last", "critic", "squared error at the last of them", "below `value_loss`"),
  Metric("critic_grad_norm", "critic", "global L2 norm before clipping, mean of the K updates", "steady"),
  Metric("explained_variance", "critic", "share of the returns' variance that the values explain", "above 0.5"),
  Metric(
    "explained_variance_before", "critic", "the same before the updates: on data that the critic has not seen",
    "above 0",
  ),
  Metric("returns_square_mean", "critic", "mean squared return"),
  Metric(
    "critic_error_ratio", "critic", "the critic's error over that of the constant 0", "below 1; above 4 it diverges"
  ),
  Metric("skipped_critic_nonfinite", "critic", "critic updates so far that were skipped: a value was not finite", "0"),
  Metric("skipped_critic_empty", "critic", "critic updates so far that were skipped: no token", "0"),
  Metric("queue_size", "rollout", "trajectories that wait for the learner", "below `queue_capacity`"),
  Metric("dropped_stale", "rollout", "trajectories so far that were dropped as too stale", "0, or a small share"),
  Metric("dropped_incomplete_group", "rollout", "trajectories so far whose group lost a member"),
  Metric("failed_episodes", "failed", "episodes of RL so far that gave no trajectory", "0"),
  Metric("failed/", "failed", "those of one kind", "0"),
  Metric("rollout_tokens_per_s", "speed", "sampled tokens per second since the row before"),
  Metric(
    "learner_busy_fraction", "speed", "share of the time that the learner worked",
    "near 1, unless `engine_busy_fraction` is",
  ),
  Metric("engine_busy_fraction", "speed", "share of the time that the engine's devices worked"),
  Metric("eval_success_rate", "eval", "pass@1 on held-out tasks; failed episodes are not solved", "rises"),
  Metric("eval_n", "eval", "episodes of the evaluation"),
  Metric("eval_low", "eval", "lower end of the 95 % interval of the success rate"),
  Metric("eval_high", "eval", "its upper end"),
  Metric("eval_turns_mean", "eval", "actions per episode"),
  Metric("eval_reward_mean", "eval", "mean reward of the episodes that did not fail", "rises"),
  Metric("eval_seconds", "eval", "seconds that the evaluation took"),
  Metric("eval_failed", "eval", "episodes that failed; they count in `eval_n` and not as solved", "0"),
  Metric("eval_failed/", "eval", "those of one kind", "0"),
  Metric("eval_reward/", "eval", "mean of one reward function"),
  Metric("eval_env/", "eval", "mean of one of the environment's own numbers"),
)  # fmt: skip
"""The table. A run writes no other key (tested)."""


def find(key: str) -> Metric | None:
  """Returns the row of a metric; None if the table lacks it.

  >>> find("env/turns").topic, find("nothing")
  ('env', None)
  """
  for metric in METRICS:
    if key == metric.key or (metric.key.endswith("/") and key.startswith(metric.key)):
      return metric
  return None


def tag(key: str) -> str:
  """Returns a metric's name in TensorBoard and W&B, which group names by what stands before the first slash.

  >>> tag("entropy"), tag("env/turns"), tag("eval_n"), tag("eval_env/turns"), tag("mine")
  ('policy/entropy', 'env/turns', 'eval/n', 'eval/env/turns', 'other/mine')
  """
  metric = find(key)
  topic = "other" if metric is None else metric.topic
  if topic == "eval":
    return f"eval/{key.removeprefix('eval_')}"
  return key if key.startswith(f"{topic}/") else f"{topic}/{key}"


def to_markdown() -> str:
  """Returns `docs/metrics.md`."""
  lines = [
    "# Metrics", "",
    "`metrics.jsonl` has a row per learner step and a row per evaluation. TensorBoard and Weights & Biases show the "
    "same", "numbers, grouped as below. This page is made from {py:mod}`sao_jax.io.metric_table`. A quantity that does "
    "not exist (no", "critic, no variance) is null in the file.",
  ]  # fmt: skip
  for topic, title in _TITLES.items():
    lines += ["", f"## {title}", "", "| key | what it is | healthy |", "|---|---|---|"]
    for metric in METRICS:
      if metric.topic == topic:
        name = f"{metric.key}NAME" if metric.key.endswith("/") else metric.key
        lines.append(f"| `{name}` | {metric.meaning} | {metric.healthy} |")
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  print(to_markdown(), end="")
