"""Transfer functions of the fact analysis, one operator family a module.

Importing this package registers all of them.
"""

import importlib

from sparsecomp.discovery import modules_within

for _name in modules_within(__name__):
    importlib.import_module(_name)
