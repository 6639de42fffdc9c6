"""One file per further method: its settings, its functions, its source. All are imported with the package, so that a
new file here is a new choice in every configuration."""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
