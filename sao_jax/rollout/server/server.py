"""HTTP server over the rollout engine, with the endpoints of vLLM and of SGLang that rollout clients use.

    POST /v1/completions             OpenAI's, with vLLM's token ids      POST /generate                    SGLang's
    POST /pause?mode=abort|wait      vLLM                                 POST /pause_generation            SGLang
    POST /resume                     vLLM                                 POST /continue_generation         SGLang
    POST /collective_rpc             vLLM: method "reload_weights" only   POST /update_weights_from_disk    SGLang
    POST /update_weight_version      vLLM                                 POST /abort_request               SGLang
    GET  /weight_info                vLLM                                 GET  /model_info                  SGLang
    GET  /server_info                vLLM
    GET  /v1/models, /health

Unknown fields are rejected by name. There is no authentication: everyone who reaches the port may use all endpoints.
Only requests of web pages are rejected: those with an `Origin` header and, on loopback, those whose `Host` is not this
server's (see `hosts.py`). Completions and other requests have separate limits on their number and size, so that neither
can block the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pathlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from sao_jax.rollout.server.admission import Admission
from sao_jax.rollout.server.completions import Completion, Completions, Job
from sao_jax.rollout.server.config import ServerConfig
from sao_jax.rollout.server.hosts import HostCheck, is_loopback
from sao_jax.rollout.server.request_fields import BadRequestError, RequestFields
from sao_jax.rollout.server.weight_updates import WeightUpdates
from sao_jax.types import Params

_log = logging.getLogger(__name__)

_CHECK_S = 0.5
_SHUTDOWN_S = 10.0
_OPENAI_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "n": (1,), "best_of": (1,), "echo": (False,), "stream": (False,), "suffix": (), "stop": ([],), "logit_bias": (),
  "top_k": (0, -1), "min_p": (0, 0.0), "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0),
  "repetition_penalty": (1, 1.0), "min_tokens": (0,), "skip_special_tokens": (False,),
  "spaces_between_special_tokens": (True, False), "add_special_tokens": (False,), "include_stop_str_in_output": (True,),
}  # fmt: skip
_SGLANG_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "stream": (False,), "return_text_in_logprobs": (False,), "logprob_start_len": (-1,), "top_logprobs_num": (0,),
}  # fmt: skip
_SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
  "n": (1,), "stop": ([],), "top_k": (-1,), "min_p": (0, 0.0), "frequency_penalty": (0, 0.0),
  "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0), "min_new_tokens": (0,), "skip_special_tokens": (False,),
  "spaces_between_special_tokens": (True, False), "no_stop_trim": (True,),
}  # fmt: skip


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FieldsHandler = Callable[[web.Request, RequestFields], Awaitable[web.StreamResponse]]


class TextCodec(Protocol):
  """Interface of a tokenizer for text prompts and completions."""

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


class CompletionServer:
  """HTTP server for the completions of an engine.

  Text is the plain decoding of the ids. Nothing is added to a prompt (no beginning-of-sequence token), and nothing is
  removed from a completion (neither control tokens nor the stop token).

  Args:
    completions: the engine; started and stopped by the caller.
    name: name of the model.
    load: reads the parameters in a folder; raises ValueError or OSError if they do not fit this model.
    config: settings.
    tokenizer: for prompts and completions as text; None: token ids only.
  """

  def __init__(
    self,
    completions: Completions,
    *,
    name: str,
    load: Callable[[pathlib.Path], Params],
    config: ServerConfig,
    tokenizer: TextCodec | None = None,
  ):
    self._completions = completions
    self._name = name
    self._updates = WeightUpdates(completions, load)
    self._config = config
    self._tokenizer = tokenizer
    self._jobs: dict[str, Job] = {}
    self._hosts = HostCheck(config.host, config.allowed_hosts)
    control_bytes = min(config.max_body_bytes, config.max_control_body_bytes)
    self._completing, self._controlling = (
      Admission(max_requests=config.max_requests, max_body_bytes=most, body_timeout_s=config.body_timeout_s)
      for most in (config.max_body_bytes, control_bytes)
    )

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[tuple[str, int]]:
    """Serves inside the block; yields the host and port that the server is bound to."""
    runner = web.AppRunner(
      self.application(), handler_cancellation=True, access_log=None, max_line_size=8190, max_field_size=8190,
      shutdown_timeout=_SHUTDOWN_S, keepalive_timeout=self._config.body_timeout_s, auto_decompress=False,
    )  # fmt: skip
    await runner.setup()
    try:
      await web.TCPSite(runner, self._config.host, self._config.port).start()
      if not is_loopback(self._config.host):
        _log.warning("bound to %s without authentication: everyone who reaches it can use it", self._config.host)
      yield runner.addresses[0][:2]
    finally:
      self._completions.abort_all()  # cleanup would wait for running completions
      await runner.cleanup()
      await self._updates.close()

  async def until_broken(self) -> None:
    """Never returns; raises the exception that ends the engine, if one does."""
    while True:
      self._completions.check()
      await asyncio.sleep(_CHECK_S)

  def application(self) -> web.Application:
    """Returns the application with its routes."""
    app = web.Application(middlewares=[_errors_as_json, self._known_clients_only])
    gets: Mapping[str, Handler] = {
      "/health": self._health,
      "/v1/models": self._models,
      "/server_info": self._server_info,
      "/model_info": self._model_info,
      "/weight_info": self._model_info,
    }
    completing: Mapping[str, FieldsHandler] = {"/v1/completions": self._openai, "/generate": self._sglang}
    controlling: Mapping[str, FieldsHandler] = {
      "/pause": self._pause_vllm,
      "/resume": self._resume,
      "/collective_rpc": self._collective_rpc,
      "/update_weight_version": self._rename,
      "/pause_generation": self._pause_sglang,
      "/continue_generation": self._resume,
      "/update_weights_from_disk": self._update_from_disk,
      "/abort_request": self._abort,
    }
    for path, get in gets.items():
      app.router.add_get(path, _without_fields(get, self._controlling), allow_head=False)
    for admission, posts in ((self._completing, completing), (self._controlling, controlling)):
      for path, post in posts.items():
        app.router.add_post(path, _with_fields(post, admission))
    return app

  @web.middleware
  async def _known_clients_only(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Rejects requests of web pages: those with an `Origin`, and those sent here by DNS rebinding."""
    if "Origin" in request.headers:
      raise BadRequestError("requests of web pages (with an Origin header) are rejected.", status=403)
    hosts = request.headers.getall("Host", [])
    address = request.get_extra_info("sockname")
    if address is None or not self._hosts.accepts(hosts, address[1]):
      allowed = "localhost, 127.0.0.1 or [::1] with this server's port, or one of ServerConfig.allowed_hosts"
      raise BadRequestError(f"Host must be {allowed}; received {', '.join(hosts) or 'none':.200}.", status=403)
    if not request.raw_path.startswith("/"):  # a host in the target would override the one in the header
      raise BadRequestError(f"the request target must be a path; received {request.raw_path:.200}.")
    return await handler(request)

  async def _health(self, request: web.Request) -> web.Response:
    self._completions.check()
    return web.Response()

  async def _models(self, request: web.Request) -> web.Response:
    model = {
      "id": self._name,
      "object": "model",
      "owned_by": "sao_jax",
      "max_model_len": self._completions.config.max_len,
    }
    return web.json_response({"object": "list", "data": [model]})

  async def _server_info(self, request: web.Request) -> web.Response:
    model = {"logprobs_mode": "processed_logprobs", "max_model_len": self._completions.config.max_len}
    return web.json_response({"vllm_config": {"model_config": model}})

  async def _model_info(self, request: web.Request) -> web.Response:
    return web.json_response(
      {"model_path": self._name, "is_generation": True, "weight_version": self._completions.label}
    )

  async def _openai(self, request: web.Request, fields: RequestFields) -> web.Response:
    model = fields.text("model")
    if model not in (None, self._name):
      raise BadRequestError(f"model must be {self._name}; received {model}.", field="model", status=404)
    prompt = self._prompt(fields, "prompt", "prompt")
    with_logprobs = fields.integer("logprobs", low=0, high=0) is not None
    with_ids, as_ids = fields.boolean("return_token_ids"), fields.boolean("return_tokens_as_token_ids")
    max_tokens = fields.integer("max_tokens", low=1, high=2**31, default=16)
    self._check_sampling(fields)
    rid = fields.text("request_id") or uuid.uuid4().hex
    seed = fields.integer("seed", low=-(2**63), high=2**63 - 1)
    fields.text("user")
    fields.finish(_OPENAI_NEUTRAL)
    done = await self._complete(prompt, max_tokens, seed, rid)
    tokens = done.tokens.tolist()
    words = [self._word(i, as_ids) for i in tokens]
    logprobs = {
      "tokens": words, "token_logprobs": [float(x) for x in done.logp], "top_logprobs": None, "text_offset": [],
    }  # fmt: skip
    choice = {
      "index": 0, "text": self._text(tokens), "logprobs": logprobs if with_logprobs else None,
      "finish_reason": done.finish, "stop_reason": tokens[-1] if done.finish == "stop" else None,
      "token_ids": tokens if with_ids else None, "prompt_token_ids": prompt if with_ids else None,
    }  # fmt: skip
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt) + len(tokens)}
    return web.json_response({
      "id": rid, "object": "text_completion", "created": int(time.time()), "model": self._name, "choices": [choice],
      "usage": usage,
    })  # fmt: skip

  async def _sglang(self, request: web.Request, fields: RequestFields) -> web.Response:
    prompt = self._prompt(fields, "input_ids", "text")
    with_logprobs = fields.boolean("return_logprob")
    rid = fields.text("rid") or uuid.uuid4().hex
    sampling = fields.nested("sampling_params")
    max_tokens = sampling.integer("max_new_tokens", low=1, high=2**31, default=128)
    self._check_sampling(sampling)
    seed = sampling.integer("sampling_seed", low=-(2**63), high=2**63 - 1)
    sampling.finish(_SAMPLING_NEUTRAL)
    fields.finish(_SGLANG_NEUTRAL)
    done = await self._complete(prompt, max_tokens, seed, rid)
    tokens = done.tokens.tolist()
    reason: dict[str, Any] = {"type": done.finish}
    if done.finish == "stop":
      reason["matched"] = tokens[-1]
    elif done.finish == "length":
      reason["length"] = len(tokens)
    meta = {
      "id": rid, "finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": len(tokens),
      "weight_version": done.label,
    }  # fmt: skip
    if with_logprobs:
      meta["output_token_logprobs"] = [[float(x), i, None] for x, i in zip(done.logp, tokens, strict=True)]
    return web.json_response({"text": self._text(tokens), "output_ids": tokens, "meta_info": meta})

  def _prompt(self, fields: RequestFields, ids_field: str, text_field: str) -> list[int]:
    if fields.is_text(text_field):
      if self._tokenizer is None:
        raise BadRequestError(f"{text_field} must be token ids: this server has no tokenizer.", field=text_field)
      return self._tokenizer.encode(fields.text(text_field, max_chars=self._config.max_body_bytes) or "")
    prompt = fields.ids(ids_field)
    if prompt is None:
      raise BadRequestError(f"{ids_field} is required.", field=ids_field)
    return prompt

  def _check_sampling(self, fields: RequestFields) -> None:
    """Rejects sampling settings that differ from those compiled into the engine."""
    for name in ("temperature", "top_p"):
      fixed = getattr(self._completions.config, name)
      if (value := fields.number(name, default=fixed)) != fixed:
        raise BadRequestError(f"{name} must be {fixed}, as set when the server started; received {value}.", field=name)
    stop_ids = fields.ids("stop_token_ids")
    if stop_ids and set(stop_ids) != self._completions.stop_ids:
      allowed = f"{sorted(self._completions.stop_ids)}, as set when the server started"
      raise BadRequestError(f"stop_token_ids must be {allowed}; received {stop_ids!r:.80}.", field="stop_token_ids")
    if fields.boolean("ignore_eos") and not stop_ids:
      message = "ignore_eos must come with stop_token_ids: the server's stop ids always end a completion."
      raise BadRequestError(message, field="ignore_eos")

  async def _complete(self, prompt: list[int], max_tokens: int | None, seed: int | None, rid: str) -> Completion:
    if rid in self._jobs:
      raise BadRequestError(f"a request with the id {rid} is already running.", field="rid")
    try:
      job = self._completions.submit(prompt, max_tokens=max_tokens or 0, seed=seed)
    except ValueError as error:
      raise BadRequestError(str(error)) from error
    self._jobs[rid] = job
    try:
      return await asyncio.shield(asyncio.wrap_future(job.result))
    except asyncio.CancelledError:  # the client has disconnected
      self._completions.abort(job)
      raise
    finally:
      del self._jobs[rid]

  def _text(self, tokens: list[int]) -> str:
    return "" if self._tokenizer is None else self._tokenizer.decode(tokens)

  def _word(self, token: int, as_id: bool) -> str:
    return f"token_id:{token}" if as_id or self._tokenizer is None else self._tokenizer.decode([token])

  async def _pause_vllm(self, request: web.Request, fields: RequestFields) -> web.Response:
    fields.finish({})
    unknown = sorted(set(request.query) - {"mode", "clear_cache"})
    if unknown:
      raise BadRequestError(f"unknown parameter {unknown[0]}.", field=unknown[0])
    await self._pause(request.query.get("mode", "abort"), ("abort", "wait"))
    return web.json_response({"status": "paused"})

  async def _pause_sglang(self, request: web.Request, fields: RequestFields) -> web.Response:
    mode = fields.text("mode") or "abort"
    fields.finish({})
    await self._pause(mode, ("abort",))
    return web.json_response({"status": "ok", "message": "Generation paused successfully."})

  async def _pause(self, mode: str, allowed: tuple[str, ...]) -> None:
    if mode not in allowed:
      raise BadRequestError(f"mode must be {' or '.join(allowed)}; received {mode}.", field="mode")
    await self._updates.pause(abort=mode == "abort")

  async def _resume(self, request: web.Request, fields: RequestFields) -> web.Response:
    fields.finish({"torch_empty_cache": (True, False)})
    self._updates.resume()
    return web.json_response({"status": "resumed"})

  async def _abort(self, request: web.Request, fields: RequestFields) -> web.Response:
    rid, everything = fields.text("rid"), fields.boolean("abort_all")
    fields.finish({})
    if everything:
      self._completions.abort_all()
    elif rid in self._jobs:
      self._completions.abort(self._jobs[rid])
    return web.Response()

  async def _update_from_disk(self, request: web.Request, fields: RequestFields) -> web.Response:
    path, label = fields.text("model_path"), fields.text("weight_version", max_chars=200)
    abort = fields.boolean("abort_all_requests")
    fields.finish({"load_format": ("auto", "safetensors"), "flush_cache": (True, False)})
    try:
      aborted = await self._update(path, "model_path", label, abort=abort)
    except BadRequestError as error:
      return web.json_response({"success": False, "message": str(error)}, status=error.status)
    return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": aborted})

  async def _collective_rpc(self, request: web.Request, fields: RequestFields) -> web.Response:
    method, kwargs = fields.text("method"), fields.nested("kwargs")
    if method != "reload_weights":
      raise BadRequestError(f"method must be reload_weights; received {method}.", field="method")
    path = kwargs.text("weights_path")
    kwargs.finish({"is_checkpoint_format": (True,)})
    fields.finish({"args": ([],), "timeout": ()})
    await self._update(path, "kwargs.weights_path", None, abort=False)
    return web.json_response({"results": [None]})

  async def _rename(self, request: web.Request, fields: RequestFields) -> web.Response:
    label = fields.text("new_version", max_chars=200)
    fields.finish({})
    if label is None:
      raise BadRequestError("new_version is required.", field="new_version")
    await self._updates.rename(label)
    return web.json_response({"success": True, "new_version": label})

  async def _update(self, path: str | None, field: str, label: str | None, *, abort: bool) -> int:
    return await self._updates.update(self._folder(path, field), field, label, abort=abort)

  def _folder(self, path: str | None, field: str) -> pathlib.Path:
    root = self._config.weights_root
    if root is None:
      raise BadRequestError("weights cannot be updated: the server was started without a weights_root.", status=403)
    if path is None:
      raise BadRequestError(f"{field} is required.", field=field)
    folder = (root / path.replace("\0", "?")).resolve()
    if not folder.is_relative_to(root.resolve()):
      raise BadRequestError(f"{field} must lie below {root}; received {path}.", field=field, status=403)
    if not os.path.isdir(folder):  # unlike Path.is_dir, False (no error) if the name is too long
      raise BadRequestError(f"{field} must be a folder; received {path}.", field=field)
    return folder


def _without_fields(handler: Handler, admission: Admission) -> Handler:
  """Wraps the handler of a GET, whose body is ignored."""

  async def handle(request: web.Request) -> web.StreamResponse:
    async with admission.admit(request):
      return await handler(request)

  return handle


def _with_fields(handler: FieldsHandler, admission: Admission) -> Handler:
  """Wraps the handler of a POST, which receives the fields of the body."""

  async def handle(request: web.Request) -> web.StreamResponse:
    async with admission.admit(request) as body:
      return await handler(request, RequestFields(body))

  return handle


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
  """Turns errors into JSON responses. Rejections name the problem; errors of the server are logged and not shown."""
  field: str | None = None
  try:
    return await handler(request)
  except BadRequestError as error:
    status, message, field = error.status, str(error), error.field
  except web.HTTPException as error:
    status, message = error.status, f"{request.method} {request.path}: {error.reason}"
  except Exception as error:  # noqa: BLE001 (logged; one request must not end the server)
    _log.exception("%s %s failed", request.method, request.path)
    status, message = 500, f"{type(error).__name__} in the server; see its log."
  body = {"error": {"message": message, "type": "invalid_request_error", "param": field, "code": status}}
  return web.json_response(body, status=status)
