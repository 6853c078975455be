"""Programming tasks judged by hidden tests."""
