"""Adapters for the environments of other libraries."""
