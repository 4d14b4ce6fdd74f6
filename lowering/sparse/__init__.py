"""Launchers of products with sparse weights."""
