"""The networks: pre-norm decoders whose options cover the supported families."""

from herald_jax.models.decoder import (
    Decoder,
    abstract_params,
    bind,
    check_params,
    copy_params,
    random_params,
)

__all__ = ["Decoder", "abstract_params", "bind", "check_params", "copy_params", "random_params"]
