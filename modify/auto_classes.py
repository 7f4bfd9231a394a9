"""Makes transformers' Auto classes know converted checkpoints, without loading transformers for it.

transformers has no entry point by which a package could announce a model: someone has to call `AutoConfig.register`.
Doing that in `import modify` would load transformers and torch: seconds, for a program that only runs an exported
bundle. So a finder waits for transformers to load its `configuration_auto`, and registers the config right after. The
model follows when a config of a converted checkpoint is made (see `MoDModelConfig`): the Auto classes make one before
they look for its model, and by then transformers has finished its own, circular, imports.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto.configuration_auto"


def register_when_loaded() -> None:
    """Register converted checkpoints with the Auto classes: now, or as soon as transformers loads them."""
    if _AUTO in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module, as the other finders do, and has `_register` called when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that registers; None for every other module."""
        if fullname != _AUTO:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            loader.exec_module = execute_and_register
        return spec


def _register() -> None:
    importlib.import_module("modify.model_config")  # which registers itself
