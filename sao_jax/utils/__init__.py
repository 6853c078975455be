"""Small helpers that need nothing else of the library."""
