"""Code that several commands share, and the programs that they start."""
