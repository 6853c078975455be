"""Grading of answers to mathematical problems."""
