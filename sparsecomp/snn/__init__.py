"""What is known about other libraries, one module each. No library is imported here."""

from sparsecomp.snn import norse, sinabs, snntorch, spikingjelly

TABLES = (spikingjelly.NEURONS, snntorch.NEURONS, norse.NEURONS, sinabs.NEURONS)
"""Neuron specifications by class name, as users import the class."""
