"""Grading of answers to math problems."""
