"""Tasks that runs name in `config.env.factory`: each module makes a `sao_jax.types.Domain` out of options."""
