"""Files that are written whole or not at all, and read as strictly as anything from a stranger."""
