"""Launchers of layers on spikes."""
