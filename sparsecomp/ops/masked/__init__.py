"""Operators on masked weights."""
