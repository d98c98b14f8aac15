"""The networks: pre-norm decoders whose options cover the supported families."""

from herald_jax.models.decoder import Decoder, abstract_params, bind, random_params

__all__ = ["Decoder", "abstract_params", "bind", "random_params"]
