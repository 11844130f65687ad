"""Streamlit's AppTest. It looks for components in every package that is installed; here once, and not at each run of a page."""

from functools import cache

from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)

__all__ = ["AppTest"]
