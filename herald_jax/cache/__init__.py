"""Where the keys and values of finished blocks live, and what they cost."""
