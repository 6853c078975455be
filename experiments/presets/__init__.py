"""Presets: files whose `get_config()` returns the ConfigDict of a `sao_jax.training.config.RunConfig`."""
