"""Methods beside the core: one file for each, with its recipe beside it (`NAME.py`, `NAME.yaml`).

`config` imports this package where it exists, and so a new file here is a new choice in every configuration. Nothing of
the core names a file of this folder: without the folder, the package has fewer kinds and recipes.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
