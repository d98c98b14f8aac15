"""`herald serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import Any

from herald_jax._checks import ConfigError, require
from herald_jax.commands.generate import MODEL_OPTIONS

HELP = "Serve a model through OpenAI's API."

# Options named after the fields of EngineConfig and ServerLimits. Only those that were given
# reach them, so that every default is written down once, in the library.
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "max_waiting": dict(type=int, metavar="N", help="most samples that may wait; then 429"),
    "aging_ticks": dict(type=int, metavar="N", help="steps of waiting that are worth a priority"),
}
LIMIT_OPTIONS: dict[str, dict[str, Any]] = {
    "max_body_bytes": dict(type=int, metavar="N", help="largest body of a request"),
    "max_concurrent": dict(type=int, metavar="N", help="requests answered at the same time"),
    "max_samples": dict(type=int, metavar="N", help="most samples of one request"),
    "max_prompt_tokens": dict(type=int, metavar="N", help="longest prompt"),
    "default_max_tokens": dict(type=int, metavar="N", help="max_tokens of requests without it"),
    "min_priority": dict(type=int, metavar="N", help="best priority that may be asked for"),
    "max_priority": dict(type=int, metavar="N", help="worst priority that may be asked for"),
    "read_seconds": dict(type=float, metavar="S", help="time in which a body must come"),
    "write_seconds": dict(type=float, metavar="S", help="time to take a piece of an answer"),
    "drain_seconds": dict(type=float, metavar="S", help="time to finish after SIGTERM"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--model", required=True, help="converted folder, Hugging Face folder or hub id"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="default: what --model says")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s; 0 picks one")
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with the key that clients must send; default: HERALD_JAX_API_KEY, or none",
    )
    parser.add_argument(
        "--allow-remote-without-key",
        action="store_true",
        help="let a server without a key be bound to another address than the loopback's",
    )
    parser.add_argument(
        "--no-warmup", action="store_true", help="compile programs when requests need them"
    )
    parser.add_argument("--access-log", action="store_true", help="log every request")
    groups = (("model", MODEL_OPTIONS), ("engine", ENGINE_OPTIONS), ("limits", LIMIT_OPTIONS))
    for title, options in groups:
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, dest=name, default=argparse.SUPPRESS, **settings)


def run(options: argparse.Namespace) -> int:
    """Serves and returns the exit code."""
    require(0 <= options.port < 65536, "port", options.port, "in 0..65535")
    from herald_jax.server.app import require_extra
    from herald_jax.server.limits import ServerLimits, is_loopback, read_api_key

    require_extra()
    limits = ServerLimits(**_given(options, LIMIT_OPTIONS))
    key = read_api_key(options.api_key_file)
    is_local = is_loopback(options.host)
    if not (is_local or key or options.allow_remote_without_key):
        raise ConfigError(
            f"host={options.host!r} lets other machines use this server, and it has no API key. "
            "Give one with --api-key-file, or say --allow-remote-without-key."
        )
    from herald_jax.engine.async_llm import AsyncLLM
    from herald_jax.engine.config import EngineConfig
    from herald_jax.server.run import serve
    from herald_jax.server.service import Service

    model_options = _given(options, MODEL_OPTIONS | ENGINE_OPTIONS)
    fields = {field.name for field in dataclasses.fields(EngineConfig)} & set(model_options)
    engine = EngineConfig(**{name: model_options.pop(name) for name in fields})
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    llm = AsyncLLM.from_model(
        options.model, engine=engine, warmup=not options.no_warmup, **model_options
    )
    try:
        name = options.served_model_name or options.model
        service = Service(llm, name, limits, api_key=key, is_local=is_local)
        return serve(service, host=options.host, port=options.port, access_log=options.access_log)
    finally:
        llm.close()


def _given(options: argparse.Namespace, names: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if hasattr(options, name)}
