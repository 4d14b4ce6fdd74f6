"""Rules on spikes."""
