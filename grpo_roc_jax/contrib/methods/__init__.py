"""Methods outside the core: one file for each, with its recipe next to it (`NAME.py`, `NAME.yaml`).

`config` imports this package if it exists, so that a new file here is a new choice in every configuration. The core
names no file of this folder: without the folder, the package has fewer kinds and recipes.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
