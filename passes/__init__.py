"""Graph analyses and rewrites of sparsecomp, one concern a module.

Import the modules themselves (`from sparsecomp.passes.analysis import analyse`): this package imports nothing, so that
the fact algebra can be used without loading the analysis that is built on it.
"""
