"""Requests, batches and the compiled programs that run them."""
