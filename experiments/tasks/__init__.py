"""Tasks for `config.env.factory`: each module makes a `sao_jax.types.Domain` from options."""
