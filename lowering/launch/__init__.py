"""From a problem to a launch with little host work."""
