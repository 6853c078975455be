"""Serves a checkpoint over HTTP: `python -m experiments.serve --checkpoint=DIR`. `rollout.server` lists the endpoints.

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "1 + 1 =", "max_tokens": 8}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import pathlib
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sao_jax import models
from sao_jax.models import ModelConfig
from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.server.completions import Completions
from sao_jax.rollout.server.config import ServerConfig
from sao_jax.tokenizers import HFTokenizer
from sao_jax.types import Params
from sao_jax.utils import process_exit, untrusted_files
from sao_jax.utils.extras import MissingExtraError, require_extra

if TYPE_CHECKING:
  from sao_jax.rollout.server.server import CompletionServer


def stop_ids_of(checkpoint: pathlib.Path) -> tuple[int, ...]:
  """Reads `eos_token_id` from a checkpoint's `generation_config.json` or `config.json`; empty if neither has it."""
  for name in ("generation_config.json", "config.json"):
    ids = untrusted_files.read_object_if_there(checkpoint / name).get("eos_token_id")
    if ids is not None:
      listed = ids if isinstance(ids, list) else [ids]
      if any(type(i) is not int for i in listed):
        raise ValueError(f"{checkpoint / name}: eos_token_id must be one or more ids; received {ids!r:.200}.")
      return tuple(listed)
  return ()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
  """Parses the command line."""
  description = "Serves a Hugging Face checkpoint over HTTP, with the endpoints of vLLM and SGLang."
  parser = argparse.ArgumentParser(prog="python -m experiments.serve", description=description)
  add = parser.add_argument
  add("--checkpoint", type=pathlib.Path, required=True, help="Hugging Face directory to serve.")
  add("--host", default=ServerConfig.host, help="Address to bind to. There is no authentication.")
  add("--port", type=int, default=ServerConfig.port, help="TCP port; 0: any free port, which is printed.")
  add("--allowed_hosts", default="", help="Host headers to accept besides localhost, comma-separated.")
  add("--name", help="Name of the model. Default: the checkpoint's path.")
  add("--weights_root", type=pathlib.Path, help="Load new weights only from below this folder. Default: no updates.")
  add("--weight_version", default="default", help="Label of the checkpoint's weights.")
  add("--stop_ids", help="Ids that end a completion, comma-separated. Default: eos_token_id of the checkpoint.")
  add("--temperature", type=float, default=1.0, help="Temperature of all completions; requests cannot change it.")
  add("--top_p", type=float, default=1.0, help="Nucleus mass of all completions; log-probs are those in the nucleus.")
  add("--num_slots", type=int, default=EngineConfig.num_slots, help="Completions decoded at once.")
  add("--max_len", type=int, default=2048, help="Maximum tokens of prompt and completion together.")
  add("--chunk_steps", type=int, default=EngineConfig.chunk_steps, help="Decode steps between checks for requests.")
  add("--max_requests", type=int, default=ServerConfig.max_requests, help="Maximum completions that wait or run.")
  add("--max_body_bytes", type=int, default=ServerConfig.max_body_bytes, help="Largest body of a completion request.")
  add("--seed", type=int, default=0, help="Seed of the sampling noise for requests without a seed.")
  return parser.parse_args(argv)


def load_params(folder: pathlib.Path, config: ModelConfig) -> Params:
  """Loads the parameters of a checkpoint; ValueError if it is not of the served model, `config`."""
  loaded, params = models.load_hf(folder, dtype=config.dtype, param_dtype=config.param_dtype)
  if loaded != config:
    raise ValueError(f"the checkpoint must be of the served model, {config}; received {loaded}.")
  return params


async def serve(server: CompletionServer) -> None:
  """Serves until SIGINT or SIGTERM. Raises the exception that ends the engine, if one does."""
  stop = asyncio.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    asyncio.get_running_loop().add_signal_handler(number, stop.set)
  async with server.running() as (host, port):
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(server.until_broken())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
      task.cancel()
      with contextlib.suppress(asyncio.CancelledError):
        await task
    for task in done:
      task.result()


def main(argv: Sequence[str] | None = None) -> None:
  """Loads the checkpoint and serves it. Wrong arguments end the command with a one-line message."""
  logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
  arguments = parse_arguments(argv)
  try:
    _run(arguments)
  except (OSError, ValueError, MissingExtraError) as error:
    raise SystemExit(f"{type(error).__name__}: {error}") from error


def _run(arguments: argparse.Namespace) -> None:
  engine = EngineConfig(
    num_slots=arguments.num_slots,
    max_len=arguments.max_len,
    max_action_tokens=arguments.max_len,
    chunk_steps=arguments.chunk_steps,
    temperature=arguments.temperature,
    top_p=arguments.top_p,
    token_budget=512,
  )
  settings = ServerConfig(
    host=arguments.host,
    port=arguments.port,
    allowed_hosts=tuple(name.strip() for name in arguments.allowed_hosts.split(",") if name.strip()),
    weights_root=arguments.weights_root,
    max_body_bytes=arguments.max_body_bytes,
    max_requests=arguments.max_requests,
  )
  config, params = models.load_hf(arguments.checkpoint)
  stop_ids = stop_ids_of(arguments.checkpoint)
  if arguments.stop_ids is not None:
    words = arguments.stop_ids.split(",")
    stop_ids = tuple(int(word) if word.strip().isdecimal() else -1 for word in words)
  if not stop_ids or not all(0 <= i < config.vocab_size for i in stop_ids):
    received = stop_ids if arguments.stop_ids is None else arguments.stop_ids
    raise ValueError(f"--stop_ids must be ids below {config.vocab_size}, comma-separated; received {received}.")
  has_tokenizer = (arguments.checkpoint / "tokenizer.json").exists()
  tokenizer = HFTokenizer.load(arguments.checkpoint) if has_tokenizer else None  # needs the extra `hf`
  with require_extra("serve"):
    from sao_jax.rollout.server.server import CompletionServer
  with Completions(
    model=models.cached_policy(config),
    params=params,
    label=arguments.weight_version,
    vocab_size=config.vocab_size,
    stop_ids=stop_ids,
    config=engine,
    seed=arguments.seed,
  ) as completions:
    server = CompletionServer(
      completions,
      name=arguments.name or str(arguments.checkpoint),
      load=lambda folder: load_params(folder, config),
      config=settings,
      tokenizer=tokenizer,
    )
    asyncio.run(serve(server))


if __name__ == "__main__":
  with process_exit.exit_after_main():
    main()
