"""Graph analyses and rewrites of sparsecomp, one concern a module.

Import the modules themselves (`from sparsecomp.passes.facts.analysis import analyse`): this package imports nothing.
"""
