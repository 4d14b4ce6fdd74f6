"""Sparse weights whose patterns change while they are trained."""
