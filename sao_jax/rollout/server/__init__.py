"""An HTTP server over the rollout engine."""
