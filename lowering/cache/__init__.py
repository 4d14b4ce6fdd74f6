"""What tuning measured, kept on disk."""
