"""Which kernel in which configuration: templates, costs, measurement."""
