"""From a model to compiled code: the backend, `optimize` and `explain`, and what they share."""
