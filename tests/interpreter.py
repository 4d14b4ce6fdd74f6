"""Triton's interpreter does work of which nothing comes, about half of the time of its tests: it puts functions of its
own in place of the language's whenever one jit function calls another, though the launch did so, and computes whether
integers overflow, though it tells of it in debugging alone. Here it does neither."""

import dataclasses
import sys
from typing import Any


def spare_work() -> None:
    """Of an interpreter that was imported."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[str] = set()

    def patch_once(function: Any) -> Any:
        """What is patched depends on the names in the function's module alone."""
        if function.__module__ in done:
            return interpreter._LangPatchScope()
        done.add(function.__module__)
        return patch(function)

    def launch_anew(*args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
