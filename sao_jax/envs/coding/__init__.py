"""Programming tasks that hidden tests judge."""
