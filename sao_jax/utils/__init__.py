"""Helpers that do not depend on the rest of the library."""
