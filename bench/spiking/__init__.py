"""Networks of spiking neurons, and their layers."""
