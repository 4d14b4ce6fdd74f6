"""Operators on sparse weights."""
