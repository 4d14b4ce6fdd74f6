"""Random programs against the analysis and the rewrite: `python -m tests.fuzz --programs 1000 --seed 0`.

A program is a graph as Dynamo would make it. Each is run by torch, with every fact of the analysis checked against the
values that flow, and again after the rewrite, with results and gradients compared with eager and with float64.
"""
