"""Work of Triton's interpreter and of Dynamo that nothing comes of in a test: a good part of the time of all tests."""

import dataclasses
import sys
from contextlib import suppress
from typing import Any


def spare_work() -> None:
    """Of what was imported before. A version of it that has other names does its work."""
    for name, spare in (("triton.runtime.interpreter", _spare_interpreter), ("torch._dynamo", _spare_dynamo)):
        with suppress(AttributeError, TypeError):
            if name in sys.modules:
                spare(sys.modules[name])


def _spare_interpreter(interpreter: Any) -> None:
    """It puts functions of its own in place of the language's at each call of one jit function by another, though the
    launch did so, and computes whether integers overflow, though it tells of it in debugging alone."""
    builder = interpreter.interpreter_builder
    patch, launch, nothing = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._LangPatchScope
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    done: set[str] = set()

    def patch_once(function: Any) -> Any:
        """What is patched depends on the names in the function's module alone."""
        if function.__module__ in done:
            return nothing()
        done.add(function.__module__)
        return patch(function)

    def launch_anew(*args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(*args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _spare_dynamo(dynamo: Any) -> None:
    """It collects garbage after each compilation, and flushes the processor's caches to log how long guards take."""
    dynamo.config.run_gc_after_compile = False
    dynamo.guards.profile_guard_manager = lambda *_: 0.0
