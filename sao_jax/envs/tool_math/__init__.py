"""Math problems that are solved with a Python tool."""
