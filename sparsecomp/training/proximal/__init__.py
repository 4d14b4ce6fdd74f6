"""Training towards exact zeros."""
