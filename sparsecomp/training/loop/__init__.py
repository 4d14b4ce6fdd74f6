"""The training loop: batches, callbacks, checkpoints."""
