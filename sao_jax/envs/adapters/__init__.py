"""Adapters for environments of other libraries."""
