"""The package's modules by name, read off the source tree without importing anything."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
_FOLDERS = {
    "sparsecomp": ROOT / "sparsecomp", "sparsecomp.passes": ROOT / "passes", "sparsecomp.lowering": ROOT / "lowering",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Files by module name."""
    found = {}
    for package, folder in _FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
