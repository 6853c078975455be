"""Math problems to solve with a Python tool."""
