"""Streamlit's AppTest. It looks for components in every package that is installed; here once, and not at each run of a page.

A run may take as long as a test may. Streamlit's own limit of 3 s is passed on a loaded machine.
"""

from functools import cache, partial

from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)
for source in ("from_file", "from_function", "from_string"):
    setattr(AppTest, source, partial(getattr(AppTest, source), default_timeout=300))

__all__ = ["AppTest"]
