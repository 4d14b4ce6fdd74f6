"""Kernels of layers on spikes."""
