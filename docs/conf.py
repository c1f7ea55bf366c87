"""Sphinx settings of the documentation site; `make docs` builds it with warnings as errors."""

from modelfence import __version__

project = "modelfence"
author = "modelfence contributors"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_site"]
myst_heading_anchors = 3

# One page for each module, written into docs/api at build time, so that none can be forgotten.
apidoc_modules = [
    {
        "path": "../src/modelfence",
        "destination": "api",
        "separate_modules": True,
        "module_first": True,
        "automodule_options": {"members", "show-inheritance"},
    }
]
# A name is documented where it is defined, not again where it is exported.
autodoc_default_options = {"ignore-module-all": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"modelfence {release}"
