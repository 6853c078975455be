"""Rollout engines in Ray workers."""
