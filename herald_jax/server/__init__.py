"""The OpenAI-compatible server of `herald serve` (extra `serve`)."""
