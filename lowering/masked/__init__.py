"""Launchers on masked weights."""
